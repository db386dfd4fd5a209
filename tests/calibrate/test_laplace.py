"""Last-layer Laplace against references written from the formulas."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import anytime
from anytime.calibrate import Laplace, fit_laplace
from anytime.calibrate.laplace.posterior import GRID, HIGHEST, LOWEST
from anytime.data import load_digits, normalise
from anytime.errors import (
    AnytimeError,
    IntegrityError,
    LabelError,
    NonFiniteError,
    OptionError,
    OverlapError,
    ScaleError,
    ShapeError,
)
from anytime.models import MLP, MLPConfig
from anytime.models.features import collect_features, last_layers

STRUCTURES = pytest.mark.parametrize("structure", ["kron", "full", "diag"])
CLASSES, WIDTHS = 3, (2, 4)


def rows(count: int, seed: int, *, bias: bool = True) -> tuple[list[Tensor], Tensor, list[tuple[Tensor, Tensor | None]]]:
    """Features of two exits, labels sampled from their predictions, and the layers."""
    random = torch.Generator().manual_seed(seed)
    features = [torch.randn(count, width, generator=random, dtype=torch.float64) for width in WIDTHS]
    fixed = torch.Generator().manual_seed(99)
    layers = [
        (torch.randn(CLASSES, width, generator=fixed), torch.randn(CLASSES, generator=fixed) if bias else None)
        for width in WIDTHS
    ]
    probs = (features[1] @ layers[1][0].double().mT).softmax(-1)
    return features, torch.multinomial(probs, 1, generator=random)[:, 0], layers


def with_one(features: Tensor, bias: Tensor | None) -> np.ndarray:
    ones = np.ones((len(features), 1 if bias is not None else 0))
    return np.concatenate((features.double().numpy(), ones), 1)


def joined(weight: Tensor, bias: Tensor | None) -> np.ndarray:
    return weight.double().numpy() if bias is None else np.concatenate((weight, bias[:, None]), 1).astype(np.float64)


def dense_curvature(phi: np.ndarray, theta: np.ndarray, structure: str) -> np.ndarray:
    """The curvature as one matrix over the weights, by class and then by feature: a loop over the rows."""
    classes, width = theta.shape
    whole, inputs, outputs = np.zeros((classes * width,) * 2), np.zeros((width, width)), np.zeros((classes, classes))
    for row in phi:
        scores = theta @ row
        p = np.exp(scores - scores.max())
        p /= p.sum()
        spread = np.diag(p) - np.outer(p, p)
        whole += np.kron(spread, np.outer(row, row))
        inputs += np.outer(row, row)
        outputs += spread / len(phi)
    if structure == "kron":
        return np.kron(outputs, inputs)
    return whole if structure == "full" else np.diag(np.diag(whole))


def dense_covariance(phi: np.ndarray, curvature: np.ndarray, prior: float, classes: int) -> np.ndarray:
    """S of each row, from the inverse of the whole matrix."""
    inverse = np.linalg.inv(curvature + prior * np.eye(len(curvature)))
    maps = [np.kron(np.eye(classes), row[None]) for row in phi]
    return np.stack([jacobian @ inverse @ jacobian.T for jacobian in maps])


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@STRUCTURES
@pytest.mark.parametrize("bias", [True, False])
def test_variances_are_those_of_the_inverted_matrix(structure: Any, bias: bool) -> None:
    features, labels, layers = rows(30, 0, bias=bias)
    posterior = fit_laplace(features, labels, layers, structure=structure, prior_precision=0.7)
    for exit, (now, layer) in enumerate(zip(features, layers, strict=True)):
        phi, theta = with_one(now, layer[1]), joined(*layer)
        wanted = dense_covariance(phi, dense_curvature(phi, theta, structure), 0.7, CLASSES)
        found = posterior.variance_at(exit + 1, now).numpy()
        assert np.allclose(found, np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-5)


def test_the_full_matrix_is_the_hessian_of_the_likelihood() -> None:
    """For a linear head the generalised Gauss-Newton matrix is the Hessian itself: here by autograd, twice."""
    features, labels, layers = rows(20, 1)
    weight, bias = layers[0]
    phi = torch.from_numpy(with_one(features[0], bias))

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(phi @ theta.view(CLASSES, -1).mT, labels, reduction="sum")

    theta = torch.from_numpy(joined(weight, bias))
    hessian = torch.autograd.functional.hessian(loss, theta.flatten())  # type: ignore[no-untyped-call]
    wanted = dense_covariance(phi.numpy(), hessian.numpy(), 2.0, CLASSES)
    posterior = fit_laplace(features[:1], labels, layers[:1], structure="full", prior_precision=2.0)
    assert np.allclose(posterior.variance_at(1, features[0]), np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-5)


@STRUCTURES
def test_probit_and_samples_follow_their_formulas(structure: Any) -> None:
    features, labels, layers = rows(25, 2)
    posterior = fit_laplace(features, labels, layers, structure=structure, prior_precision=0.3)
    draws = torch.randn(40, CLASSES, generator=torch.Generator().manual_seed(5)).double().numpy()
    phi, theta = with_one(features[1], layers[1][1]), joined(*layers[1])
    logits = phi @ theta.T
    covariances = dense_covariance(phi, dense_curvature(phi, theta, structure), 0.3, CLASSES)
    probit = log_softmax(logits / np.sqrt(1 + np.pi / 8 * np.diagonal(covariances, axis1=1, axis2=2)))
    assert np.allclose(posterior.predict_at(2, features[1]), probit, atol=1e-5)
    sampled = []
    for mean, covariance in zip(logits, covariances, strict=True):
        values, vectors = np.linalg.eigh(covariance)
        root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
        sampled.append(np.log(np.exp(log_softmax(mean + draws @ root)).mean(0)))
    found = posterior.predict_at(2, features[1], method="sampled", samples=40, seed=5)
    assert np.allclose(found, np.array(sampled), atol=1e-5)


@STRUCTURES
def test_the_evidence_is_that_of_the_determinant(structure: Any) -> None:
    features, labels, layers = rows(30, 3)
    for prior in (1e-3, 1.0, 50.0):
        posterior = fit_laplace(features, labels, layers, structure=structure, prior_precision=prior)
        for exit, (now, layer) in enumerate(zip(features, layers, strict=True)):
            phi, theta = with_one(now, layer[1]), joined(*layer)
            likelihood = log_softmax(phi @ theta.T)[np.arange(len(labels)), labels.numpy()].sum()
            precision = dense_curvature(phi, theta, structure) + prior * np.eye(theta.size)
            wanted = (
                likelihood - prior / 2 * (theta**2).sum() + theta.size / 2 * np.log(prior) - np.linalg.slogdet(precision)[1] / 2
            )
            assert posterior.log_evidence[exit] == pytest.approx(wanted, rel=1e-6)


@STRUCTURES
def test_no_other_prior_has_more_evidence(structure: Any) -> None:
    features, labels, layers = rows(40, 4)
    best = fit_laplace(features, labels, layers, structure=structure)
    assert best.at_bound == (False, False)
    for prior in (*GRID, *(best.prior_precision[0] * factor for factor in (0.99, 1.01))):
        other = fit_laplace(features, labels, layers, structure=structure, prior_precision=prior)
        assert all(mine >= its for mine, its in zip(best.log_evidence, other.log_evidence, strict=True))


def test_a_prior_at_a_bound_is_reported() -> None:
    features, labels, _ = rows(40, 4)
    zero = fit_laplace(features[:1], labels, [(torch.zeros(3, 2), torch.zeros(3))])
    assert (zero.prior_precision, zero.at_bound) == ((HIGHEST,), (True,))
    large = fit_laplace(features[:1], labels, [(torch.full((3, 2), 1e9), None)])
    assert (large.prior_precision, large.at_bound) == ((LOWEST,), (True,))
    features, labels, layers = rows(40, 4)
    tuning, _, _ = rows(40, 5)
    wrong = F.linear(tuning[0], layers[0][0].double()).argmin(-1)
    grid = fit_laplace(
        features[:1], labels, layers[:1], prior_precision="grid", tuning_features=tuning[:1], tuning_labels=wrong
    )
    assert (grid.prior_precision, grid.at_bound) == ((GRID[0],), (True,))  # the flatter the better


@pytest.mark.parametrize("method", ["probit", "sampled"])
def test_the_grid_takes_the_prior_with_the_least_nll_on_the_tuning_rows(method: Any) -> None:
    features, labels, layers = rows(30, 6)
    tuning, wanted, _ = rows(200, 7)
    wanted = torch.where(torch.arange(200) % 4 == 0, (wanted + 1) % 3, wanted)  # the layers are overconfident
    tuned = {"tuning_features": tuning, "tuning_labels": wanted, "method": method}
    found = fit_laplace(features, labels, layers, prior_precision="grid", **tuned)
    losses = []
    for prior in GRID:
        posterior = fit_laplace(features, labels, layers, prior_precision=prior)
        losses.append([float(F.nll_loss(each, wanted)) for each in posterior.predict(tuning, method=method)])
    assert found.prior_precision == tuple(GRID[index] for index in np.argmin(losses, 0))


@given(seed=st.integers(0, 1000), structure=st.sampled_from(["kron", "full", "diag"]))
def test_with_a_strong_prior_it_is_the_network_itself(seed: int, structure: Any) -> None:
    features, labels, layers = rows(10, seed)
    posterior = fit_laplace(features, labels, layers, structure=structure, prior_precision=1e12)
    plain = torch.stack(
        [F.linear(now, weight.double(), bias.double()) for now, (weight, bias) in zip(features, layers, strict=True)]  # type: ignore[union-attr]
    ).log_softmax(-1)
    assert torch.allclose(posterior.predict(features), plain, atol=1e-5)
    assert torch.allclose(posterior.predict(features, method="sampled", samples=3), plain, atol=1e-4)


@given(seed=st.integers(0, 1000), prior=st.floats(0.01, 100), more=st.floats(1.1, 10))
def test_variances_fall_with_the_prior_and_with_the_rows(seed: int, prior: float, more: float) -> None:
    features, labels, layers = rows(12, seed)
    loose = fit_laplace(features, labels, layers, prior_precision=prior).variance_at(2, features[1])
    tight = fit_laplace(features, labels, layers, prior_precision=prior * more).variance_at(2, features[1])
    known = fit_laplace(features, labels, layers, prior_precision=prior, rows=50).variance_at(2, features[1])
    assert bool((tight < loose).all())
    assert bool((known < loose).all())


def test_probit_and_samples_agree_where_the_spread_is_small() -> None:
    features, labels, layers = rows(300, 8)
    for prior, apart in ((10.0, 0.03), (100.0, 0.006), (1000.0, 0.002)):
        posterior = fit_laplace(features, labels, layers, prior_precision=prior)
        probit = posterior.predict(features).exp()
        sampled = posterior.predict(features, method="sampled", samples=4000).exp()
        assert float((probit - sampled).abs().max()) < apart


def test_a_shift_of_all_logits_widens_probit_but_not_samples() -> None:
    """Nothing is known of such a shift but the prior: the diagonal of S has it, a softmax does not see it."""
    features, labels, layers = rows(300, 8)
    posterior = fit_laplace(features, labels, layers, prior_precision=0.01)
    phi = with_one(features[1], layers[1][1])
    shift = (phi**2).sum(1) / 0.01 / CLASSES
    assert bool((posterior.variance_at(2, features[1]).numpy() > shift[:, None]).all())
    plain = F.linear(features[1], layers[1][0].double(), layers[1][1].double()).softmax(-1)  # type: ignore[union-attr]
    sampled = posterior.predict_at(2, features[1], method="sampled").exp()
    probit = posterior.predict_at(2, features[1]).exp()
    assert float((sampled - plain).abs().mean()) < 0.1 < float((probit - plain).abs().mean())


@STRUCTURES
def test_samples_have_the_stated_covariance(structure: Any) -> None:
    features, labels, layers = rows(30, 9)
    posterior = fit_laplace(features, labels, layers, structure=structure, prior_precision=1.0)
    curvature = posterior._curvature(1)
    phi = torch.from_numpy(with_one(features[1][:4], layers[1][1]))
    draws = torch.randn(200_000, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = curvature.like(phi).noise(phi, 1.0, draws)
    theta = joined(*layers[1])
    whole = dense_curvature(with_one(features[1], layers[1][1]), theta, structure)
    wanted = dense_covariance(phi.numpy(), whole, 1.0, CLASSES)
    found = (noise.mT @ noise / len(draws)).numpy()
    assert np.allclose(found, wanted, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("method", ["probit", "sampled"])
@STRUCTURES
def test_a_row_alone_is_answered_as_in_its_batch(structure: Any, method: Any) -> None:
    features, labels, layers = rows(20, 10)
    posterior = fit_laplace(features, labels, layers, structure=structure)
    together = posterior.predict_at(1, features[0], method=method)
    alone = torch.cat([posterior.predict_at(1, row[None], method=method) for row in features[0]])
    assert torch.allclose(together, alone, atol=1e-12)
    assert posterior.predict_at(1, features[0][:0], method=method).shape == (0, CLASSES)


def test_draws_are_seeded_and_the_random_state_is_left_alone() -> None:
    features, labels, layers = rows(20, 11)
    posterior = fit_laplace(features, labels, layers)
    state = torch.get_rng_state()
    first = posterior.predict(features, method="sampled", samples=5, seed=1)
    torch.testing.assert_close(first, posterior.predict(features, method="sampled", samples=5, seed=1))
    assert not torch.equal(first, posterior.predict(features, method="sampled", samples=5, seed=2))
    assert torch.equal(state, torch.get_rng_state())


def test_float32_features_give_float32_and_nearly_the_same() -> None:
    features, labels, layers = rows(50, 12)
    posterior = fit_laplace(features, labels, layers)
    single = [now.float() for now in features]
    for method in ("probit", "sampled"):
        found = posterior.predict(single, method=method)  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), posterior.predict(features, method=method), atol=1e-4)  # type: ignore[arg-type]


def test_rows_in_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, layers = rows(50, 13)
    before = {name: fit_laplace(features, labels, layers, structure=name) for name in ("kron", "full", "diag")}  # type: ignore[arg-type]
    answers = {name: posterior.predict(features, method="sampled") for name, posterior in before.items()}
    monkeypatch.setattr("anytime.calibrate.laplace.curvature._BLOCK", 64)
    for name, posterior in before.items():
        again = fit_laplace(features, labels, layers, structure=name)  # type: ignore[arg-type]
        assert again.prior_precision == pytest.approx(posterior.prior_precision, rel=1e-6)
        assert torch.allclose(posterior.predict(features, method="sampled"), answers[name], atol=1e-12)


def test_what_comes_out_serves_rules_that_read_no_scale() -> None:
    features, labels, layers = rows(30, 14)
    log_probs = fit_laplace(features, labels, layers).predict(features)
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 30, dtype=torch.float64))
    for rule in (anytime.Latest(), anytime.Caching(), anytime.Product(anytime.combine.Exponential())):
        assert rule(log_probs).probs.shape == (2, 30, CLASSES)
    for rule in (anytime.Product(), anytime.Mixture()):
        with pytest.raises(ScaleError, match="look like log-probabilities"):
            rule(log_probs)
    assert torch.allclose(anytime.Latest()(log_probs).log_probs, log_probs)


def test_a_thousand_classes_fit_and_predict() -> None:
    random = torch.Generator().manual_seed(0)
    features, labels = [torch.randn(64, 48, generator=random)], torch.randint(1000, (64,), generator=random)
    posterior = fit_laplace(features, labels, [(torch.randn(1000, 48, generator=random), None)])
    for method in ("probit", "sampled"):
        log_probs = posterior.predict(features, method=method, samples=20)  # type: ignore[arg-type]
        assert bool(log_probs.isfinite().all())
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(1, 64), atol=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e4, 1e15])
def test_extreme_features_give_finite_answers(scale: float) -> None:
    features, labels, layers = rows(20, 15)
    posterior = fit_laplace([now * scale for now in features], labels, layers)
    for method in ("probit", "sampled"):
        assert bool(posterior.predict([now.float() for now in features], method=method).isfinite().all())  # type: ignore[arg-type]


# From a model


def trained(exits: int = 3, steps: int = 300, count: int = 60) -> tuple[MLP, dict[str, tuple[Tensor, Tensor]]]:
    """A perceptron that has learnt some of the digits by heart, and all splits as vectors."""
    sets = {name: (normalise(part.images, part.mean, part.std).flatten(1), part.labels) for name, part in load_digits().items()}
    sets["train"] = tuple(part[:count] for part in sets["train"])  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MLP(MLPConfig(classes=10, inputs=64, width=32, exits=exits))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, labels = sets["train"]
    for _ in range(steps):
        loss = sum(F.cross_entropy(logits, labels) for logits in model.exits(x))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    return model.eval(), sets


@pytest.fixture(scope="module")
def digits() -> tuple[MLP, dict[str, tuple[Tensor, Tensor]]]:
    return trained()


def test_streaming_over_a_model_is_the_same_as_fitting_to_its_features(digits: Any) -> None:
    model, sets = digits
    x, labels = sets["train"]
    batches = list(zip(x.split(64), labels.split(64), strict=True))
    model.train()
    streamed = Laplace.from_model(model, batches)
    assert model.training
    model.eval()
    features, again = collect_features(model, batches)
    assert torch.equal(again, labels)
    whole = fit_laplace(features, labels, last_layers(model, x))
    assert streamed.rows == whole.rows == len(x)
    assert streamed.prior_precision == pytest.approx(whole.prior_precision, rel=1e-6)
    test = sets["test"][0]
    assert torch.allclose(torch.stack(list(streamed.stream(model, test))), whole.predict(collect(model, test)), atol=1e-5)


def collect(model: MLP, x: Tensor) -> list[Tensor]:
    return collect_features(model, [(x, torch.zeros(len(x), dtype=torch.int64))])[0]


def test_a_stream_stops_where_it_is_left(digits: Any) -> None:
    model, sets = digits
    posterior = Laplace.from_model(model, [sets["train"]])
    ran: list[nn.Module] = []
    handles = [head.register_forward_hook(lambda module, *_: ran.append(module)) for head in model.heads]
    next(posterior.stream(model, sets["test"][0]))
    for handle in handles:
        handle.remove()
    assert ran == [model.heads[0]]


def latest(logits: Tensor, labels: Tensor, *, probabilities: bool = False) -> dict[str, float]:
    """NLL, ECE and accuracy as means over the exits."""
    rules = {"latest": anytime.Latest()}
    found = anytime.evaluate(logits, labels, rules=rules, probabilities=probabilities).rules["latest"]
    return {name: float(np.mean(getattr(found, name))) for name in ("nll", "ece", "accuracy")}


@pytest.mark.parametrize("method", ["probit", "sampled"])
def test_on_real_digits_a_tuned_prior_improves_likelihood_and_calibration(digits: Any, method: Any) -> None:
    model, sets = digits
    tuned = {"prior_precision": "grid", "tuning": [sets["val"]], "method": method}
    posterior = Laplace.from_model(model, [sets["train"]], **tuned)
    x, labels = sets["test"]
    with torch.no_grad():
        plain = latest(model(x), labels)
    found = latest(posterior.predict(collect(model, x), method=method), labels, probabilities=True)
    assert found["nll"] < plain["nll"] - 0.05
    assert found["ece"] < plain["ece"] - 0.01
    assert found["accuracy"] > plain["accuracy"] - 0.01


def test_the_evidence_of_rows_known_by_heart_asks_for_too_weak_a_prior(digits: Any) -> None:
    """A head that is confident on every row it was fitted on has hardly any curvature there."""
    model, sets = digits
    x, labels = sets["test"]
    evidence = Laplace.from_model(model, [sets["train"]])
    grid = Laplace.from_model(model, [sets["train"]], prior_precision="grid", tuning=[sets["val"]])
    assert max(evidence.prior_precision) < min(grid.prior_precision) / 10
    losses = [latest(each.predict(collect(model, x)), labels, probabilities=True)["nll"] for each in (evidence, grid)]
    assert losses[0] > losses[1]


def test_with_endless_rows_the_evidence_finds_the_scale_of_the_weights() -> None:
    """λ tends to P/‖θ‖², P without the shifts of all logits, which the rows do not determine."""
    features, labels, layers = rows(50, 4)
    posterior = fit_laplace(features, labels, layers, rows=10**12)
    for prior, layer in zip(posterior.prior_precision, layers, strict=True):
        theta = joined(*layer)
        assert prior == pytest.approx((CLASSES - 1) * theta.shape[1] / (theta**2).sum(), rel=1e-4)


# Files


@STRUCTURES
def test_a_file_gives_back_the_same_posterior(structure: Any, tmp_path: Path) -> None:
    features, labels, layers = rows(30, 16)
    posterior = fit_laplace(features, labels, layers, structure=structure)
    again = Laplace.load(posterior.save(tmp_path / "laplace.json"))
    torch.testing.assert_close(again.curvatures, posterior.curvatures, rtol=0, atol=0)  # the stored bytes
    torch.testing.assert_close(again.predict(features), posterior.predict(features))
    assert again.prior_precision == posterior.prior_precision
    assert again.log_evidence == posterior.log_evidence


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    features, labels, layers = rows(30, 17)
    path = fit_laplace(features, labels, layers).save(tmp_path / "laplace.json")
    path.write_text(path.read_text().replace('"rows":30', '"rows":31').replace('"rows": 30', '"rows": 31'))
    with pytest.raises(IntegrityError):
        Laplace.load(path)


def test_fields_that_do_not_fit_together_are_refused() -> None:
    features, labels, layers = rows(30, 18)
    posterior = fit_laplace(features, labels, layers)
    swapped = {"curvatures": posterior.curvatures[::-1]}
    wrongs: list[dict[str, Any]] = [
        {"exits": 3},
        {"classes": 4},
        swapped,
        {"structure": "diag"},
        {"structure": "other"},
        {"prior_precision": (1.0,)},
        {"prior_precision": (1.0, -1.0)},
        {"weights": posterior.weights[:1]},
    ]
    for wrong in wrongs:
        with pytest.raises(AnytimeError):
            replace(posterior, **wrong)
    document = json.loads(json.dumps(posterior.document()))
    assert document["kind"] == "laplace"


# What is refused


def test_other_exits_classes_and_widths_are_refused() -> None:
    features, labels, layers = rows(20, 19)
    posterior = fit_laplace(features, labels, layers)
    with pytest.raises(ShapeError, match="fitted"):
        posterior.predict(features[:1])
    with pytest.raises(ShapeError, match="exit 2"):
        posterior.predict([features[0], features[0]])
    with pytest.raises(ShapeError, match="exit 1"):
        posterior.predict_at(1, features[0][0])
    for exit in (-1, 0, 3, True, 1.0):
        with pytest.raises(OptionError, match="exit is"):
            posterior.predict_at(exit, features[0])  # type: ignore[arg-type]
    posterior.check_fits(2, CLASSES)
    with pytest.raises(ShapeError):
        posterior.check_fits(2, CLASSES + 1)


def test_rows_that_do_not_fit_are_refused() -> None:
    features, labels, layers = rows(20, 20)
    other = rows(10, 21)[0]
    bad = features[0].clone()
    bad[3, 1] = math.nan
    wrongs: list[tuple[Any, Any, Any, type[Exception]]] = [
        (features, labels[:5], layers, LabelError),
        (features, labels + 9, layers, LabelError),
        (features[:1], labels, layers, ShapeError),
        (torch.stack([features[0], features[0]]), labels, layers, ShapeError),
        ([features[0], other[1]], labels, layers, ShapeError),
        ([features[1], features[0]], labels, layers, ShapeError),
        ([bad, features[1]], labels, layers, NonFiniteError),
        ([now[:0] for now in features], labels[:0], layers, LabelError),
        (features, labels, [], ShapeError),
        (features, labels, [layers[0], (torch.zeros(4, 4), None)], ShapeError),
        (features, labels, [layers[0], (torch.zeros(3, 4), torch.zeros(4))], ShapeError),
        (features, labels, [layers[0], nn.ReLU()], TypeError),
        (features, labels, [layers[0], (torch.full((3, 4), math.inf), None)], OptionError),
    ]
    for wrong_features, wrong_labels, wrong_layers, error in wrongs:
        with pytest.raises(error):
            fit_laplace(wrong_features, wrong_labels, wrong_layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision"),
        ({"prior_precision": math.inf}, "prior_precision"),
        ({"prior_precision": "other"}, "prior_precision"),
        ({"prior_precision": True}, "prior_precision"),
        ({"prior_precision": "grid"}, "tuning"),
        ({"structure": "block"}, "structure"),
        ({"rows": 5}, "rows"),
        ({"rows": 30.5}, "rows"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    features, labels, layers = rows(20, 22)
    with pytest.raises(OptionError, match=message):
        fit_laplace(features, labels, layers, **options)


def test_wrong_ways_to_predict_are_named() -> None:
    features, labels, layers = rows(20, 23)
    posterior = fit_laplace(features, labels, layers)
    with pytest.raises(OptionError, match="method"):
        posterior.predict(features, method="bridge")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="samples"):
        posterior.predict(features, method="sampled", samples=0)


def test_a_full_matrix_that_is_too_large_is_refused_before_it_is_made() -> None:
    with pytest.raises(OptionError, match="kron"):
        fit_laplace([torch.zeros(1, 2048)], torch.zeros(1, dtype=torch.int64), [nn.Linear(2048, 1000)], structure="full")


def test_tuning_rows_among_those_fitted_to_are_refused() -> None:
    features, labels, layers = rows(20, 24)
    with pytest.raises(OverlapError):
        fit_laplace(features, labels, layers, prior_precision="grid", tuning_features=features, tuning_labels=labels)


def test_no_batches_are_refused() -> None:
    with pytest.raises(LabelError, match="no batches"):
        Laplace.from_model(MLP(MLPConfig(classes=3)), [])


# The package


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("structure", "bias"), [("kron", False), ("full", True), ("full", False), ("diag", True)])
def test_laplace_torch_finds_the_same(structure: Any, bias: bool) -> None:
    package = pytest.importorskip("laplace", reason="laplace-torch is not installed: pip install --no-deps laplace-torch")
    features, labels, layers = rows(40, 26, bias=bias)
    ours = fit_laplace(features, labels, layers, structure=structure)
    for exit, (now, (weight, offset)) in enumerate(zip(features, layers, strict=True)):
        layer = nn.Linear(weight.shape[1], CLASSES, bias=bias, dtype=torch.float64)
        layer.weight.data = weight.double()
        if offset is not None:
            layer.bias.data = offset.double()
        options = {"hessian_structure": structure, "prior_precision": ours.prior_precision[exit]}
        found = package.Laplace(layer, "classification", subset_of_weights="all", **options)
        found.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(now, labels), batch_size=40))
        assert ours.log_evidence[exit] == pytest.approx(float(found.log_marginal_likelihood()), rel=1e-4)
        wanted = found(now, pred_type="glm", link_approx="probit").log()
        assert torch.allclose(ours.predict_at(exit + 1, now), wanted, atol=1e-4)
