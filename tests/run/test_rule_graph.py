"""Rules as graphs: the same answers as the rule's own, whatever the rows are like."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import anytime
from anytime.combine import Prediction, Rule, State
from anytime.errors import NonFiniteError
from anytime.run.combining import ByRule
from anytime.run.export.rule_graph import ByGraph, by_graph

pytest.importorskip("onnxruntime")

EXITS, CLASSES = 4, 6
# The rules of the paper and of tuning; others are evaluated by torch.
GRAPHS = [
    anytime.Latest(),
    anytime.Caching(),
    anytime.Product(),
    anytime.Product(anytime.combine.Softplus()),
    anytime.Product(weights="ones", shift="1/K"),
    anytime.Product(weights=(0.0, 1.0, 2.0, 0.5)),
    anytime.Product(anytime.combine.ThresholdReLU(0.5)),
    anytime.Product(anytime.combine.Heaviside()),
    anytime.Powers(past=(1.0, 0.5, 2.0, 1.0), now=(1.0, 0.5, 1.0, 3.0)),
    anytime.Powers(past=(1.0, 0.5, 2.0, 1.0), now=(1.0, 0.5, 1.0, 3.0), margin=0.5),
    anytime.Tempered(anytime.Product(), (1.0, 1.5, 0.7, 2.0)),
    anytime.Cached(anytime.Product()),
]


def logits_of(kind: str, batch: int, classes: int = CLASSES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    logits = 4 * torch.randn(EXITS, batch, classes, generator=generator)
    match kind:
        case "collapsed":
            logits[1:, 0] = -logits[1:, 0].abs() - 1
        case "without evidence":
            logits = -logits.abs() - 1
        case "large":
            logits *= 1e4
    return list(logits)


@pytest.mark.parametrize("rule", GRAPHS, ids=repr)
@pytest.mark.parametrize("classes", [2, CLASSES])
def test_graphs_give_the_answers_of_the_rule(rule: Rule[State], classes: int) -> None:
    graphs, plain = by_graph(rule, EXITS, classes), ByRule(rule)
    assert isinstance(graphs, ByGraph)
    for kind in ("typical", "collapsed", "without evidence", "large"):
        for batch in (1, 2, 7):
            logits = logits_of(kind, batch, classes)
            for seen in range(1, EXITS + 1):
                found = graphs.after([now.numpy() for now in logits[:seen]], EXITS)
                wanted = plain.after(logits[:seen], EXITS)
                torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-5, atol=1e-5)
                assert torch.equal(found.fell_back, wanted.fell_back)
                assert torch.equal(found.labels, wanted.labels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    logits = logits_of("typical", 2)
    logits[1][0, 0] = value
    with pytest.raises(NonFiniteError):
        by_graph(anytime.Product(), EXITS, CLASSES).after([now.numpy() for now in logits], EXITS)


@dataclass(frozen=True)
class ByHand(Rule[State]):
    """Takes another branch if a logit is large, which no row that graphs are compared on shows."""

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        sharper = 2.0 if bool((logits.abs() < 1e3).all()) else 1.0
        fell_back = torch.zeros(len(logits), dtype=torch.bool)
        return State(state.exits, state.seen + 1, logits), Prediction((sharper * logits).log_softmax(-1), fell_back)


@dataclass(frozen=True)
class Halved:
    """An activation that is not part of the library."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        return (logits / (2.0 if bool((logits.abs() < 1e3).all()) else 1.0)).clamp(min=0).log()


OTHERS = [(ByHand(), "ByHand"), (anytime.Cached(ByHand()), "Cached"), (anytime.Product(Halved()), "Product")]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        *((rule, f"torch: {name}, or a part of it, is not a rule of this") for rule, name in OTHERS),
        (anytime.Mixture(), "torch: Mixture("),
    ],
    ids=repr,
)
def test_a_rule_that_cannot_be_a_graph_is_evaluated_by_torch_and_the_reason_is_kept(rule: Rule[State], why: str) -> None:
    chosen = by_graph(rule, EXITS, CLASSES)
    assert not isinstance(chosen, ByGraph)
    assert chosen.why.startswith(why)
    logits = logits_of("large", 3)
    torch.testing.assert_close(chosen.after(logits, EXITS).log_probs, ByRule(rule).after(logits, EXITS).log_probs)
