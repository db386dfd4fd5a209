"""Table 1 and B.5: how many inputs lose a correct answer, never get one, or get one that the last exit takes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Comparison, Finding, each_over_seeds, listed, means, signed, with_deviation
from anytime.reproduce.group import (
    ACCURACY,
    EVER_CORRECT,
    FORGOT,
    LEARNED,
    MONOTONE,
    NEVER_CORRECT,
    OVERTHINKING,
    PLAIN,
    Group,
    Metric,
    published,
    title_of,
)
from anytime.reproduce.needs import REPRODUCED, REPRODUCED_100
from anytime.reproduce.plots import Line, Plot, line, over_exits


def correctness(draft: Draft) -> Finding:
    """Percentages of monotone and of never correct inputs for the three rules on each data set."""
    for group in published(draft.runs, REPRODUCED):
        title, lines = title_of(group.data), []
        for look, rule in enumerate(PLAIN):
            theirs = paper.CORRECTNESS.get((group.data, rule), (None, None))
            monotone, never = (group.curve(rule, metric)[0] for metric in (MONOTONE, NEVER_CORRECT))
            for name, ours, number in (("monotone", monotone, theirs[0]), ("never correct", never, theirs[1])):
                row = Comparison(f"{title}, {rule}, {name}", number, ours, paper.CORRECTNESS_TOLERANCE, unit="%")
                draft.comparisons.append(row)
            lines.append(Line(rule, (never.mean,), (monotone.mean,), look, (monotone.deviation,)))
            if theirs[1] is not None:
                lines.append(Line(rule, (theirs[1],), (None,), look, paper=(theirs[0],)))
        draft.plots.append(Plot(title, "never correct, %", "monotone, %", tuple(lines)))
        kept, none = ({rule: group.curve(rule, metric)[0].mean for rule in PLAIN} for metric in (MONOTONE, NEVER_CORRECT))
        gain, cost = kept["product"] - kept["latest"], none["product"] - none["latest"]
        draft.claim(
            f"{title}: the product makes more inputs monotone than it makes never correct",
            gain > cost,
            f"+{gain:.2f} and +{cost:.2f} points",
        )
        draft.claim(
            f"{title}: caching has more monotone inputs than the product, and more that are never correct",
            kept["caching"] > kept["product"] and none["caching"] > none["product"],
            f"monotone {listed(kept)}; never correct {listed(none)}",
        )
        draft.add(group, MONOTONE, NEVER_CORRECT)
    return draft.finding(
        note="The paper prints these numbers. In the figure, up and to the left is better; an input that is never correct "
        "counts as monotone, so both numbers belong together. ImageNet is not available here."
    )


def overthinking(draft: Draft) -> Finding:
    """Overthinking: the fraction of inputs correct at some exit minus the fraction correct at the last."""
    for group in published(draft.runs, REPRODUCED):
        title = title_of(group.data)
        over, ever = ({rule: group.curve(rule, metric)[0] for rule in PLAIN} for metric in (OVERTHINKING, EVER_CORRECT))
        last = {rule: values[-1] for rule, values in group.curves(ACCURACY).items()}
        draft.plots += _so_far(title, group)
        draft.table += [
            (f"{title}, {rule}", *(f"{with_deviation(found[rule], 2)} %" for found in (over, ever, last))) for rule in PLAIN
        ]
        draft.claim(
            f"{title}: product and caching overthink less than the backbone",
            max(over["product"].mean, over["caching"].mean) < over["latest"].mean,
            listed({rule: value.mean for rule, value in over.items()}),
        )
        lost = {rule: ever["latest"].mean - ever[rule].mean for rule in ("product", "caching")}
        gained = {rule: last[rule].mean - last["latest"].mean for rule in lost}
        draft.claim(
            f"{title}: mostly because fewer inputs are ever correct, not because the last exit is better",
            all(lost[rule] > gained[rule] for rule in lost),
            "; ".join(
                f"{rule}: correct at some exit {signed(-lost[rule], 1)}, at the last {signed(gained[rule], 1)} points"
                for rule in lost
            ),
        )
        draft.add(group, OVERTHINKING, EVER_CORRECT)
    return draft.finding(
        note="The paper's bars were not read off; its claims about them are checked.",
        headings=("rule", "overthinking", "correct at some exit", "correct at the last"),
    )


def _so_far(title: str, group: Group) -> list[Plot]:
    """What was correct at some exit so far, and how much more that is than what is correct now; it ends at the metric."""
    rows, ever, over = group.runs[0].rows(), [], []
    for look, rule in enumerate(PLAIN):
        so_far = [[100 * count / rows for count in accumulate(counts)] for counts in group.per_seed(rule, LEARNED)]
        pairs = zip(so_far, group.per_seed(rule, ACCURACY), strict=True)
        gaps = [[most - now for most, now in zip(*pair, strict=True)] for pair in pairs]
        ever.append(line(rule, each_over_seeds(so_far), look))
        over.append(line(rule, each_over_seeds(gaps), look))
    return [
        over_exits(f"{title}: correct at some exit so far", "%", ever),
        over_exits(f"{title}: overthinking so far", "% of inputs", over, zero=True),
    ]


def learn_and_forget(draft: Draft) -> Finding:
    """At each exit, how many inputs are correct for the first time, and how many wrong again for the first time."""
    group = Group.published(draft.runs.need(REPRODUCED_100))
    percent = 100 / group.runs[0].rows()
    learned, forgot = (replace(metric, factor=percent) for metric in (LEARNED, FORGOT))
    draft.used += group.runs
    draft.plots += [_from_second(group.plot("Learned", learned)), _from_second(group.plot("Forgotten", forgot))]
    draft.claim(
        "at every exit after the first, product and caching forget fewer inputs than the backbone", *_later(group, forgot)
    )
    draft.claim("and learn fewer for the first time", *_later(group, learned))
    draft.numbers = group.numbers(LEARNED, FORGOT)
    return draft.finding(
        rows=group.rows,
        note="The paper plots numbers of inputs and does not define 'forgot' precisely: here it is the first exit that is "
        "wrong after a correct one. Inputs that are correct at the first exit are learned there; the figure starts at exit 2. "
        f"{_closest(group, learned)} The totals are not claims: what is forgotten in all is what the study correctness counts "
        "as not monotone.",
    )


def _later(group: Group, metric: Metric) -> tuple[bool, str]:
    """Whether product and caching have less than the backbone at every exit after the first, and the numbers."""
    later = {rule: values[1:] for rule, values in group.curves(metric).items()}
    less = all(max(mine.mean, cached.mean) < base.mean for base, cached, mine in zip(*later.values(), strict=True))
    return less, "; ".join(f"{rule} {means(values, 2)} %" for rule, values in later.items())


def _closest(group: Group, metric: Metric) -> str:
    """Where the product is closest to the backbone after the first exit, in words."""
    pairs = zip(*(group.per_seed(rule, metric) for rule in ("latest", "product")), strict=True)
    gaps = each_over_seeds([[theirs - mine for theirs, mine in zip(*pair, strict=True)] for pair in pairs])
    exit = min(range(2, len(gaps) + 1), key=lambda exit: gaps[exit - 1].mean)
    gap = with_deviation(gaps[exit - 1], 3)
    return f"The smallest difference between product and backbone in what is learned is {gap} points, at exit {exit}."


def _from_second(plot: Plot) -> Plot:
    lines: Sequence[Line] = [replace(line, y=(None, *line.y[1:])) for line in plot.lines]
    return replace(plot, lines=tuple(lines))
