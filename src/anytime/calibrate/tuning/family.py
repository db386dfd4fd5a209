"""The family of rules that tuning searches: it spans the trade-off between few drops and good calibration.

The plain product rarely drops and is underconfident; at its calibrated temperature it drops often. The path T^s with s from
0 to 1 leads from one to the other. The family also has other activations and weights, caching on top, temperature-scaled
softmaxes, and the fitted product with various penalties on drops, with and without held answers. Everything that needs fitting
is fitted here, on rows that take no part in the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anytime.calibrate.product import fit_product
from anytime.calibrate.temperature import fit_temperature
from anytime.combine import (
    Activation,
    Cached,
    Caching,
    ClippedReLU,
    Latest,
    Product,
    ReLU,
    Rule,
    Scaled,
    Softplus,
    Tempered,
    ThresholdReLU,
)
from anytime.errors import LabelError

PENALTIES = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)
"""λ: the cost of a drop of 1 in nats, in fitting the product."""
STEPS = (0.25, 0.5, 0.75, 1.0, 1.25)
"""s: from temperature 1 (0) to the calibrated one (1), and beyond it."""
_IGNORED, _IGNORED_FROM = 0.03, 10.0
"""From this penalty on, also ignore drops up to 0.03: small drops are many and would outweigh the large ones."""
_MARGIN, _FEW_CLASSES = 1.0, 10
"""With up to so many classes, products that hold answers are tried too; with more they gain little, and take long to fit."""
_CLIPS = (0.25, 0.5, 1.0)
_GATES = (0.0625, 0.125, 0.25)
"""Limits and thresholds as fractions of a typical largest logit, since networks differ in scale."""


@dataclass(frozen=True)
class Member:
    """One rule of the family: a `name` short enough for a table, and the `family` (part of the whole) it belongs to."""

    name: str
    family: str
    rule: Rule[Any]


def members(logits: Tensor, labels: Tensor, *, penalties: tuple[float, ...] = PENALTIES) -> Iterator[Member]:
    """The family, fitted on checked logits `(exits, rows, classes)` and labels; the simplest rules first."""
    exits = logits.shape[0]
    yield Member("latest", "softmax", Latest())
    yield Member("caching", "softmax", Caching())
    yield from _scaled(logits, labels)
    weights = _weights(exits)
    for activation_name, activation in _activations(logits):
        for weight_name, weight in weights.items():
            shown = ", ".join(part for part in (activation_name, weight_name) if part)
            yield Member(f"product({shown})" if shown else "product", "product", Product(activation, weight))
    yield Member("product(shift=1/K)", "product", Product(shift="1/K"))
    for activation_name, activation in (("", ReLU()), ("softplus", Softplus())):
        for weight_name in ("", "weights=ones"):
            shown = ", ".join(part for part in (activation_name, weight_name) if part)
            name = f"product({shown})" if shown else "product"
            yield from _tempered(name, Product(activation, weights[weight_name]), logits, labels)
    for penalty in penalties:
        for ignored in (0.0, _IGNORED) if penalty >= _IGNORED_FROM else (0.0,):
            fitted = fit_product(logits, labels, penalty=penalty, ignored=ignored).rule
            name = f"fitted product, λ = {penalty:g}" + (f" above {ignored:g}" if ignored else "")
            yield Member(name, "fitted product", fitted)
            yield Member(f"cached {name}", "fitted product", Cached(fitted))
        if logits.shape[2] <= _FEW_CLASSES:
            held = fit_product(logits, labels, penalty=penalty, margin=_MARGIN).rule
            yield Member(f"holding product, λ = {penalty:g}", "fitted product", held)


def _scaled(logits: Tensor, labels: Tensor) -> Iterator[Member]:
    """Temperature-scaled softmaxes, latest and cached."""
    full = fit_temperature(logits, labels).temperatures
    for step in (0.5, 1.0):
        temperatures = _along(full, step)
        yield Member(f"latest at {_power(step)}", "softmax at a temperature", Scaled(Latest(), temperatures))
        yield Member(f"caching at {_power(step)}", "softmax at a temperature", Scaled(Caching(), temperatures))


def _tempered(name: str, product: Product, logits: Tensor, labels: Tensor) -> Iterator[Member]:
    """A product between temperature 1 and its calibrated one and beyond, with and without caching on top."""
    try:
        full = fit_temperature(logits, labels, product).temperatures
    except LabelError:  # at some exit no label is in the support: no temperature helps
        return
    for step in STEPS:
        tempered = Tempered(product, _along(full, step))
        yield Member(f"{name} at {_power(step)}", "product at a temperature", tempered)
        yield Member(f"cached {name} at {_power(step)}", "product at a temperature", Cached(tempered))


def _activations(logits: Tensor) -> Iterator[tuple[str, Activation]]:
    yield "", ReLU()
    yield "softplus", Softplus()
    usual = float(logits[-1].amax(-1).median())
    if usual <= 0:  # nothing to clip, and any gate would remove all classes
        return
    for part in _CLIPS:
        limit = float(f"{part * usual:.2g}")
        yield f"clipped({limit:g})", ClippedReLU(limit)
    for part in _GATES:
        threshold = float(f"{part * usual:.2g}")
        yield f"threshold({threshold:g})", ThresholdReLU(threshold)


def _weights(exits: int) -> dict[str, Any]:
    """Weights by their name in a table: i/M, equal, and powers of i/M."""
    parts = [exit / exits for exit in range(1, exits + 1)]
    return {
        "": "linear",
        "weights=ones": "ones",
        "weights=√(i/M)": tuple(part**0.5 for part in parts),
        "weights=(i/M)²": tuple(part**2 for part in parts),
    }


def _along(temperatures: tuple[float, ...], step: float) -> tuple[float, ...]:
    return tuple(temperature**step for temperature in temperatures)


def _power(step: float) -> str:
    return "T" if step == 1 else f"T^{step:g}"
