"""Figure 2: the same ten inputs under the product start low and rise."""

from __future__ import annotations

from anytime.combine import Latest, Product
from anytime.metrics import drop, follow
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Panel
from anytime.reproduce.measure import names_of, rows_in_words, ten_rows
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.studies.marginal import TEN, single_lines


def study(context: Context) -> Finding:
    """The label's probability of ten random inputs, with the backbone's in the background."""
    runs = context.runs.need(MSDNET_100)[:1]
    logits, labels = runs[0].logits()
    rules = {"latest": Latest(), "product": Product()}
    curves = {name: follow(rule(logits), labels).label_probability for name, rule in rules.items()}
    chosen = ten_rows(curves["latest"])
    few = {name: values[:, chosen] for name, values in curves.items()}
    panels = tuple(
        Panel(title, "exit", "label's probability", tuple(lines), exits=len(logits), y_range=(0.0, 1.0))
        for title, lines in (
            ("Latest: the network as it is", single_lines(few["latest"])),
            ("Product", [*single_lines(few["latest"], faint=True), *single_lines(few["product"])]),
        )
    )
    mean = {name: float(drop(values).mean()) for name, values in curves.items()}
    worst = {name: float(drop(values).max()) for name, values in few.items()}
    return context.finding(
        runs=names_of(runs),
        rows=f"ten of {rows_in_words(runs, kept=True)}",
        note=f"{TEN} The faint lines on the right are those on the left.",
        panels=panels,
        claims=(
            Claim(
                "the product's probabilities start lower than the backbone's",
                float(curves["product"][0].mean()) < float(curves["latest"][0].mean()),
                f"mean at exit 1: {float(curves['product'][0].mean()):.3f}, {float(curves['latest'][0].mean()):.3f}",
            ),
            Claim(
                "the product's probabilities fall less",
                mean["product"] < mean["latest"],
                f"mean fall {mean['product']:.4f} and {mean['latest']:.4f} over all; of the ten, at most "
                f"{worst['product']:.3f} and {worst['latest']:.3f}",
            ),
        ),
        numbers={
            "inputs": chosen.tolist(),
            "label_probability": {name: values.T.tolist() for name, values in few.items()},
            "mean_label_drop": mean,
        },
    )
