"""B.3: how well confidence tells right from wrong answers, an oracle for the least confident, and the released metric."""

from __future__ import annotations

from anytime.metrics import follow, oracle_auroc_as_released
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, Measured, each_over_seeds, means
from anytime.reproduce.group import ORACLE_ACCURACY, RULES, Group, rows_in_words
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import Plot, line, over_exits
from anytime.reproduce.studies.out_of_scope import auroc

Curves = dict[str, list[Measured]]
_WORSE = 0.01
"""A difference of AUROC beyond what seeds make."""


def collaboration(draft: Draft) -> Finding:
    """The AUROC of confidence for correctness, the accuracy with an oracle, and the released metric, at each exit."""
    group = Group.published(draft.runs.need(MSDNET_100))
    released: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    recalls: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    areas: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    for run in group.runs:
        logits, labels = run.logits()
        zero = labels == 0
        for rule, combine in RULES.items():
            answers = combine(logits)
            seen, right = follow(answers, labels), answers.labels == labels
            # One exit at a time: each has its own right answers. Log-odds, since probabilities round to 1.
            exits = zip(answers.log_odds, right, strict=True)
            areas[rule].append([float(auroc(odds[None, yes], odds[None, ~yes])) for odds, yes in exits])
            released[rule].append(oracle_auroc_as_released(seen.confidence, seen.answer, labels).tolist())
            recalls[rule].append((seen.answer[:, zero] == 0).double().mean(1).tolist() if bool(zero.any()) else [])
    as_released, recall, area = (
        {rule: each_over_seeds(values) for rule, values in found.items()} for found in (released, recalls, areas)
    )
    corrected = group.curves(ORACLE_ACCURACY)
    zeros = int((group.runs[0].logits()[1] == 0).sum())
    pairs = zip(area["product"], area["latest"], strict=True)
    worse = [exit for exit, (mine, base) in enumerate(pairs, 1) if mine.mean < base.mean - _WORSE]
    draft.used += group.runs
    draft.plots += [
        _plot("Confidence for correctness", "AUROC", area),
        group.plot("Corrected: accuracy with the oracle", ORACLE_ACCURACY),
        _plot(
            "As released",
            "'OC-AUROC'",
            {rule: [Measured(each.mean) for each in values] for rule, values in as_released.items()},
        ),
    ]
    draft.claim(
        "the product's calibration gap disappears: its confidence ranks right above wrong answers as well as the backbone's, "
        f"at every exit (to {_WORSE:g} of AUROC)",
        not worse,
        "; ".join(f"{rule} {means(values, 3)}" for rule, values in area.items())
        + (f"; the product is worse at exits {', '.join(map(str, worse))}" if worse else ""),
    )
    draft.numbers = group.numbers(ORACLE_ACCURACY) | {"auroc": areas}
    draft.numbers |= {"as_released": released, "recall_of_class_0": recalls, "rows_of_class_0": zeros}
    return draft.finding(
        rows=f"with the oracle: {group.rows}; the rest: {rows_in_words(group.runs, kept=True)}, {zeros} of them of class 0",
        note="The paper says that the calibration gap disappears by the AUROC of a classifier that defers .5 % of the inputs "
        "to an oracle. The released code feeds class indices to a binary metric: what it plots is close to the recall of class "
        f"0 (product: as released {means(as_released['product'], 3)}, recall {means(recall['product'], 3)}), on a hundred of "
        f"CIFAR-100's test images, and moves in steps of one image; ours has {zeros} such images among the kept rows, so that "
        "its deviation over seeds, which is not drawn, exceeds what it shows. Deferral "
        "corrected is the accuracy after the oracle has answered the least confident .5 %: at most half a point above the "
        f"accuracy itself (product {means(corrected['product'])} %, latest {means(corrected['latest'])} %), so it says nothing "
        "about confidence and is not a claim. The AUROC is the probability that a right answer has more confidence than a "
        "wrong one. By it the product is the worse guide to its own errors until its last exits: it starts with nearly equal "
        "probabilities for half of the classes.",
    )


def _plot(title: str, axis: str, curves: Curves) -> Plot:
    return over_exits(title, axis, [line(rule, values, look) for look, (rule, values) in enumerate(curves.items())])
