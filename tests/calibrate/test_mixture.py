"""The mixture of exits with last-layer Laplace, and ensembles averaged at each exit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import anytime
from anytime.calibrate import LaplaceMixture, LastLayerLaplace, average_logits, fit_mixture
from anytime.calibrate.laplace.mixture import TEMPERATURES, VARIANCES
from anytime.errors import AnytimeError, FormatError, IntegrityError, LabelError, OptionError, OverlapError, ShapeError
from anytime.models import MLP, Ensemble, MLPConfig
from anytime.models.features import collect_features, last_layers

CLASSES, WIDTHS, COSTS = 3, (2, 4), (10.0, 40.0)


def rows(count: int, seed: int) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    features = [torch.randn(count, width, generator=random, dtype=torch.float64) for width in WIDTHS]
    for now in features:
        now[torch.arange(count), labels % now.shape[1]] += 1
    return features, labels


def layers() -> list[tuple[Tensor, Tensor | None]]:
    """Layers that know something and are too sure of it; the second has no bias."""
    first = torch.tensor([[4.0, 0.0], [0.0, 4.0], [2.0, 0.0]])
    return [(first, torch.tensor([0.0, 0.5, -0.5])), (4 * torch.eye(3, 4), None)]


def fit(**options: Any) -> LaplaceMixture:
    tuning, wanted = rows(60, 1000)
    return fit_mixture(*rows(50, 0), layers(), COSTS, **({"tuning_features": tuning, "tuning_labels": wanted} | options))


def with_one(features: Tensor, bias: Tensor | None) -> np.ndarray:
    return np.concatenate((features.numpy(), np.ones((len(features), 0 if bias is None else 1))), 1)


def softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def reference(
    exit: int, fitted: Tensor, features: Tensor, *, total: int, variance: float, temperature: float, draws: np.ndarray
) -> np.ndarray:
    """Probabilities of one exit, from the formulas: factors, inverses and a root by NumPy."""
    weight, bias = layers()[exit]
    phi, theta = with_one(fitted, bias), weight.double().numpy()
    if bias is not None:
        theta = np.concatenate((theta, bias.double().numpy()[:, None]), 1)
    probs = softmax(phi @ theta.T)
    u = np.mean([np.diag(p) - np.outer(p, p) for p in probs], 0)
    v = np.mean([np.outer(row, row) for row in phi], 0)
    u = math.sqrt(total) * u + math.sqrt(1 / variance) * np.eye(len(u))
    v = math.sqrt(total) * v + math.sqrt(1 / variance) * np.eye(len(v))
    values, vectors = np.linalg.eigh(np.linalg.inv(u))
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    answers = []
    for row in with_one(features, bias):
        noise = math.sqrt(row @ np.linalg.inv(v) @ row) * (draws @ root)
        answers.append(softmax((theta @ row + noise) / temperature).mean(0))
    return np.array(answers)


def draws(samples: int, seed: int) -> np.ndarray:
    return torch.randn(samples, CLASSES, generator=torch.Generator().manual_seed(seed)).double().numpy()


@pytest.mark.parametrize("total", [None, 500])
def test_each_exit_follows_the_formulas(total: int | None) -> None:
    (fitted, _), (test, _) = rows(50, 0), rows(8, 1)
    mixture = fit(rows=total, samples=20, seed=3)
    for exit in range(2):
        wanted = reference(
            exit,
            fitted[exit],
            test[exit],
            total=total or 50,
            variance=mixture.variances[exit],
            temperature=mixture.temperatures[exit],
            draws=draws(20, 3),
        )
        assert np.allclose(mixture.predict_at(exit + 1, test[exit]).exp(), wanted, atol=1e-5)


def test_the_mixture_is_the_mean_weighted_by_cost() -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    first, second = (mixture.predict_at(exit, now).exp() for exit, now in enumerate(test, 1))
    found = mixture.predict(test).probs
    assert mixture.costs == (0.25, 1.0)
    assert torch.allclose(found[0], first)
    assert torch.allclose(found[1], (0.25 * first + second) / 1.25)


def test_the_mixture_is_the_rule_of_that_name() -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    assert mixture.rule == anytime.Mixture(anytime.combine.Exponential(), weights=(0.25, 1.0))
    alone = torch.stack([mixture.predict_at(exit, now) for exit, now in enumerate(test, 1)])
    torch.testing.assert_close(mixture.predict(test).log_probs, mixture.rule(alone).log_probs)
    # The scale of the costs does not matter.
    same = anytime.Mixture(anytime.combine.Exponential(), weights=COSTS)(alone)
    assert torch.allclose(same.log_probs, mixture.predict(test).log_probs)


def test_steps_give_what_the_whole_gives() -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    state = mixture.start()
    for exit, now in enumerate(test):
        state, prediction = mixture.step(state, now)
        assert torch.allclose(prediction.log_probs, mixture.predict(test).log_probs[exit], atol=1e-12)


def test_variance_and_temperature_are_the_best_of_the_grid_one_exit_after_the_other() -> None:
    """All hundred pairs of each exit by the reference, with the exits before it as chosen."""
    (fitted, _), (tuning, wanted) = rows(50, 0), rows(60, 1000)
    mixture = fit(samples=6, seed=2)
    total, weight = np.zeros((60, CLASSES)), 0.0
    for exit in range(2):
        weight += mixture.costs[exit]
        losses = {}
        for variance in VARIANCES:
            for temperature in TEMPERATURES:
                probs = reference(
                    exit,
                    fitted[exit],
                    tuning[exit],
                    total=50,
                    variance=variance,
                    temperature=temperature,
                    draws=draws(6, 2),
                )
                mixed = (total + mixture.costs[exit] * probs) / weight
                losses[variance, temperature] = -np.log(mixed[np.arange(60), wanted.numpy()]).mean()
        chosen = mixture.variances[exit], mixture.temperatures[exit]
        assert losses[chosen] == pytest.approx(min(losses.values()), rel=1e-6)
        assert mixture.losses[exit] == pytest.approx(losses[chosen], rel=1e-5)
        total += mixture.costs[exit] * mixture.predict_at(exit + 1, tuning[exit]).exp().numpy()


def test_running_factors_follow_their_recursion_and_are_near_the_exact_ones() -> None:
    fitted, _ = rows(50, 0)
    one = fit(factors="running", batch=50, seed=1)
    weight, bias = layers()[1]
    phi = with_one(fitted[1], bias)
    probs = softmax(phi @ weight.double().numpy().T)
    said = torch.multinomial(torch.from_numpy(probs), 1, generator=torch.Generator().manual_seed(1))[:, 0].numpy()
    off = probs - np.eye(CLASSES)[said]
    curvature = one.curvatures[1]
    for name, wanted in (("output", off.T @ off / 50), ("input", phi.T @ phi / 50)):
        basis, values = curvature[f"{name}_basis"].double(), curvature[f"{name}s"].double()
        found = (basis * values) @ basis.mT
        assert np.allclose(found, math.sqrt(50) * wanted, atol=1e-5)
    many, many_labels = rows(4000, 5)
    tuning, tuning_labels = rows(60, 6)
    tuned = {"tuning_features": tuning, "tuning_labels": tuning_labels, "variances": [1.0], "temperatures": [1.0]}
    exact, running = (
        fit_mixture(many, many_labels, layers(), COSTS, factors=factors, **tuned)  # type: ignore[arg-type]
        for factors in ("exact", "running")
    )
    apart = exact.predict(tuning).probs - running.predict(tuning).probs
    assert 0 < float(apart.abs().max()) < 0.05


def test_running_factors_weigh_the_first_batches_alike() -> None:
    """ρ = 1 - 1/(i + 1) is the plain mean as long as it is below .95."""
    fitted, _ = rows(50, 0)
    found = fit(factors="running", batch=10).curvatures[1]
    basis, values = found["input_basis"].double(), found["inputs"].double()
    phi = fitted[1].numpy()
    assert np.allclose((basis * values) @ basis.mT, math.sqrt(50) * phi.T @ phi / 50, atol=1e-5)


def test_a_row_alone_is_answered_as_in_its_batch_and_draws_are_shared() -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    alone = torch.cat([mixture.predict([now[row : row + 1] for now in test]).probs for row in range(8)], 1)
    assert torch.allclose(alone, mixture.predict(test).probs, atol=1e-12)
    torch.testing.assert_close(mixture.predict(test).probs, fit().predict(test).probs)
    assert mixture.predict_at(1, test[0][:0]).shape == (0, CLASSES)


def test_rows_in_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    monkeypatch.setattr("anytime.calibrate.laplace.curvature._BLOCK", 64)
    assert torch.allclose(fit().predict(test).probs, mixture.predict(test).probs, atol=1e-9)


def test_on_a_perceptron_it_mends_the_likelihood_and_streams_lazily() -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(classes=4, inputs=6, width=24, exits=3))
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (300,), generator=random)
    x = torch.randn(300, 6, generator=random)
    x[torch.arange(300), labels] += 1.5
    train, val, test = (slice(0, 60), slice(60, 180), slice(180, 300))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        loss = sum(F.cross_entropy(logits, labels[train]) for logits in model.exits(x[train]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    fitted, tuning, tested = (collect_features(model, [(x[part], labels[part])])[0] for part in (train, val, test))
    tuned = {"tuning_features": tuning, "tuning_labels": labels[val]}
    mixture = fit_mixture(fitted, labels[train], last_layers(model, x), [1, 2, 3], **tuned)
    prediction = mixture.predict(tested)
    with torch.no_grad():
        plain = model(x[test]).log_softmax(-1)
    wanted = labels[test].expand(3, -1)[..., None]
    assert float(-prediction.log_probs.gather(-1, wanted).mean()) < float(-plain.gather(-1, wanted).mean()) - 0.1
    streamed = torch.stack([each.log_probs for each in mixture.stream(model, x[test])])
    assert torch.allclose(streamed, prediction.log_probs, atol=1e-5)
    ran: list[Any] = []
    for head in model.heads:
        head.register_forward_hook(lambda module, *_: ran.append(module))
    next(mixture.stream(model, x[test]))
    assert ran == [model.heads[0]]


# Files


def test_a_file_gives_back_the_same_mixture(tmp_path: Path) -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    path = mixture.save(tmp_path / "mixture.json")
    again = LaplaceMixture.load(path)
    torch.testing.assert_close(again.curvatures, mixture.curvatures, rtol=0, atol=0)  # the stored bytes
    torch.testing.assert_close(again.predict(test).probs, mixture.predict(test).probs)
    with pytest.raises(FormatError, match="Laplace mixture"):
        LastLayerLaplace.load(path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(IntegrityError):
        LaplaceMixture.load(path)


def test_fields_that_do_not_fit_together_are_refused() -> None:
    mixture = fit()
    wrongs: list[dict[str, Any]] = [
        {"exits": 3},
        {"classes": 4},
        {"costs": (1.0, 0.5)},
        {"costs": (1.0,)},
        {"temperatures": (1.0, 0.0)},
        {"variances": (1.0,)},
        {"samples": 0},
        {"curvatures": mixture.curvatures[::-1]},
    ]
    for wrong in wrongs:
        with pytest.raises(AnytimeError):
            replace(mixture, **wrong)


# What is refused


def test_other_exits_and_widths_are_refused() -> None:
    test, _ = rows(8, 1)
    mixture = fit()
    with pytest.raises(ShapeError, match="fitted"):
        mixture.predict(test[:1])
    with pytest.raises(ShapeError, match="exit 2"):
        mixture.predict([test[0], test[0]])
    mixture.check_fits(2, CLASSES)
    with pytest.raises(ShapeError):
        mixture.check_fits(2, 5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"samples": 0}, OptionError),
        ({"variances": []}, OptionError),
        ({"variances": [0.0]}, OptionError),
        ({"temperatures": [math.inf]}, OptionError),
        ({"factors": "other"}, OptionError),
        ({"batch": 0}, OptionError),
        ({"rows": 3}, OptionError),
        ({"tuning_labels": torch.zeros(3, dtype=torch.int64)}, LabelError),
        ({"tuning_features": rows(60, 0)[0][:1]}, ShapeError),
        ({"tuning_features": rows(50, 0)[0], "tuning_labels": rows(50, 0)[1]}, OverlapError),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        fit(**options)


def test_costs_must_grow() -> None:
    tuning, wanted = rows(60, 1)
    for costs in ([2.0, 1.0], [1.0], [0.0, 1.0]):
        with pytest.raises(AnytimeError):
            fit_mixture(*rows(50, 0), layers(), costs, tuning_features=tuning, tuning_labels=wanted)


# Ensembles on saved logits


def test_averaged_logits_are_those_of_the_averaged_ensemble() -> None:
    torch.manual_seed(1)
    members = [MLP(MLPConfig(classes=4, width=8, exits=3)) for _ in range(3)]
    x = torch.randn(6, 2)
    with torch.no_grad():
        saved = [member(x) for member in members]
        assert torch.allclose(average_logits(saved), Ensemble.averaged(members)(x), atol=1e-6)
    mean = torch.stack([logits.softmax(-1) for logits in saved]).mean(0)
    assert torch.allclose(anytime.Latest()(average_logits([logits.numpy() for logits in saved])).probs, mean, atol=1e-6)


def test_one_member_is_itself_and_order_does_not_matter() -> None:
    first, second = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(average_logits([first]), first.log_softmax(-1))
    assert torch.allclose(average_logits([first, second]), average_logits([second, first]))


def test_members_that_do_not_fit_are_refused() -> None:
    for wrong in ([], [torch.zeros(3, 5, 4), torch.zeros(3, 5, 3)], [torch.zeros(5, 4)]):
        with pytest.raises(ShapeError):
            average_logits(wrong)
