"""B.3: an oracle answers the 0.5 % least confident inputs; the accuracy then, and what the released code plots instead."""

from __future__ import annotations

from anytime.metrics import follow, oracle_auroc_as_released
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, each_over_seeds, means, over_seeds
from anytime.reproduce.group import ORACLE_ACCURACY, RULES, Group, rows_in_words
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import line, over_exits


def collaboration(draft: Draft) -> Finding:
    """Accuracy with the oracle at each exit, the released metric, and the recall of class 0, which it really measures."""
    group = Group.published(draft.runs.need(MSDNET_100))
    released: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    recalls: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    for run in group.runs:
        logits, labels = run.logits()
        zero = labels == 0
        for rule, combine in RULES.items():
            seen = follow(combine(logits), labels)
            released[rule].append(oracle_auroc_as_released(seen.confidence, seen.answer, labels).tolist())
            recalls[rule].append((seen.answer[:, zero] == 0).double().mean(1).tolist() if bool(zero.any()) else [])
    as_released = {rule: each_over_seeds(values) for rule, values in released.items()}
    recall = {rule: each_over_seeds(values) for rule, values in recalls.items()}
    corrected = group.curves(ORACLE_ACCURACY)
    pairs = [pair for rule in RULES for pair in zip(as_released[rule], recall[rule], strict=False)]
    gap = over_seeds([abs(plotted.mean - true.mean) for plotted, true in pairs] or [0.0])
    zeros = int((group.runs[0].logits()[1] == 0).sum())
    draft.used += group.runs
    draft.plots += [
        group.plot("Corrected: accuracy with the oracle", ORACLE_ACCURACY),
        over_exits("As released", "'OC-AUROC'", [line(rule, as_released[rule], look) for look, rule in enumerate(RULES)]),
    ]
    draft.claim(
        "with the oracle the product is at least as accurate as the backbone at the last exit",
        corrected["product"][-1].mean >= corrected["latest"][-1].mean,
        f"product {means(corrected['product'])} %; latest {means(corrected['latest'])} %",
    )
    draft.claim(
        "the released metric follows the recall of class 0",
        gap.mean < 0.05,
        f"mean distance {gap.mean:.3f}; product as released {means(as_released['product'], 3)}, recall "
        f"{means(recall['product'], 3)}",
    )
    draft.numbers = group.numbers(ORACLE_ACCURACY)
    draft.numbers |= {"as_released": released, "recall_of_class_0": recalls, "rows_of_class_0": zeros}
    return draft.finding(
        rows=f"corrected: {group.rows}; as released: {rows_in_words(group.runs, kept=True)}, {zeros} of them of class 0",
        note="The released code feeds class indices to a binary metric: what the paper plots as oracle-collaborative AUROC "
        "is close to the recall of class 0, on a hundred of CIFAR-100's test images, and moves in steps of one image. Ours "
        "has still fewer such images among the kept rows, hence larger steps. The corrected metric is the accuracy after the "
        "oracle has answered the least confident 0.5 %.",
    )
