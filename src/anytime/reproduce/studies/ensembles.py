"""B.6: an ensemble as an anytime model, one member after the other: a spiral to classify, and intervals for a curve.

Networks are trained in float64: processors differ in the last bit of a float32 sample, sum or product, training amplifies
that, and after a thousand steps they would disagree on what a study finds.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional as F

from anytime.combine import Intersection, Interval, Product
from anytime.data.toys import PointData, make_curve, make_spiral
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
CURVE_STEPS = {"smoke": 60, "small": 600, "full": 1500}
_X, _CURVE_EDGE = 121, 1.5
_SHOWN = (0, 1, 4)


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
    draft.claim(
        "the support never grows",
        bool((support.diff(dim=0) <= 0).all()),
        "mean classes on the plane " + ", ".join(f"{size:.2f}" for size in sizes),
    )
    draft.numbers = {"mean_support": sizes, "accuracy_percent": accuracy, "empty_percent": empty}
    return draft.finding(
        rows="1,000 points of a spiral for training, 2,000 others for testing, a grid of the plane for the figure",
        note="Our own spiral: the paper gives no formula. Five perceptrons are trained separately with cross-entropy and "
        "multiplied with ReLU and weights of one. The more classes are left, the paler the colour; white is where none is left "
        f"({empty:.1f} % of the plane after five members) and the answer falls back to the last member. Accuracy on the test "
        f"points after each member: {', '.join(f'{value:.2f}' for value in accuracy)} %.",
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
    """Intersected intervals over x after some members, for two orders of the same members.

    Claims are about several ensembles, since a single one may be lucky.
    """
    train, test = make_curve(200, seed=0), make_curve(1000, seed=1)
    members = interval_members(train, MEMBERS * _ENSEMBLES[draft.scale], CURVE_STEPS[draft.scale])
    x = torch.linspace(-_CURVE_EDGE, _CURVE_EDGE, _X, dtype=torch.float64)[:, None]
    found = {name: _intersect(members, x, backwards=name == "reversed") for name in ("one order", "reversed")}
    first, second = found.values()
    draft.plots += [
        _interval_plot(f"{name}: {_members(at)}", x[:, 0], answer, at, train) for name, answer in found.items() for at in _SHOWN
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
    draft.claim(
        "intervals never grow where they are not empty",
        all(_shrinks(answer) for answer in found.values()),
        "mean width, 0 where empty: " + ", ".join(f"{width:.2f}" for width in widths),
    )
    draft.claim("the order does not matter in the end", same, "after five members both orders give the same intervals")
    draft.claim(
        "the first members do most of the work",
        widths[0] - widths[1] >= widths[-2] - widths[-1],
        f"width lost with the second member {widths[0] - widths[1]:.3f}, with the last {widths[-2] - widths[-1]:.3f}",
    )
    draft.claim(
        "the intervals cover the data well, after every member (90 % or more)",
        min(inside) >= 90,
        "of the test points " + ", ".join(f"{value:.1f}" for value in inside) + " %",
    )
    draft.claim(
        "there is no support beyond the data",
        min(empty) == 100,
        f"empty after five members on {', '.join(f'{value:.1f}' for value in empty)} % of the range beyond ±1, per ensemble",
    )
    draft.numbers = {"coverage_percent": inside, "mean_width": widths, "empty_beyond_data_percent": empty}
    return draft.finding(
        rows="200 points of a curve with a gap for training, 1,000 others for testing",
        note="Our own curve: the paper gives no formula. Members are trained separately with the interval score for 95 % "
        "coverage, since a uniform density has no gradient outside of its interval. Numbers are means over "
        f"ensembles of five members ({len(empty)} in all); the first is shown. Intersecting intervals costs coverage, since "
        "each member misses points of its own; the paper's figure gives no numbers.",
    )


def interval_members(train: PointData, count: int, steps: int) -> list[IntervalMLP]:
    """Members trained independently in one vectorised loop: a step of all costs little more than a step of one."""
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
    """The intersections of every ensemble at once, `(members, ensembles, x)`."""
    ends = torch.stack([torch.stack(member.intervals(x))[:, -1] for member in members])  # (members, lower and upper, x)
    lower, upper = ends.reshape(-1, MEMBERS, 2, len(x)).permute(2, 1, 0, 3)
    return Intersection()(lower.flip(0), upper.flip(0)) if backwards else Intersection()(lower, upper)


def _shrinks(answer: Interval) -> bool:
    alive = ~answer.fell_back[1:]
    return bool((answer.width.diff(dim=0)[alive] <= 1e-6).all())


def _interval_plot(title: str, x: Tensor, answer: Interval, at: int, train: PointData) -> Plot:
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
    band, lines = Band("interval", places, low, high, 2), (*points, Line("middle", places, middle, 2, marks=False))
    return Plot(title, "x", "y", lines, y_range=(-2.0, 2.0), bands=(band,))
