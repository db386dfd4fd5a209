"""Probabilities and log-probabilities where logits belong are refused everywhere, and real logits never."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.calibrate import fit_laplace
from anytime.combine import AdaptiveReLU, Cached, Rule, Scaled, Tempered
from anytime.errors import DtypeError, ScaleError
from anytime.models import MLP, Ensemble, MLPConfig, average_logits
from anytime.policy import Confidence, run_batch
from anytime.run.export import export

READ_SCALE: list[Rule[Any]] = [
    anytime.Product(),
    anytime.Product(anytime.combine.Sigmoid()),
    anytime.Product(anytime.combine.Softplus()),
    anytime.Product(AdaptiveReLU(1.0, (0.5,), 0.0)),
    anytime.Mixture(),
    Scaled(anytime.Product(), (1.0, 1.0, 1.0)),
    Tempered(anytime.Product(), (1.0, 1.0, 1.0)),
    Cached(anytime.Product()),
]
READ_DIFFERENCES: list[Rule[Any]] = [
    anytime.Latest(),
    anytime.Caching(),
    anytime.Product(anytime.combine.Exponential()),
    anytime.Mixture(anytime.combine.Exponential()),
    Cached(anytime.Latest()),
    anytime.combine.Geometric.plain(3),
    anytime.combine.Powers((1.0,) * 3, (1.0,) * 3),
    anytime.combine.Powers((0.5,) * 3, (1.0,) * 3, margin=0.5),
]


def logits(rows: int = 6, seed: int = 0) -> Tensor:
    return 3 * torch.randn(3, rows, 5, generator=torch.Generator().manual_seed(seed))


class LogSoftmax(MLP):
    """A model whose exits end in a log-softmax."""

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        return (now.log_softmax(-1) for now in super().exits(x))


def model(kind: type[MLP] = MLP) -> MLP:
    torch.manual_seed(0)
    return kind(MLPConfig(classes=5, inputs=2, exits=3)).eval()


@pytest.mark.parametrize("rows", [1, 6, 100])
@pytest.mark.parametrize("rule", READ_SCALE, ids=repr)
def test_rules_that_read_the_scale_refuse_log_probabilities_unless_told(rule: Rule[Any], rows: int) -> None:
    log_probs = logits(rows).log_softmax(-1)
    for attempt in (lambda: rule(log_probs), lambda: rule.step(rule.start(3), log_probs[0])):
        with pytest.raises(ScaleError, match="log-probabilities") as caught:
            attempt()
        assert "exit 1" in str(caught.value)
        assert "probabilities=True" in caught.value.fix
    told = rule(log_probs, probabilities=True)
    assert not told.log_probs.isnan().any()
    assert torch.equal(rule(log_probs.exp(), probabilities=True).labels, told.labels)
    state, first = rule.step(rule.start(3), log_probs[0], probabilities=True)
    torch.testing.assert_close(first.log_probs, told.log_probs[0])
    rule.step(state, log_probs[1], probabilities=True)


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("rule", READ_DIFFERENCES, ids=repr)
def test_rules_that_read_differences_take_log_probabilities_as_logits(rule: Rule[Any], rows: int) -> None:
    given = logits(rows)
    log_probs = given.log_softmax(-1)
    torch.testing.assert_close(rule(log_probs).probs, rule(given).probs, rtol=1e-4, atol=1e-5)
    assert torch.equal(rule(log_probs).labels, rule(given).labels)
    rule.step(rule.start(3), log_probs[0])


@pytest.mark.parametrize("rule", [*READ_SCALE, *READ_DIFFERENCES], ids=repr)
def test_probabilities_are_no_logits_for_any_rule(rule: Rule[Any]) -> None:
    probs = logits().softmax(-1)
    with pytest.raises(ScaleError, match="look like probabilities"):
        rule(probs)
    with pytest.raises(ScaleError, match="look like probabilities"):
        rule.step(rule.start(3), probs[0])
    rule(probs, probabilities=True)


def test_real_logits_are_never_taken_for_probabilities() -> None:
    product = anytime.Product()
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 3, 10):
        rows = torch.randn(1, 50_000, classes, generator=generator) - 1 - classes / 10
        sums = rows.exp().sum(-1)
        near = ((sums - 1).abs() < 0.01) & (rows.amax(-1) <= 0)  # what a look at one row alone would refuse
        assert bool(near.any())
        for row in rows[:, near[0]].unbind(1)[:50]:
            product(row[:, None])
    for hand_written in ([[1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]], [[0.25, 0.25, 0.25]], [[-1.0, -1.0, -1.0]], [[1.0, 1.0, 0.0]]):
        product(torch.tensor([hand_written]))
    product(torch.zeros(3, 0, 5))
    product(torch.full((2, 4, 1), -0.0))


def test_a_later_step_is_not_looked_at() -> None:
    product = anytime.Product()
    state, _ = product.step(product.start(2), logits()[0])
    product.step(state, logits()[1].log_softmax(-1))


@pytest.mark.parametrize("engine", ["eager", "folded"])
def test_a_runner_refuses_them_at_the_first_batch_unless_told(engine: str) -> None:
    x, kind = torch.randn(1, 2), model(LogSoftmax)
    if engine == "folded":
        members = [model(), model()]
        kind = Ensemble.averaged(members).eval()  # type: ignore[assignment]
    with anytime.Runner(kind, anytime.Product(), engine, example=x) as runner:
        for _ in range(2):  # a refusal is not forgotten
            with pytest.raises(ScaleError, match="log-probabilities"):
                runner.predict(x)
        with pytest.raises(ScaleError, match="log-probabilities"):
            runner.predict(x, deadline=60.0)
        with pytest.raises(ScaleError, match="log-probabilities"):
            list(runner.stream(x))
    with (
        anytime.Runner(kind, anytime.Product(), engine, example=x, policy=Confidence(0.9)) as runner,
        pytest.raises(ScaleError, match="log-probabilities"),
    ):
        runner.predict(x)
    with anytime.Runner(kind, anytime.Product(), engine, example=x, probabilities=True) as runner:
        assert bool(runner.predict(x).fell_back.all())
    with anytime.Runner(kind, anytime.Caching(), engine, example=x) as runner:
        assert runner.predict(x).exit == 3


def test_a_runner_looks_at_the_first_batch_only() -> None:
    x, given = torch.randn(4, 2), model()
    with anytime.Runner(given, anytime.Product()) as runner:
        before = runner.predict(x)
        assert runner._setup is not None
        assert runner._setup.combiner.unchecked is False  # type: ignore[attr-defined]
        torch.testing.assert_close(runner.predict(x).log_probs, before.log_probs)


def test_ensembles_and_laplace_say_which_rules_they_suit() -> None:
    x = torch.randn(7, 2)
    members = [model(), model()]
    saved = average_logits([logits(7, 1), logits(7, 2)])
    with torch.no_grad():
        averaged = Ensemble.averaged(members).eval()(x)
    labels = torch.arange(60) % 5
    features = [torch.randn(60, 4, generator=torch.Generator().manual_seed(exit)) for exit in range(3)]
    layers = [(torch.randn(5, 4), torch.zeros(5)) for _ in range(3)]
    posterior = fit_laplace(features, labels, layers).predict([each[:7] for each in features])
    for log_probs in (saved, averaged, posterior):
        for rule in READ_DIFFERENCES:
            assert rule(log_probs).labels.shape == (3, 7)
        with pytest.raises(ScaleError, match="Caching"):
            anytime.Product()(log_probs)
        with pytest.raises(ScaleError):
            anytime.evaluate(log_probs, torch.zeros(7, dtype=torch.long))


def test_run_batch_and_export_refuse_them_too(tmp_path: Any) -> None:
    class Staged(MLP):
        def stage(self, exit: int, carry: Any) -> Any:
            left, now = super().stage(exit, carry)
            return left, now.log_softmax(-1)

    given, x = model(Staged), torch.randn(4, 2)
    with pytest.raises(ScaleError, match="log-probabilities"):
        run_batch(given, x, anytime.Product(), Confidence(0.9))
    with pytest.raises(ScaleError, match="log-probabilities"):
        export(given, tmp_path / "stages", rule="product", example=x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("policy", [None, Confidence(0.9)], ids=["all exits", "policy"])
def test_a_runner_refuses_logits_that_are_no_floating_point_numbers(dtype: torch.dtype, policy: Any) -> None:
    class Odd(MLP):
        def exits(self, x: Tensor) -> Iterator[Tensor]:
            return ((5 * now).to(dtype) for now in super().exits(x))

    for rule in (anytime.Product(), anytime.Latest()):
        with anytime.Runner(model(Odd), rule, policy=policy) as runner:
            for options in ({}, {"deadline": 60.0}):
                with pytest.raises(DtypeError, match="floating point"):
                    runner.predict(torch.randn(2, 2), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_runner_computes_on_other_floats_as_the_rules_do(dtype: torch.dtype) -> None:
    class Other(MLP):
        def exits(self, x: Tensor) -> Iterator[Tensor]:
            return (now.to(dtype) for now in super().exits(x))

    given, x = model(Other), torch.randn(4, 2)
    with torch.no_grad():
        wanted = anytime.Product()(torch.stack(list(given.exits(x))))
    with anytime.Runner(given, anytime.Product()) as runner:
        found = runner.predict(x)
    assert found.log_probs.dtype == wanted.log_probs.dtype
    torch.testing.assert_close(found.log_probs, wanted.log_probs[-1])
