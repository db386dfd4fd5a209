"""Figures 1 and 2: a network improves on average at every exit and gets worse for many inputs; under the product for few."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from anytime.combine import Latest, Product
from anytime.metrics import drop, follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, means
from anytime.reproduce.group import (
    ACCURACY,
    LABEL_DROPS,
    LABEL_PROBABILITY,
    MEAN_LABEL_DROP,
    MONOTONE,
    TEN,
    TEN_AGAIN,
    Group,
    ten_rows,
)
from anytime.reproduce.needs import REPRODUCED_100
from anytime.reproduce.plots import inputs_plot, line, over_exits

_EXTENT = 10.0
"""How many times smaller the mean drop has to be for what we call a large extent."""


def marginal_and_conditional(draft: Draft) -> Finding:
    """Accuracy and the label's mean probability, ten inputs, and the drops of all inputs."""
    group = Group.published(draft.runs.need(REPRODUCED_100), ("latest",))
    first = group.runs[0]
    accuracy, probability = group.curve("latest", ACCURACY), group.curve("latest", LABEL_PROBABILITY)
    theirs = paper.LABEL_DROPS["msdnet", "cifar100", "latest"] if group.data == "cifar100" else ()
    drops = group.plot("All inputs", LABEL_DROPS, known={"latest": theirs})
    logits, labels = first.logits()
    every = follow(Latest()(logits), labels).label_probability
    chosen = ten_rows(every)
    half, monotone = group.at("latest", LABEL_DROPS, 0.5), group.curve("latest", MONOTONE)[0]
    draft.used += group.runs
    draft.plots += [
        over_exits("On average", "%", (line("accuracy", accuracy, 3), line("label's probability", probability, 4))),
        inputs_plot("Ten inputs", every[:, chosen]),
        replace(drops, kind="linear", zero=True),
    ]
    for what, values in (("accuracy", accuracy), ("the label's mean probability", probability)):
        rises = all(after.mean > before.mean for before, after in pairwise(values))
        draft.claim(f"{what} rises at every exit", rises, f"{means(values)} %")
    draft.numbers = group.numbers(ACCURACY, LABEL_PROBABILITY, LABEL_DROPS)
    draft.numbers |= {"inputs": chosen.tolist(), "label_probability_of_inputs": every[:, chosen].T.tolist()}
    return draft.finding(
        rows=f"{group.rows}; the ten inputs: {len(labels):,} test rows whose logits were kept, {first.name}",
        note=f"The label's probability drops by .5 or more for {half.mean:.2f} % of the inputs (the paper: ~25 %), and "
        f"{100 - monotone.mean:.2f} % lose a correct answer (~30 %); the studies label-drops and correctness compare these "
        f"numbers. {TEN} Error bars: one standard deviation over seeds.",
    )


def trajectories(draft: Draft) -> Finding:
    """The label's probability for ten inputs, with the backbone's in the background, and the mean over all inputs."""
    group = Group.published(draft.runs.need(REPRODUCED_100), ("latest", "product"))
    first = group.runs[0]
    logits, labels = first.logits()
    rules = {"latest": Latest(), "product": Product()}
    curves = {name: follow(rule(logits), labels).label_probability for name, rule in rules.items()}
    chosen = ten_rows(curves["latest"])
    few = {name: values[:, chosen] for name, values in curves.items()}
    draft.used += group.runs
    draft.plots += [
        inputs_plot("Latest: the network without a rule", few["latest"]),
        inputs_plot("Product", few["product"], behind=few["latest"]),
    ]
    start, mean = (
        {rule: group.curve(rule, metric)[0].mean for rule in rules} for metric in (LABEL_PROBABILITY, MEAN_LABEL_DROP)
    )
    worst = {name: float(drop(values).max()) for name, values in few.items()}
    draft.claim(
        "the product rectifies the backbone's drops to a large extent (the mean drop is at most a tenth)",
        mean["product"] <= mean["latest"] / _EXTENT,
        f"mean over all inputs {mean['product']:.4f} and {mean['latest']:.4f}",
    )
    draft.numbers = group.numbers(LABEL_PROBABILITY, MEAN_LABEL_DROP) | {
        "inputs": chosen.tolist(),
        "label_probability_of_inputs": {name: values.T.tolist() for name, values in few.items()},
    }
    return draft.finding(
        rows=f"{group.rows}; the ten inputs: {len(labels):,} test rows whose logits were kept, {first.name}",
        note=f"{TEN_AGAIN} The largest drop of the ten is {worst['product']:.3f} under the product and {worst['latest']:.3f} "
        f"under the backbone. The label's mean probability at exit 1 is {start['product'] / 100:.3f} and "
        f"{start['latest'] / 100:.3f}: with a power of one over the number of exits the product starts with nearly equal "
        "probabilities for all classes that are left, by its definition, so that is not a claim.",
    )
