"""Figures 5 and 6: the product's uncertainty starts high and decreases at every exit; finetuning closes its calibration gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from anytime.combine import Latest
from anytime.metrics import follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, listed, means
from anytime.reproduce.group import (
    BRIER,
    ECE,
    ENTROPY,
    NLL,
    PLAIN,
    SET_COVERAGE,
    SET_SIZE,
    TEN_AGAIN,
    Group,
    rows_in_words,
    ten_rows,
)
from anytime.reproduce.needs import MSDNET_100, REPRODUCED_100
from anytime.reproduce.plots import inputs_plot, line
from anytime.reproduce.runs import Run, on_shared_rows
from anytime.reproduce.sets import SIZE_HEADINGS, SPLIT_WORDS, size_rows, with_random_sets
from anytime.reproduce.studies.finetune import SOFTPLUS


def uncertainty(draft: Draft) -> Finding:
    """Mean entropy, and over many calibration splits the mean size of the prediction sets, at each exit."""
    runs = draft.runs.need(MSDNET_100)
    published, (sets, splits) = Group.published(draft.runs.need(REPRODUCED_100)), with_random_sets(runs)
    draft.used += [*published.runs, *runs]
    for title, name, group, metric, theirs, tolerance, unit in (
        ("Entropy", "entropy", published, ENTROPY, paper.ENTROPY, paper.ENTROPY_TOLERANCE, "nats"),
        ("Prediction sets", "set size", sets, SET_SIZE, paper.SET_SIZE, paper.SET_SIZE_TOLERANCE, "classes"),
    ):
        known = dict(theirs) if group.data == "cifar100" else {}
        draft.plots.append(group.plot(title, metric, known=known))
        for rule in PLAIN if known else ():
            again = rule == "caching"  # at exit 1 it is the backbone
            ours = group.curve(rule, metric)
            draft.compare_exits(f"{name}, {rule}", ours, known[rule], tolerance=tolerance, unit=unit, from_second=again)
    entropy = published.curve("product", ENTROPY)
    sizes = {rule: [value.mean for value in values] for rule, values in sets.curves(SET_SIZE).items()}
    vary = {rule: max(values) / min(values) for rule, values in sizes.items()}
    draft.claim(
        "the product's entropy decreases at every exit",
        all(after.mean < before.mean for before, after in pairwise(entropy)),
        f"{means(entropy, 2)} nats",
    )
    draft.claim(
        "the product's sets are less than half as large at the last exit as at the first",
        sizes["product"][-1] < sizes["product"][0] / 2,
        f"{means(sets.curve('product', SET_SIZE))} classes, coverage {means(sets.curve('product', SET_COVERAGE))} %",
    )
    draft.claim(
        "the sets of the backbone and of caching vary less over the exits than the product's",
        max(vary["latest"], vary["caching"]) < vary["product"],
        f"largest over smallest mean size: {listed(vary, '')}",
    )
    draft.table += size_rows(splits)
    draft.numbers = published.numbers(ENTROPY, SET_SIZE) | {"sets": sets.numbers(SET_SIZE, SET_COVERAGE)}
    return draft.finding(
        rows=f"entropy: {published.rows}; sets: {rows_in_words(runs, kept=True)}, {SPLIT_WORDS}",
        note="Sets are RAPS as the paper's released code computes them (α = .05, λ = .01, k = 5), with fixed random seeds; ± "
        "is one standard deviation over all seeds and splits, and the table shows its two parts. The paper's belong to one "
        "checkpoint and one split of 10,000 rows. Its entropies of MSDNet and caching are known at the first and last exit "
        f"only. The sizes depend on the last few percent of labels, which a network ranks low. {_one_split(published, runs)}",
        headings=SIZE_HEADINGS,
    )


def _one_split(group: Group, runs: Sequence[Run]) -> str:
    """The stored sizes of the networks that the entropies belong to, by one split of all test rows, in words."""
    if group.runs == tuple(runs) or group.runs[0].folder is None:
        return ""
    sizes = "; ".join(f"{rule} {means(values)}" for rule, values in group.curves(SET_SIZE).items())
    return (
        f"The sets are of {runs[0].name.partition('-seed')[0]}, since too few logits of the networks of the entropies were "
        f"kept. Not counted: with the latter, and one split of all {group.runs[0].rows():,} test rows, the same for all seeds, "
        f"of which a fifth calibrates as in the paper, the mean sizes are {sizes} classes."
    )


def calibration_gap(draft: Draft) -> Finding:
    """Calibration error of the three rules, and of a finetuned network if there is a run of one."""
    group = Group.published(draft.runs.need(REPRODUCED_100))
    known = {rule: paper.ECE[rule] for rule in PLAIN} if group.data == "cifar100" else {}
    error, ours = group.plot("Calibration error", ECE, known=known), group.curves(ECE)
    tuned = draft.runs.find("msdnet-finetuned", group.data)
    draft.used += [*group.runs, *tuned]
    for rule in known:
        again = rule == "caching"  # at exit 1 it is the backbone
        draft.compare_exits(f"ECE, {rule}", ours[rule], known[rule], tolerance=paper.ECE_TOLERANCE, from_second=again)
    draft.claim(
        "the product's error at the first exit is far above the backbone's",
        ours["product"][0].mean > 2 * ours["latest"][0].mean,
        f"product {means(ours['product'], 3)}; latest {means(ours['latest'], 3)}",
    )
    draft.plots.append(error)
    note = (
        "No finetuned network is available, so the paper's fourth line and its right panel are missing: `anytime train "
        "cifar100-msdnet-finetuned` trains one."
    )
    if tuned:
        ours["finetuned"] = Group.measured(tuned, {"finetuned": SOFTPLUS}).curve("finetuned", ECE)
        drawn = line("finetuned, softplus product", ours["finetuned"], 3, paper=paper.ECE["finetuned"])
        backbone = (draft.runs.find("msdnet", group.data) or group.runs)[0]
        draft.used.append(backbone)
        base, first = on_shared_rows((backbone, tuned[0]))
        (logits, labels), (others, _) = base.logits(), first.logits()
        before = follow(Latest()(logits), labels).label_probability
        chosen = ten_rows(before)
        after = follow(SOFTPLUS(others[:, chosen]), labels[chosen]).label_probability
        draft.plots = [
            replace(error, lines=(*error.lines, drawn)),
            inputs_plot("Ten inputs, finetuned", after, behind=before[:, chosen]),
        ]
        note = (
            "The finetuned network was trained on 45,000 images by the paper's schedule; the study finetune compares it with "
            f"the paper's numbers and with a backbone on as many images. Its curve is of {rows_in_words(tuned, kept=True)}. "
            f"{TEN_AGAIN} That backbone is {backbone.name}."
        )
    draft.numbers = group.numbers(ECE, NLL, BRIER)
    return draft.finding(
        rows=group.rows,
        note="ECE with 15 equal bins, as in the paper. Of the curves of the backbone and of caching only the ends were read "
        f"off. {note}",
    )
