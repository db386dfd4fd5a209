"""Appendix B.5: the product on the cascading heads of Zero Time Waste."""

from __future__ import annotations

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding
from anytime.reproduce.measure import PLAIN, by_exit, by_limit, curve, names_of, plain_numbers, rows_in_words, stored
from anytime.reproduce.needs import ZTW


def study(context: Context) -> Finding:
    """Accuracy, falls and hindsight improvability of the three rules."""
    runs = context.runs.need(ZTW)
    figures = stored(runs)
    accuracy = {rule: curve(figures, rule, "accuracy", factor=100) for rule in PLAIN}
    drops = {rule: curve(figures, rule, "label_drop_percent") for rule in PLAIN}
    hindsight = {rule: curve(figures, rule, "hindsight_improvability_percent") for rule in PLAIN}
    exits = len(accuracy["latest"])
    mean = {rule: sum(value.mean for value in values) / exits for rule, values in accuracy.items()}
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs),
        note=f"{exits} exits, on every block of a ResNet. The backbone line is the cascade of heads itself: ZTW's geometric "
        "ensemble on top of it is fitted on rows of all exits, of which too few were kept. The paper's figure was not read "
        "off; its claims are checked.",
        panels=(
            by_exit("Accuracy", "accuracy, %", figures, "accuracy", factor=100),
            by_limit("Label's falls", "falls by at least", figures, "label_drop_percent"),
            by_exit("Hindsight improvability", "% of wrong inputs", figures, "hindsight_improvability_percent", zero=True),
        ),
        claims=(
            Claim(
                "fewer falls of every size under the product",
                all(mine.mean <= base.mean for mine, base in zip(drops["product"], drops["latest"], strict=True)),
                ", ".join(f"{rule} {drops[rule][2].mean:.2f} %" for rule in PLAIN) + " by .1",
            ),
            Claim(
                "less hindsight improvability at every exit after the first",
                all(
                    mine.mean < base.mean
                    for mine, base in list(zip(hindsight["product"], hindsight["latest"], strict=True))[1:]
                ),
                ", ".join(f"{rule} {hindsight[rule][-1].mean:.1f} %" for rule in PLAIN) + " at the last exit",
            ),
            Claim(
                "at a minor cost in accuracy (3 points at most at the last exit)",
                accuracy["product"][-1].mean >= accuracy["latest"][-1].mean - 3,
                "; ".join(f"{rule}: mean over exits {mean[rule]:.1f}, last {accuracy[rule][-1].mean:.1f} %" for rule in PLAIN),
            ),
        ),
        numbers=plain_numbers(figures, ("accuracy", "label_drop_percent", "hindsight_improvability_percent")),
    )
