"""Figure 5: under the product, uncertainty starts high and falls at every exit."""

from __future__ import annotations

from itertools import pairwise

from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Comparison, Finding
from anytime.reproduce.measure import (
    PLAIN,
    against_paper,
    by_exit,
    curve,
    names_of,
    plain_numbers,
    rows_in_words,
    stored,
    text_of,
)
from anytime.reproduce.needs import MSDNET_100


def study(context: Context) -> Finding:
    """Mean entropy and mean size of the prediction sets at each exit."""
    runs = context.runs.need(MSDNET_100)
    figures = stored(runs)
    real = runs[0].data == "cifar100"
    entropy, sizes = (dict(paper.ENTROPY), dict(paper.SET_SIZE)) if real else ({}, {})
    comparisons: list[Comparison] = []
    for name, key, theirs, tolerance, unit in (
        ("entropy", "entropy", entropy, paper.ENTROPY_TOLERANCE, "nats"),
        ("set size", "set_size", sizes, paper.SET_SIZE_TOLERANCE, "classes"),
    ):
        for rule in PLAIN if real else ():
            comparisons += against_paper(
                lambda exit, name=name, rule=rule: f"{name}, {rule}, exit {exit + 1}",  # type: ignore[misc]
                curve(figures, rule, key),
                theirs[rule],
                tolerance=tolerance,
                unit=unit,
            )
    falls = curve(figures, "product", "entropy")
    shrinks = curve(figures, "product", "set_size")
    coverage = curve(figures, "product", "set_coverage", factor=100)
    widest = max(value.deviation or 0.0 for rule in PLAIN for value in curve(figures, rule, "set_size"))
    return context.finding(
        runs=names_of(runs),
        rows=f"{rows_in_words(runs)}; a fifth of them calibrates the sets and is not measured",
        note="Sets are RAPS as the paper's released code computes them (α = .05, λ = .01, k = 5), with a seed for every "
        "draw. The paper's entropies of MSDNet and caching are known at the first and last exit alone. The sizes hang on "
        f"the last few percent of labels that a network ranks low: over our {len(runs)} seeds alone they deviate by up to "
        f"{widest:.1f} classes, and the paper's are of one checkpoint.",
        panels=(
            by_exit("Entropy", "nats", figures, "entropy", zero=True, paper_values=entropy),
            by_exit("Prediction sets", "classes", figures, "set_size", zero=True, paper_values=sizes),
        ),
        comparisons=tuple(comparisons),
        claims=(
            Claim(
                "the product's entropy falls at every exit",
                all(after.mean < before.mean for before, after in pairwise(falls)),
                f"{text_of(falls, digits=2)} nats",
            ),
            Claim(
                "the product's sets are less than half as large at the last exit as at the first",
                shrinks[-1].mean < shrinks[0].mean / 2,
                f"{text_of(shrinks)} classes, coverage {text_of(coverage)} %",
            ),
        ),
        numbers=plain_numbers(figures, ("entropy", "set_size", "set_coverage")),
    )
