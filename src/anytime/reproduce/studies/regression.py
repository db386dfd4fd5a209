"""Appendix B.6: anytime regression: the intervals of an ensemble's members are intersected, in two orders.

Claims are about several ensembles, as a single one may be lucky.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import stack_module_state

from anytime.combine import Intersection, Interval
from anytime.data.toys import PointData, make_curve
from anytime.models import IntervalMLP
from anytime.models.mlp import interval_score
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Band, Claim, Finding, Line, Panel
from anytime.reproduce.float64 import in_float64

MEMBERS = 5
_ENSEMBLES = {"smoke": 1, "small": 5, "full": 5}
_STEPS = {"smoke": 60, "small": 600, "full": 1500}
_X = 121
_EDGE = 1.5
_SHOWN = (0, 1, 4)


def study(context: Context) -> Finding:
    """Intervals over x after some members, for two orders of the same members."""
    train, test = make_curve(200, seed=0), make_curve(1000, seed=1)
    members = _train(train, MEMBERS * _ENSEMBLES[context.scale], _STEPS[context.scale])
    x = torch.linspace(-_EDGE, _EDGE, _X, dtype=torch.float64)[:, None]
    found = {name: _intersect(members, x, backwards=name == "reversed") for name in ("one order", "reversed")}
    first, second = found.values()
    panels = [
        _panel(f"{name}: {at + 1} member{'s' if at else ''}", x[:, 0], answer, at, train)
        for name, answer in found.items()
        for at in _SHOWN
    ]
    on_test = _intersect(members, test.inputs.double())
    covered = (on_test.lower <= test.targets) & (test.targets <= on_test.upper)
    inside = [100 * float(values.double().mean()) for values in covered]
    outside = (x[:, 0] < -1) | (x[:, 0] > 1)
    empty = [100 * float(values.double().mean()) for values in first.fell_back[-1][:, outside]]
    widths = [float(values.mean()) for values in first.width.where(~first.fell_back, 0.0)]
    same = torch.equal(first.fell_back[-1], second.fell_back[-1]) and bool(
        torch.isclose(first.lower[-1], second.lower[-1])[~first.fell_back[-1]].all()
    )
    return context.finding(
        runs=(),
        rows="200 points of a curve with a gap to learn from, 1,000 others to test on",
        note="Our own curve: the paper gives no formula. Members are trained apart with the interval score for 95 % "
        "coverage, as a uniform density has no gradient outside of its interval. Numbers are means over "
        f"ensembles of five members ({len(empty)} in all); the first is drawn. Intersecting intervals costs coverage, as each "
        "member misses points of its own; the paper's picture gives no numbers.",
        panels=tuple(panels),
        claims=(
            Claim(
                "intervals never grow where they are not empty",
                all(_shrinks(answer) for answer in found.values()),
                "mean width, 0 where empty: " + ", ".join(f"{width:.2f}" for width in widths),
            ),
            Claim("the order does not matter in the end", same, "after five members both orders give the same intervals"),
            Claim(
                "the first members do most of the work",
                widths[0] - widths[1] >= widths[-2] - widths[-1],
                f"width lost with the second member {widths[0] - widths[1]:.3f}, with the last {widths[-2] - widths[-1]:.3f}",
            ),
            Claim(
                "the intervals cover the data well, after every member (90 % or more)",
                min(inside) >= 90,
                "of the test points " + ", ".join(f"{value:.1f}" for value in inside) + " %",
            ),
            Claim(
                "there is no support beyond the data",
                min(empty) == 100,
                "empty after five members on "
                + ", ".join(f"{value:.1f}" for value in empty)
                + " % of the drawn range beyond ±1, per ensemble",
            ),
        ),
        numbers={"coverage_percent": inside, "mean_width": widths, "empty_beyond_data_percent": empty},
    )


def _train(train: PointData, count: int, steps: int) -> list[IntervalMLP]:
    """Members that are trained side by side, each by itself: a step of all costs little more than a step of one."""
    members = [in_float64(IntervalMLP(width=48, exits=3), seed) for seed in range(count)]
    weights, buffers = stack_module_state(members)
    x, targets = train.inputs.double(), train.targets.double()
    forward = torch.func.vmap(lambda one, rest: torch.func.functional_call(members[0], (one, rest), (x,)))
    optimizer = torch.optim.Adam(weights.values(), lr=0.005)
    for _ in range(steps):
        lower, upper = forward(weights, buffers)[:, -1].unbind(-1)  # (members, points) each, at the last exit
        loss = interval_score(lower, upper, targets).mean(-1).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for place, member in enumerate(members):
        member.load_state_dict({name: values[place].detach() for name, values in (weights | buffers).items()})
    return [member.eval() for member in members]


@torch.no_grad()
def _intersect(members: list[IntervalMLP], x: Tensor, *, backwards: bool = False) -> Interval:
    """Of every ensemble at once, `(members, ensembles, x)`."""
    ends = torch.stack([torch.stack(member.intervals(x))[:, -1] for member in members])  # (members, lower and upper, x)
    lower, upper = ends.reshape(-1, MEMBERS, 2, len(x)).permute(2, 1, 0, 3)
    return Intersection()(lower.flip(0), upper.flip(0)) if backwards else Intersection()(lower, upper)


def _shrinks(answer: Interval) -> bool:
    alive = ~answer.fell_back[1:]
    return bool((answer.width.diff(dim=0)[alive] <= 1e-6).all())


def _panel(title: str, x: Tensor, answer: Interval, at: int, train: PointData) -> Panel:
    places = tuple(x.tolist())
    gone = answer.fell_back[at, 0].tolist()  # of the first ensemble
    low, high, middle = (
        tuple(None if empty else value for value, empty in zip(values[at, 0].tolist(), gone, strict=True))
        for values in (answer.lower, answer.upper, answer.middle)
    )
    order = train.inputs[:, 0].argsort()[::8]
    points = [
        Line("training points", (float(train.inputs[row, 0]),), (float(train.targets[row]),), 0, faint=True)
        for row in order.tolist()
    ]
    band = Band("interval", places, low, high, 2)
    return Panel(title, "x", "y", (*points, Line("middle", places, middle, 2, marks=False)), y_range=(-2.0, 2.0), bands=(band,))
