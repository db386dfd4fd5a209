"""Appendix B.6: an ensemble as an anytime model, member by member, on a spiral with four arms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.combine import Product
from anytime.data.toys import PointData, make_spiral
from anytime.metrics import follow
from anytime.models import MLP, Ensemble, MLPConfig
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Field, Finding, Line, Panel
from anytime.reproduce.float64 import in_float64

MEMBERS, CLASSES = 5, 4
_STEPS = {"smoke": 60, "small": 400, "full": 1000}
_CELLS = 48
_EDGE = 1.3


def study(context: Context) -> Finding:
    """The support on the plane after each member, and accuracy on other points."""
    train, test = make_spiral(1000, seed=0), make_spiral(2000, seed=1)
    ensemble = Ensemble([_member(train, seed, _STEPS[context.scale]) for seed in range(MEMBERS)])
    axis = torch.linspace(-_EDGE, _EDGE, _CELLS, dtype=torch.float64)
    plane = torch.stack(torch.meshgrid(axis, -axis, indexing="xy"), -1).flatten(0, 1)
    with torch.inference_mode():
        rule = Product(weights="ones")
        answers = rule(ensemble(plane))
        logits = ensemble(test.inputs.double())
        seen = follow(rule(logits), test.targets)
    alive = ~answers.fell_back
    support = torch.where(alive, (answers.log_probs > -torch.inf).sum(-1), 0)
    accuracy = [100 * float(values.double().mean()) for values in _known(seen.correct)]
    sizes = [float(values.double().mean()) for values in support]
    panels = [Field(f"{at + 1} member{'s' if at else ''}", _cells(answers.labels[at], support[at])) for at in range(MEMBERS)]
    x = tuple(float(member) for member in range(1, MEMBERS + 1))
    curve = Panel(
        "Classes left on the plane", "member", "mean classes", (Line("support", x, tuple(sizes), 2),), exits=MEMBERS, zero=True
    )
    empty = 100 * float((~alive[-1]).double().mean())
    return context.finding(
        runs=(),
        rows="1,000 points of a spiral to learn from, 2,000 others to test on, a grid of the plane to draw",
        note="Our own spiral: the paper gives no formula. Five perceptrons are trained apart with the softmax's likelihood, "
        "and multiplied "
        "with ReLU and weights of one. The more classes are left, the paler the colour; white is where none is left "
        f"({empty:.1f} % of "
        "the plane after five members), where the answer falls back on the last member. Accuracy on the test points after "
        "each member: " + ", ".join(f"{value:.2f}" for value in accuracy) + " %.",
        panels=(*panels, curve),
        claims=(
            Claim(
                "the support never grows",
                bool((support.diff(dim=0) <= 0).all()),
                "mean classes on the plane " + ", ".join(f"{size:.2f}" for size in sizes),
            ),
        ),
        numbers={"mean_support": sizes, "accuracy_percent": accuracy, "empty_percent": empty},
    )


def _member(train: PointData, seed: int, steps: int) -> MLP:
    model = in_float64(MLP(MLPConfig(classes=CLASSES, width=48, exits=3)), seed)
    inputs = train.inputs.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs)[-1], train.targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


def _cells(answer: Tensor, support: Tensor) -> tuple[tuple[tuple[int, float], ...], ...]:
    looks = (answer + 1).tolist()  # the first look is grey
    strengths = torch.where(support > 0, 1 - 0.24 * (support - 1), 0.0).tolist()
    cells = list(zip(looks, (round(value, 2) for value in strengths), strict=True))
    return tuple(tuple(cells[row * _CELLS : (row + 1) * _CELLS]) for row in range(_CELLS))


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
