"""Fits and trainings once more, as in `plain.py`: NumPy, float64, and nothing of the library.

Only the random numbers that begin a training are given, so that both implementations take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .plain import Array, drop, ece, log_relu, product, softmax

Loss = Callable[[Array], Array]
"""The gradient of a loss by the outputs of a network, `(members, rows, outputs)`."""


def log_softmax(values: Array) -> Array:
    below = values - values.max(-1, keepdims=True)
    return np.asarray(below - np.log(np.exp(below).sum(-1, keepdims=True)))


def temperature(logits: Array, labels: Array) -> float:
    """The temperature with the lowest NLL over the rows whose label has probability: golden sections of its logarithm."""
    own = logits[np.arange(len(labels)), labels]
    logits, labels = logits[own > -np.inf], labels[own > -np.inf]
    low, high, ratio = np.log(0.01), np.log(100.0), (np.sqrt(5) - 1) / 2

    def loss(log_t: float) -> float:
        return float(-log_softmax(logits / np.exp(log_t))[np.arange(len(labels)), labels].mean())

    while high - low > 1e-6:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return float(np.exp((low + high) / 2))


def regression(inputs: Array, targets: Array) -> tuple[Array, float]:
    """Logistic regression with the penalty ½|w|² on its weights w, by Newton's method; w and the intercept."""
    rows = np.hstack((inputs, np.ones((len(inputs), 1))))
    found, penalty = np.zeros(rows.shape[1]), np.diag([*np.ones(inputs.shape[1]), 0.0])
    for _ in range(100):
        chance = 1 / (1 + np.exp(-rows @ found))
        curvature = rows.T @ (rows * (chance * (1 - chance))[:, None]) + penalty
        found -= np.linalg.solve(curvature, rows.T @ (chance - targets) + penalty @ found)
    return found[:-1], float(found[-1])


def adaptive_threshold(logits: Array, labels: Array, mode: str = "gate") -> tuple[Callable[[Array], Array], float]:
    """The evidence under the adaptive threshold C·p(top three logits), and C.

    p is fitted at the first exit on half of the rows; C has the lowest mean ECE plus mean drop on the others, of 21 values from
    0 to the 95th percentile of the largest logits.
    """
    half = len(labels) // 2

    def top(values: Array) -> Array:
        return np.asarray(-np.sort(-values, -1)[..., :3])

    weights, intercept = regression(top(logits[0, :half]), logits[0, :half].argmax(-1) == labels[:half])
    tuning, known = logits[:, half:], labels[half:]

    def evidence(scale: float) -> Callable[[Array], Array]:
        def log(values: Array) -> Array:
            limit = scale / (1 + np.exp(-(top(values) @ weights + intercept)))[..., None]
            return log_relu(np.where(values > limit, values, limit if mode == "clamp" else 0))

        return log

    def cost(scale: float) -> float:
        answers = product(tuning, evidence(scale))
        right = answers.labels == known
        errors = [ece(sure, ok) for sure, ok in zip(answers.confidence, right, strict=True)]
        return float(np.mean(errors) + drop(answers.probs[:, np.arange(len(known)), known]).mean())

    best = min(np.linspace(0, np.quantile(tuning.max(-1), 0.95), 21), key=cost)
    return evidence(best), float(best)


class Adam:
    """Adam on some arrays, which `step` changes."""

    def __init__(self, values: Sequence[Array]) -> None:
        self.values, self.steps = values, 0
        self.first, self.second = ([np.zeros_like(value) for value in values] for _ in range(2))

    def step(self, gradients: Sequence[Array], rate: float) -> None:
        self.steps += 1
        for value, gradient, first, second in zip(self.values, gradients, self.first, self.second, strict=True):
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            root = np.sqrt(second / (1 - 0.999**self.steps)) + 1e-8
            value -= rate * first / (1 - 0.9**self.steps) / root


