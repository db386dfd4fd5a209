"""Inputs that leave the running batch are answered as if all had run through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.combine import Arithmetic, Geometric, Rule
from anytime.errors import OptionError, ShapeError
from anytime.models import MLP, Carry, MLPConfig, MultiExit, create, is_staged
from anytime.policy import Confidence, DecisionWindow, Entropy, Margin, Patience, Policy, fit_budget_policy, run_batch

EXITS, BATCH, CLASSES = 5, 40, 6
LOGITS = 3 * torch.randn(EXITS, BATCH, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LOGITS[:, 3] = -1  # a row that collapses
RULES = [
    *map(
        anytime.parse_rule,
        (
            "latest",
            "caching",
            "product",
            "product(heaviside)",
            "mixture",
            "cached(product)",
            "tempered(product, temperatures=(2.0, 1.0, 1.0, 1.0, 0.5))",
            "powers((1.0, 0.5, 0.5, 0.5, 0.5), (1.0, 0.5, 2.0, 0.5, 1.0))",
        ),
    ),
    Geometric.plain(EXITS),
    Arithmetic.plain(EXITS),
]
POLICIES = [
    Confidence(0.7),
    Confidence(0.95, otherwise="most_confident"),
    Confidence((0.9, 2.0, 0.3, 0.9, 0.1), strict=True),
    Entropy(0.5),
    Margin(0.6, otherwise="most_confident"),
    Patience(2),
    Patience(3, otherwise="most_confident"),
    DecisionWindow(0.4, 0.8),
    Confidence(-1.0),
    Confidence(2.0),
]


class Replay(nn.Module):
    """Gives stored logits: what is carried is the logits of the exits to come, one tensor an exit."""

    num_exits = EXITS

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield from x.unbind(1)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        rest = carry[0].unbind(1) if exit == 0 else carry
        self.sizes.append(len(rest[0]))
        return tuple(rest[1:]), rest[0]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("compact_when", [0.0, 0.6, 1.0])
def test_answers_are_those_of_the_simulation(rule: Rule, policy: Policy, compact_when: float) -> None:
    expected = policy.answer(rule(LOGITS))
    model = Replay().eval()
    found = run_batch(model, LOGITS.movedim(0, 1), rule, policy, compact_when=compact_when)
    assert torch.equal(found.exit, expected.exit)
    assert torch.equal(found.source, expected.source)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    assert torch.equal(found.fell_back, expected.fell_back)
    assert torch.equal(found.labels, expected.labels)
    assert len(model.sizes) == int(expected.exit.max())  # nothing beyond the last exit anybody needs
    if compact_when == 1:
        assert model.sizes == [int((expected.exit > exit).sum()) for exit in range(len(model.sizes))]
    if compact_when == 0:
        assert set(model.sizes) == {BATCH}


@pytest.mark.parametrize(
    "name", ["mlp-toy", "msdnet-cifar", "imta-cifar", "sdn-resnet-cifar-56", "ztw-resnet-cifar-56", "dvit-cifar"]
)
def test_networks_answer_as_they_do_without_stopping(name: str) -> None:
    torch.manual_seed(0)
    model = create(name, classes=10).eval()
    assert is_staged(model)
    x = torch.randn(6, 2) if name == "mlp-toy" else torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        logits = model(x)
    for rule in (anytime.Latest(), anytime.Product()):
        prediction = rule(logits)
        # Half-way between two confidences, so that rounding does not move a row across.
        confidence = prediction.confidence.double()
        limits = tuple(float(row.sort().values[2:4].mean()) for row in confidence)
        policy = Confidence(limits)
        expected = policy.answer(prediction)
        assert len(set(expected.exit.tolist())) > 1
        found = run_batch(model, x, rule, policy, compact_when=1.0)
        assert torch.equal(found.exit, expected.exit)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-3, atol=1e-4)


def test_a_fitted_policy_is_checked_and_used() -> None:
    log_probs = anytime.Product()(LOGITS).log_probs
    fit = fit_budget_policy(log_probs, costs=range(1, EXITS + 1), budget=2.5)
    found = run_batch(Replay().eval(), LOGITS.movedim(0, 1), anytime.Product(), fit)
    assert torch.equal(found.exit, fit.apply(log_probs))
    with pytest.raises(ShapeError, match="fitted"):
        run_batch(MLP(MLPConfig(classes=CLASSES, inputs=2, exits=EXITS + 1)).eval(), torch.zeros(3, 2), anytime.Product(), fit)
    with pytest.raises(OptionError, match="3 numbers"):
        run_batch(Replay().eval(), LOGITS.movedim(0, 1), anytime.Product(), Confidence((0.5, 0.5, 0.5)))


def test_an_empty_batch_has_empty_answers() -> None:
    found = run_batch(Replay().eval(), LOGITS.movedim(0, 1)[:0], anytime.Product(), Patience(2))
    assert found.log_probs.shape == (0, CLASSES)
    assert found.exit.tolist() == []


def test_what_cannot_be_run_stage_by_stage_is_refused() -> None:
    class Whole(MultiExit):
        num_exits = 2

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            yield x
            yield x

    x = torch.zeros(2, 3)
    with pytest.raises(OptionError, match="stage by stage"):
        run_batch(Whole().eval(), x, anytime.Latest(), Patience(2))
    with pytest.raises(OptionError, match="training mode"):
        run_batch(Replay(), LOGITS.movedim(0, 1), anytime.Latest(), Patience(2))
    with pytest.raises(OptionError, match="compact_when"):
        run_batch(Replay().eval(), LOGITS.movedim(0, 1), anytime.Latest(), Patience(2), compact_when=1.5)
