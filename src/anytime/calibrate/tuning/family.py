"""The family of rules that tuning searches: what the rules of this library span between steady and calibrated.

The plain product hardly ever drops and is far too unsure of itself; at its calibrated temperature it is as sure as it should
be and drops often. Between them lies the path T^s with s from 0 to 1, and beside it other activations and weights, caching on
top, temperature-scaled softmaxes, and the fitted product with more or less weight on steadiness. All that must be
fitted is fitted here, on rows that take no part in the choice.
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
"""λ: how much a drop of 1 weighs against a nat in fitting the product."""
STEPS = (0.25, 0.5, 0.75, 1.0, 1.25)
"""s: how far to go from temperature 1 to the calibrated one, and beyond it."""
_FREE, _FREE_FROM = 0.03, 10.0
"""Under a high penalty the small drops, which are many, outweigh the large ones unless they are free."""
_CLIPS = (0.25, 0.5, 1.0)
_GATES = (0.0625, 0.125, 0.25)
"""Limits and thresholds as parts of a usual largest logit: networks differ in their scale."""


@dataclass(frozen=True)
class Member:
    """One rule of the family: `name` is short enough for a table, `family` says which part it belongs to."""

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
        for free in (0.0, _FREE) if penalty >= _FREE_FROM else (0.0,):
            fitted = fit_product(logits, labels, penalty=penalty, ignored=free).rule
            name = f"fitted product, λ = {penalty:g}" + (f" above {free:g}" if free else "")
            yield Member(name, "fitted product", fitted)
            yield Member(f"cached {name}", "fitted product", Cached(fitted))


def _scaled(logits: Tensor, labels: Tensor) -> Iterator[Member]:
    """The softmaxes at their temperatures, latest and cached."""
    full = fit_temperature(logits, labels).temperatures
    for step in (0.5, 1.0):
        temperatures = _along(full, step)
        yield Member(f"latest at {_power(step)}", "softmax at a temperature", Scaled(Latest(), temperatures))
        yield Member(f"caching at {_power(step)}", "softmax at a temperature", Scaled(Caching(), temperatures))


def _tempered(name: str, product: Product, logits: Tensor, labels: Tensor) -> Iterator[Member]:
    """A product on its way to its calibrated temperature, with and without caching on top."""
    try:
        full = fit_temperature(logits, labels, product).temperatures
    except LabelError:  # it rules every label out at some exit: no temperature helps
        return
    for step in STEPS:
        tempered = Tempered(product, _along(full, step))
        yield Member(f"{name} at {_power(step)}", "product at a temperature", tempered)
        yield Member(f"cached {name} at {_power(step)}", "product at a temperature", Cached(tempered))


def _activations(logits: Tensor) -> Iterator[tuple[str, Activation]]:
    yield "", ReLU()
    yield "softplus", Softplus()
    usual = float(logits[-1].amax(-1).median())
    if usual <= 0:  # nothing to clip, and gates would shut out all
        return
    for part in _CLIPS:
        limit = float(f"{part * usual:.2g}")
        yield f"clipped({limit:g})", ClippedReLU(limit)
    for part in _GATES:
        threshold = float(f"{part * usual:.2g}")
        yield f"threshold({threshold:g})", ThresholdReLU(threshold)


def _weights(exits: int) -> dict[str, Any]:
    """Weights by how a table names them: i/M, alike, and i/M to a power."""
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
