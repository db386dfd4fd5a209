"""Fits and trainings once more, as in `plain.py`: NumPy, float64, and nothing of the library.

Only the random numbers that begin a training are given, so that both implementations take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .plain import Array, softmax

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
