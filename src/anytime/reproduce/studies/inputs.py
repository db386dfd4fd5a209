"""Figures 1 and 2: a network improves on average at every exit and gets worse for many inputs; under the product for few."""

from __future__ import annotations

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
    MONOTONE,
    TEN,
    Group,
    rows_in_words,
    ten_rows,
)
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import inputs_plot, line, over_exits


def marginal_and_conditional(draft: Draft) -> Finding:
    """Accuracy and the label's mean probability, ten inputs, and the drops of all inputs."""
    group = Group.published(draft.runs.need(MSDNET_100), ("latest",))
    first = group.runs[0]
    accuracy, probability = group.curve("latest", ACCURACY), group.curve("latest", LABEL_PROBABILITY)
    theirs = paper.LABEL_DROPS["msdnet", "cifar100", "latest"] if group.data == "cifar100" else ()
    logits, labels = first.logits()
    every = follow(Latest()(logits), labels).label_probability
    chosen = ten_rows(every)
    half, monotone = group.at("latest", LABEL_DROPS, 0.5), group.curve("latest", MONOTONE)[0]
    draft.used += group.runs
    draft.plots += [
        over_exits("On average", "%", (line("accuracy", accuracy, 0), line("label's probability", probability, 1))),
        inputs_plot("Ten inputs", every[:, chosen]),
        group.plot("All inputs", LABEL_DROPS, known={"latest": theirs}),
    ]
    for what, values in (("accuracy", accuracy), ("the label's mean probability", probability)):
        rises = all(after.mean > before.mean for before, after in pairwise(values))
        draft.claim(f"{what} rises at every exit", rises, f"{means(values)} %")
    draft.numbers = group.numbers(ACCURACY, LABEL_PROBABILITY, LABEL_DROPS)
    draft.numbers |= {"inputs": chosen.tolist(), "label_probability_of_inputs": every[:, chosen].T.tolist()}
    return draft.finding(
        rows=f"{group.rows}; the ten inputs are from {first.name}",
        note=f"The label's probability drops by .5 or more for {half.mean:.2f} % of the inputs (the paper: ~25 %), and "
        f"{100 - monotone.mean:.2f} % lose a correct answer (~30 %); the studies label-drops and correctness compare these "
        f"numbers. {TEN} Error bars: one standard deviation over seeds.",
    )


def trajectories(draft: Draft) -> Finding:
    """The label's probability for ten inputs, with the backbone's in the background."""
    runs = draft.runs.need(MSDNET_100)[:1]
    logits, labels = runs[0].logits()
    rules = {"latest": Latest(), "product": Product()}
    curves = {name: follow(rule(logits), labels).label_probability for name, rule in rules.items()}
    chosen = ten_rows(curves["latest"])
    few = {name: values[:, chosen] for name, values in curves.items()}
    draft.used += runs
    draft.plots += [
        inputs_plot("Latest: the network without a rule", few["latest"]),
        inputs_plot("Product", few["product"], behind=few["latest"]),
    ]
    start = {name: float(values[0].mean()) for name, values in curves.items()}
    mean = {name: float(drop(values).mean()) for name, values in curves.items()}
    worst = {name: float(drop(values).max()) for name, values in few.items()}
    draft.claim(
        "the product's probabilities start lower than the backbone's",
        start["product"] < start["latest"],
        f"mean at exit 1: {start['product']:.3f}, {start['latest']:.3f}",
    )
    draft.numbers = {
        "inputs": chosen.tolist(),
        "label_probability": {name: values.T.tolist() for name, values in few.items()},
        "mean_label_drop": mean,
    }
    return draft.finding(
        rows=f"ten of {rows_in_words(runs, kept=True)}",
        note=f"{TEN} The faint lines on the right are the lines on the left. The mean drop is {mean['product']:.4f} under the "
        f"product and {mean['latest']:.4f} under the backbone over all inputs; of the ten, the largest are "
        f"{worst['product']:.3f} and {worst['latest']:.3f}.",
    )
