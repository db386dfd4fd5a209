"""B.6: an ensemble as an anytime model, one member after the other: a spiral to classify, and intervals for a curve.

Networks are trained in float64: processors differ in the last bit of a float32 sample, sum or product, training amplifies
that, and after a thousand steps they would disagree on what a study finds. In float64, with a learning rate that decays to
zero, moving every input by 1e-14 moves no end of an interval by more than 1e-7 (tests/reproduce/test_studies.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional as F

from anytime.combine import Intersection, Interval, Product
from anytime.data.toys import PointData, make_simple_1d, make_spiral
from anytime.metrics import follow
from anytime.models import MLP, Ensemble, IntervalMLP, MLPConfig
from anytime.models.mlp import interval_score
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding
from anytime.reproduce.plots import Band, ClassMap, Line, Plot

Network = TypeVar("Network", bound=nn.Module)
MEMBERS, CLASSES = 5, 4
SPIRAL_STEPS = {"smoke": 60, "small": 400, "full": 1000}
_CELLS, _PLANE_EDGE = 48, 1.3
_ENSEMBLES = {"smoke": 1, "small": 5, "full": 5}
CURVE_STEPS = {"smoke": 60, "small": 300, "full": 1000}
_X, _BEYOND = 193, 1.0
_SHOWN = (0, 1, 4)
WIDENED = (0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
_WELL, _NONE = 90.0, 99.0
"""Percent of test points that we call covered well, and of the range beyond the data that we call all of it."""


def in_float64(network: Network, seed: int) -> Network:
    """The network in float64, its linear layers initialised again from a seed; the global random state is unchanged."""
    network.double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return network


def spiral(draft: Draft) -> Finding:
    """The support on the plane after each member, and the accuracy on test points, for a spiral with four arms."""
    train, test = make_spiral(1000, seed=0), make_spiral(2000, seed=1)
    ensemble = Ensemble([spiral_member(train, seed, SPIRAL_STEPS[draft.scale]) for seed in range(MEMBERS)])
    axis = torch.linspace(-_PLANE_EDGE, _PLANE_EDGE, _CELLS, dtype=torch.float64)
    plane = torch.stack(torch.meshgrid(axis, -axis, indexing="xy"), -1).flatten(0, 1)
    rule = Product(weights="ones")
    with torch.inference_mode():
        answers = rule(ensemble(plane))
        seen = follow(rule(ensemble(test.inputs.double())), test.targets)
    assert seen.correct is not None
    support = torch.where(answers.fell_back, 0, (answers.log_probs > -torch.inf).sum(-1))
    accuracy = [100 * float(values.double().mean()) for values in seen.correct]
    sizes = [float(values.double().mean()) for values in support]
    empty = 100 * float(answers.fell_back[-1].double().mean())
    draft.plots += [ClassMap(_members(at), _cells(answers.labels[at], support[at])) for at in range(MEMBERS)]
    x = tuple(float(member) for member in range(1, MEMBERS + 1))
    left = (Line("support", x, tuple(sizes), 2),)
    draft.plots.append(Plot("Classes left on the plane", "member", "mean classes", left, exits=MEMBERS, zero=True))
    draft.numbers = {"mean_support": sizes, "accuracy_percent": accuracy, "empty_percent": empty}
    return draft.finding(
        rows="1,000 points of a spiral for training, 2,000 others for testing, a grid of the plane for the figure",
        note="That the support never grows is a theorem, which the tests check, so no claim is counted: mean classes on the "
        f"plane {', '.join(f'{size:.2f}' for size in sizes)}. Our own spiral: the paper gives no formula. Five perceptrons are "
        "trained separately with cross-entropy and multiplied with ReLU and weights of one. The more classes are left, the "
        f"paler the colour; white is where none is left ({empty:.1f} % of the plane after five members) and the answer falls "
        "back to the last member. Accuracy on the test points after each member: "
        f"{', '.join(f'{value:.2f}' for value in accuracy)} %.",
    )


def spiral_member(train: PointData, seed: int, steps: int) -> MLP:
    """One perceptron of the ensemble."""
    model = in_float64(MLP(MLPConfig(classes=CLASSES, width=48, exits=3)), seed)
    inputs = train.inputs.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs)[-1], train.targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


def _members(at: int) -> str:
    return f"{at + 1} member{'s' if at else ''}"


def _cells(answer: Tensor, support: Tensor) -> tuple[tuple[tuple[int, float], ...], ...]:
    looks = (answer + 1).tolist()  # the first look is grey
    opacity = torch.where(support > 0, 1 - 0.24 * (support - 1), 0.0).tolist()
    cells = list(zip(looks, (round(value, 2) for value in opacity), strict=True))
    return tuple(tuple(cells[row * _CELLS : (row + 1) * _CELLS]) for row in range(_CELLS))


def regression(draft: Draft) -> Finding:
    """Intersected intervals over x after some members, for two orders, and what wider or narrower intervals would give.

    Claims are about several ensembles, since a single one may be lucky.
    """
    train, test = make_simple_1d()
    members = interval_members(train, MEMBERS * _ENSEMBLES[draft.scale], CURVE_STEPS[draft.scale])
    low, high = (float(end) for end in train.inputs.aminmax())
    x = torch.linspace(low - _BEYOND, high + _BEYOND, _X, dtype=torch.float64)[:, None]
    ends, at_test = _ends(members, x), _ends(members, test.inputs.double())
    first, second = Intersection()(*ends), Intersection()(*(part.flip(0) for part in ends))
    draft.plots += [
        _interval_plot(f"{name}: {_members(at)}", x[:, 0], answer, at, train)
        for name, answer in (("one order", first), ("reversed", second))
        for at in _SHOWN
    ]
    beyond = (x[:, 0] < low) | (x[:, 0] > high)
    covered, empty = [], []
    for factor in WIDENED:
        answer = Intersection()(*_widen(at_test, factor))
        inside = (answer.lower <= test.targets) & (test.targets <= answer.upper) & ~answer.fell_back
        covered.append([100 * float(values.double().mean()) for values in inside])
        gone = Intersection()(*_widen(ends, factor)).fell_back[-1][:, beyond]
        empty.append([100 * float(values.double().mean()) for values in gone])
    plain = WIDENED.index(1.0)
    widths = [float(values.mean()) for values in first.width.where(~first.fell_back, 0.0)]
    mean_empty = [sum(values) / len(values) for values in empty]
    curve = Line("widened by .6 to 3", tuple(mean_empty), tuple(values[-1] for values in covered), 2)
    draft.plots.append(Plot("The trade-off", "empty beyond the data, %", "test points covered, %", (curve,)))
    together = [
        f"{factor:g}"
        for factor, cover, gone in zip(WIDENED, covered, empty, strict=True)
        if min(cover) >= _WELL and min(gone) >= _NONE
    ]
    both = f"a factor of {', '.join(together)}" if together else "no width of the table"
    lost = [before - after for before, after in pairwise(widths)]
    draft.claim(
        "the last members have smaller effects (the last at most half that of the second)",
        lost[-1] <= lost[0] / 2,
        f"mean width, 0 where empty, {', '.join(f'{width:.3f}' for width in widths)}",
    )
    draft.claim(
        f"the intervals cover the data well, after every member ({_WELL:g} % or more)",
        min(covered[plain]) >= _WELL,
        "of the test points " + ", ".join(f"{value:.1f}" for value in covered[plain]) + " %",
    )
    draft.claim(
        f"there is no support beyond the data (empty on {_NONE:g} % or more)",
        min(empty[plain]) >= _NONE,
        f"empty after five members on {', '.join(f'{value:.0f}' for value in empty[plain])} % of the range up to one standard "
        "deviation beyond, per ensemble",
    )
    draft.table += [
        (f"{factor:g}", f"{cover[0]:.1f}, {cover[-1]:.1f} %", f"{gone:.0f} %")
        for factor, cover, gone in zip(WIDENED, covered, mean_empty, strict=True)
    ]
    draft.numbers = {"widened": WIDENED, "coverage_percent": covered, "mean_width": widths, "empty_beyond_percent": empty}
    return draft.finding(
        rows="the 501 training and 501 test points of the paper's set",
        note="The paper's data, made by its published formula: the simple 1-d set of Depth Uncertainty Networks, x and y "
        "standardised. Members are trained separately with the interval score for 95 % coverage, since a uniform density has "
        "no gradient outside of its interval; the paper does not say how its were trained. Numbers are means over ensembles "
        f"of five members ({len(empty[0])} in all); the first is shown. That intervals never grow and that the order does not "
        "matter in the end are theorems, which the tests check. The table widens every member's interval about its middle: "
        "intervals narrow enough to be empty beyond the data leave out test points, and those that cover them are rarely empty "
        f"there. The paper's two statements, coverage and no support beyond the data, hold together at {both}.",
        headings=("width of the intervals, factor", "test points covered, one and five members", "empty beyond the data"),
    )


def interval_members(train: PointData, count: int, steps: int) -> list[IntervalMLP]:
    """Members trained independently in one vectorised loop: a step of all costs little more than a step of one."""
    members = [in_float64(IntervalMLP(width=48, exits=3), seed) for seed in range(count)]
    weights, buffers = stack_module_state(members)
    x, targets = train.inputs.double(), train.targets.double()
    forward = torch.func.vmap(lambda one, rest: torch.func.functional_call(members[0], (one, rest), (x,)))
    optimizer = torch.optim.Adam(weights.values(), lr=0.005)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(steps):
        lower, upper = forward(weights, buffers)[:, -1].unbind(-1)  # (members, points) each, at the last exit
        loss = interval_score(lower, upper, targets).mean(-1).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    for place, member in enumerate(members):
        member.load_state_dict({name: values[place].detach() for name, values in (weights | buffers).items()})
    return [member.eval() for member in members]


@torch.no_grad()
def _ends(members: list[IntervalMLP], x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper ends of every ensemble's members, `(members, ensembles, x)` each."""
    ends = torch.stack([torch.stack(member.intervals(x))[:, -1] for member in members])  # (members, lower and upper, x)
    lower, upper = ends.reshape(-1, MEMBERS, 2, len(x)).permute(2, 1, 0, 3)
    return lower, upper


def _widen(ends: tuple[Tensor, Tensor], factor: float) -> tuple[Tensor, Tensor]:
    """Intervals with the same middle and `factor` times the width."""
    middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    return middle - factor * half, middle + factor * half


def _interval_plot(title: str, x: Tensor, answer: Interval, at: int, train: PointData) -> Plot:
    places = tuple(x.tolist())
    gone = answer.fell_back[at, 0].tolist()  # of the first ensemble
    low, high, middle = (
        tuple(None if empty else value for value, empty in zip(values[at, 0].tolist(), gone, strict=True))
        for values in (answer.lower, answer.upper, answer.middle)
    )
    order = train.inputs[:, 0].argsort()[::12]
    points = [
        Line("training points", (float(train.inputs[row, 0]),), (float(train.targets[row]),), 0, faint=True)
        for row in order.tolist()
    ]
    band, lines = Band("interval", places, low, high, 2), (*points, Line("middle", places, middle, 2, marks=False))
    return Plot(title, "x", "y", lines, y_range=(-6.0, 3.0), bands=(band,))
