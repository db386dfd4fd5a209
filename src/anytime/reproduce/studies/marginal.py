"""Figure 1: an MSDNet improves on average at every exit, and takes the right answer back for many an input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from anytime.combine import Latest
from anytime.metrics import follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Comparison, Finding, Line, Measured, Panel, over_seeds
from anytime.reproduce.measure import by_limit, curve, line, names_of, plain_numbers, rows_in_words, stored, ten_rows, text_of
from anytime.reproduce.needs import MSDNET_100

TEN = (
    "The paper draws ten inputs at random; ten are few enough for luck to decide what they show (our first draw had no fall "
    "above .06), so ours stand at the 5th, 15th, … 95th percentile of the fall under the backbone."
)


def study(context: Context) -> Finding:
    """Accuracy and the label's mean probability, ten inputs, and the falls of all of them."""
    runs = context.runs.need(MSDNET_100)
    figures = stored(runs)
    accuracy = curve(figures, "latest", "accuracy", factor=100)
    quality = curve(figures, "latest", "label_probability", factor=100)
    theirs = paper.LABEL_DROPS["msdnet", "cifar100", "latest"] if runs[0].data == "cifar100" else ()
    logits, labels = runs[0].logits()
    every = follow(Latest()(logits), labels).label_probability
    chosen = ten_rows(every)
    curves = every[:, chosen]
    panels = (
        Panel(
            "On average",
            "exit",
            "%",
            (line("accuracy", accuracy, 0), line("label's probability", quality, 1)),
            exits=len(accuracy),
        ),
        Panel(
            "Ten inputs", "exit", "label's probability", tuple(single_lines(curves)), exits=len(accuracy), y_range=(0.0, 1.0)
        ),
        by_limit(
            "All inputs", "falls by at least", figures, "label_drop_percent", rules=("latest",), paper_values={"latest": theirs}
        ),
    )
    half = over_seeds([each["latest"]["label_drop_percent"]["0.5"] for each in figures])
    forgets = over_seeds([100 - each["latest"]["correct_monotone_percent"] for each in figures])
    return context.finding(
        runs=names_of(runs),
        rows=f"{rows_in_words(runs)}; the ten inputs are of {runs[0].name}",
        note=f"The paper gives both percentages as approximate ('~'). {TEN} Bars are one standard deviation over the seeds.",
        panels=panels,
        comparisons=(
            Comparison("label's probability falls by ≥ .5 (text: ~25)", 25.0, half, paper.DROP_TOLERANCE, unit="%"),
            Comparison("right at some exit, wrong at a later one (text: ~30)", 30.0, forgets, paper.DROP_TOLERANCE, unit="%"),
        ),
        claims=(
            _rises("accuracy rises at every exit", accuracy),
            _rises("the label's mean probability rises at every exit", quality),
        ),
        numbers=plain_numbers(figures, ("accuracy", "label_probability", "label_drop_percent"), ("latest",))
        | {"inputs": chosen.tolist(), "label_probability_of_inputs": curves.T.tolist()},
    )


def single_lines(curves: Tensor, *, faint: bool = False) -> list[Line]:
    """One line an input from `(exits, inputs)`, without names."""
    x = tuple(float(exit) for exit in range(1, len(curves) + 1))
    return [Line("", x, tuple(values), look, marks=False, faint=faint) for look, values in enumerate(curves.T.tolist())]


def _rises(what: str, values: Sequence[Measured]) -> Claim:
    holds = all(after.mean > before.mean for before, after in pairwise(values))
    return Claim(what, holds, f"{text_of(values)} %")
