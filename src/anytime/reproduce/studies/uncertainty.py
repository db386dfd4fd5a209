"""Figures 5 and 6: the product's uncertainty starts high and decreases at every exit; finetuning closes its calibration gap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from anytime.combine import Latest
from anytime.metrics import follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, at_most, means
from anytime.reproduce.group import BRIER, ECE, ENTROPY, NLL, PLAIN, SET_COVERAGE, SET_SIZE, TEN, Group, ten_rows
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import inputs_plot, line
from anytime.reproduce.runs import on_shared_rows
from anytime.reproduce.studies.finetune import SOFTPLUS


def uncertainty(draft: Draft) -> Finding:
    """Mean entropy and mean size of the prediction sets at each exit."""
    group = Group.published(draft.runs.need(MSDNET_100))
    draft.used += group.runs
    for title, name, metric, theirs, tolerance, unit in (
        ("Entropy", "entropy", ENTROPY, paper.ENTROPY, paper.ENTROPY_TOLERANCE, "nats"),
        ("Prediction sets", "set size", SET_SIZE, paper.SET_SIZE, paper.SET_SIZE_TOLERANCE, "classes"),
    ):
        known = dict(theirs) if group.data == "cifar100" else {}
        draft.plots.append(group.plot(title, metric, known=known))
        for rule in PLAIN if known else ():
            names = [f"{name}, {rule}, exit {exit}" for exit in range(1, len(known[rule]) + 1)]
            draft.compare(names, group.curve(rule, metric), known[rule], tolerance=tolerance, unit=unit)
    entropy, size, coverage = (group.curve("product", metric) for metric in (ENTROPY, SET_SIZE, SET_COVERAGE))
    draft.claim(
        "the product's entropy decreases at every exit",
        all(after.mean < before.mean for before, after in pairwise(entropy)),
        f"{means(entropy, 2)} nats",
    )
    draft.claim(
        "the product's sets are less than half as large at the last exit as at the first",
        size[-1].mean < size[0].mean / 2,
        f"{means(size)} classes, coverage {means(coverage)} %",
    )
    draft.numbers = group.numbers(ENTROPY, SET_SIZE, SET_COVERAGE)
    widest = max(value.deviation or 0.0 for values in group.curves(SET_SIZE).values() for value in values)
    return draft.finding(
        rows=f"{group.rows}; a fifth of them calibrates the sets and is not measured",
        note="Sets are RAPS as the paper's released code computes them (α = .05, λ = .01, k = 5), with fixed random seeds. The "
        "paper's entropies of MSDNet and caching are known at the first and last exit only. The sizes depend on the last few "
        f"percent of labels that a network ranks low: over our {len(group.runs)} seeds alone they deviate by up to "
        f"{widest:.1f} classes, and the paper's belong to one checkpoint.",
    )


def calibration_gap(draft: Draft) -> Finding:
    """Calibration error of the three rules, and of a finetuned network if there is a run of one."""
    group = Group.published(draft.runs.need(MSDNET_100))
    known = {rule: paper.ECE[rule] for rule in PLAIN} if group.data == "cifar100" else {}
    error, ours = group.plot("Calibration error", ECE, known=known), group.curves(ECE)
    tuned = draft.runs.find("msdnet-finetuned", group.data)
    draft.used += [*group.runs, *tuned]

    def compare(rule: str) -> None:
        names = [f"ECE, {rule}, exit {exit}" for exit in range(1, len(paper.ECE[rule]) + 1)]
        draft.compare(names, ours[rule], paper.ECE[rule], tolerance=paper.ECE_TOLERANCE)

    for rule in known:
        compare(rule)
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
        compare("finetuned")
        draft.claim(
            "finetuned, the error is at or below the backbone's at every exit",
            at_most(ours["finetuned"], ours["latest"]),
            f"finetuned {means(ours['finetuned'], 3)}",
        )
        drawn = line("finetuned, softplus product", ours["finetuned"], 3, paper=paper.ECE["finetuned"])
        base, first = on_shared_rows((group.runs[0], tuned[0]))
        (logits, labels), (others, _) = base.logits(), first.logits()
        before = follow(Latest()(logits), labels).label_probability
        chosen = ten_rows(before)
        after = follow(SOFTPLUS(others[:, chosen]), labels[chosen]).label_probability
        draft.plots = [
            replace(error, lines=(*error.lines, drawn)),
            inputs_plot("Ten inputs, finetuned", after, behind=before[:, chosen]),
        ]
        note = (
            "The finetuned network was trained by the paper's schedule, see the study finetune; its metrics are of the rows "
            f"whose logits were kept. {TEN}"
        )
    draft.numbers = group.numbers(ECE, NLL, BRIER)
    return draft.finding(
        rows=group.rows,
        note="ECE with 15 equal bins, as in the paper. Of the curves of the backbone and of caching only the ends were read "
        f"off. {note}",
    )