def geometric(logits: Array, labels: Array, start: Array, *, epochs: int = 501, rate: float = 5e-4) -> Array:
    """ZTW's weights v, without biases, of p_m ∝ Π_{i≤m} p_i^{exp(v_mi)/m}; all rows are one batch."""
    exits, rows, _ = logits.shape
    logs = log_softmax(logits)
    true, flat, v = logs[:, np.arange(rows), labels], logs.reshape(exits, -1), start.copy()
    optimizer = Adam([v])
    for _ in range(epochs):
        powers = np.tril(np.exp(v)) / np.arange(1, exits + 1)[:, None]
        probs = softmax((powers @ flat).reshape(logs.shape)).reshape(exits, -1)
        optimizer.step([powers * (probs @ flat.T - true.sum(1)) / rows], rate)
    return v


def perceptron(parameters: Sequence[Array], inputs: Array) -> list[Array]:
    """The activations of stacked perceptrons with ReLU; the last are their outputs, `(members, rows, outputs)`."""
    layers = [inputs]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        last = len(layers) == len(parameters) // 2
        total = layers[-1] @ weight.transpose(0, 2, 1) + bias[:, None]
        layers.append(total if last else np.maximum(total, 0))
    return layers


def train(parameters: Sequence[Array], inputs: Array, slope: Loss, *, steps: int, rate: float, decays: bool) -> None:
    """Train stacked perceptrons with Adam on all rows at each step; the rate is constant or follows a cosine to zero."""
    optimizer = Adam(parameters)
    for step in range(steps):
        layers = perceptron(parameters, inputs)
        back, gradients = slope(layers[-1]), []
        for place in range(len(layers) - 2, -1, -1):
            gradients += [back.sum(1), back.transpose(0, 2, 1) @ layers[place]]
            if place:
                back = (back @ parameters[2 * place]) * (layers[place] > 0)
        now = rate * (1 + np.cos(np.pi * step / steps)) / 2 if decays else rate
        optimizer.step(gradients[::-1], now)


def cross_entropy(labels: Array) -> Loss:
    def slope(outputs: Array) -> Array:
        found = softmax(outputs)
        found[:, np.arange(len(labels)), labels] -= 1
        return found / len(labels)

    return slope


def ends(outputs: Array) -> tuple[Array, Array]:
    """Lower and upper end: the first output -+ the softplus of the second."""
    half = np.logaddexp(0, outputs[..., 1])
    return outputs[..., 0] - half, outputs[..., 0] + half


def interval_score(targets: Array, miss: float = 0.05) -> Loss:
    """Width + 2/miss times the distance of a target outside."""

    def slope(outputs: Array) -> Array:
        lower, upper = ends(outputs)
        low = -1 + 2 / miss * (lower > targets)
        high = 1 - 2 / miss * (targets > upper)
        spread = (high - low) / (1 + np.exp(-outputs[..., 1]))
        return np.stack((low + high, spread), -1) / len(targets)

    return slope


def laplace(features: Array, weights: Array, labels: Array, tuning: tuple[Array, Array], test: Array) -> tuple[Array, float]:
    """Log-probabilities of one exit by Kronecker-factored last-layer Laplace with the probit approximation, and λ.

    λ has the smallest NLL on the tuning rows, of four values per decade from 1e-4 to 1e6. The features have a last column of
    ones, and the labels of the fit do not matter.
    """
    probs = softmax(features @ weights.T)
    a, q_a = np.linalg.eigh(features.T @ features)
    g, q_g = np.linalg.eigh((np.diag(probs.sum(0)) - probs.T @ probs) / len(labels))
    values = np.maximum(g, 0)[:, None] * np.maximum(a, 0)

    def predict(rows: Array, prior: float) -> Array:
        variance = ((rows @ q_a) ** 2 @ (1 / (values + prior)).T) @ (q_g**2).T
        return log_softmax(rows @ weights.T / np.sqrt(1 + np.pi / 8 * variance))

    priors = [10 ** (step / 4) for step in range(-16, 25)]
    rows, known = tuning
    losses = [-predict(rows, prior)[np.arange(len(known)), known].mean() for prior in priors]
    best = priors[int(np.argmin(losses))]
    return predict(test, best), best
