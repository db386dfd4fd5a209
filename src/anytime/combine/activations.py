"""From logits to evidence: the activations of the paper's products and mixtures.

An activation maps the logits of one exit to non-negative evidence per class. All of them are given as the logarithm
of the evidence, so that zero evidence is `-inf` and nothing overflows. A factor common to all classes cancels when a
rule normalises, so it may be left out (the paper's constant C_b of the clipped ReLU is).

Gradients are finite wherever the logits are: a class without evidence has a gradient of zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.checks import check_choice
from anytime.errors import OptionError

Gate = Literal["gate", "clamp"]
LARGEST = 1e30
"""Numbers of an activation stay below this, so that they are float32 numbers and so is what they are added to."""
_FEW = 4096
_FLAT = 1e-30
"""Below this the derivative of a logarithm, 1/f, is taken as zero: in float32 it would overflow."""


@runtime_checkable
class Activation(Protocol):
    """Anything with `log_evidence`."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        """Logarithm of the evidence, of the shape of `logits`, `(..., classes)`; `-inf` where there is none."""
        ...


@dataclass(frozen=True)
class ReLU:
    """max(f, 0): the paper's choice. Ranks survivors, drops classes with a negative logit for good."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, 0.0, "gate")


@dataclass(frozen=True)
class Heaviside:
    """[f > threshold]: the hard product, monotone for every class of the final support."""

    threshold: float = 0.0

    def __post_init__(self) -> None:
        _finite("threshold", self.threshold)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return torch.where(logits > self.threshold, 0.0, -math.inf).to(logits.dtype)


@dataclass(frozen=True)
class ClippedReLU:
    """max(min(f, limit), 0): the Heaviside as `limit` goes to 0, the ReLU as it goes to infinity."""

    limit: float = 1.0

    def __post_init__(self) -> None:
        _positive("limit", self.limit)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, 0.0, "gate").clamp(max=math.log(self.limit))


@dataclass(frozen=True)
class Softplus:
    """log(1 + e^f): full support; the likelihood for finetuning with the product."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        # log(softplus(f)) = f - e^f/2 + ... for very negative f, where softplus itself underflows.
        return torch.where(logits < -15.0, above_overflow(logits), torch.log(F.softplus(logits.clamp(min=-15.0))))


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + e^-f): tested by the paper and rejected.

    The evidence is float64 whatever the logits are. It differs from 1 by e^-f only, so float32 would round the classes with
    large logits to ties, and the index of a class would decide between them.
    """

    def log_evidence(self, logits: Tensor) -> Tensor:
        return above_overflow(F.logsigmoid(logits.double()))


@dataclass(frozen=True)
class Exponential:
    """e^f: the product of softmaxes."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        return below_best(logits)


@dataclass(frozen=True)
class ThresholdReLU:
    """A ReLU with a static threshold b in place of zero.

    Args:
        threshold: b, at least 0.
        mode: `gate` is f·[f > b]: classes at or under b leave the support, as the paper's text says. `clamp` is
            max(f, b), the paper's printed formula and its released code, by which nothing leaves when b > 0.
    """

    threshold: float
    mode: Gate = "gate"

    def __post_init__(self) -> None:
        _not_negative("threshold", self.threshold)
        check_mode(self.mode)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, self.threshold, self.mode)


def log_above(logits: Tensor, threshold: float | Tensor, mode: Gate) -> Tensor:
    """Logarithm of f·[f > b] (`gate`) or of max(f, b) (`clamp`), for b ≥ 0."""
    if isinstance(threshold, Tensor):
        values = torch.maximum(logits, threshold) if mode == "clamp" else logits
        alive = values > (0.0 if mode == "clamp" else threshold)
        return torch.where(alive, _log(torch.where(alive, values, 1.0)), -math.inf)
    if mode == "clamp" and threshold > 0:
        return _log(logits.clamp(min=threshold))
    if threshold == 0 and not logits.requires_grad and not torch.compiler.is_compiling() and logits.numel() < _FEW:
        return logits.clamp(min=0).log()  # few numbers: a call costs more than what it does
    # The logarithm of zero is many times slower than of other numbers. As log f < f, a minimum puts -inf in after it.
    survivors = _log(torch.threshold(logits, threshold, 1.0))
    return torch.minimum(survivors, torch.threshold(logits, threshold, -math.inf))


def below_best(logits: Tensor) -> Tensor:
    """Logits less the largest of their row: the logarithm of e^f but for a factor, and exact near the best class."""
    return above_overflow(logits - logits.amax(-1, keepdim=True))


def above_overflow(values: Tensor) -> Tensor:
    """Values so far above the least number of their type that a weighted sum over exits stays finite."""
    return values.clamp(min=torch.finfo(values.dtype).min / 1e9)


def _log(values: Tensor) -> Tensor:
    """The logarithm of positive numbers, with a finite gradient for the smallest of them too."""
    logarithm = values.log()
    if not values.requires_grad:
        return logarithm
    smooth = values.clamp(min=_FLAT).log()
    return smooth + (logarithm - smooth).detach()


def _finite(name: str, value: float) -> None:
    if not abs(value) <= LARGEST:
        raise OptionError(
            f"{name} is {value}", expected=f"a number from -{LARGEST:g} to {LARGEST:g}", fix=f"give {name} such a number"
        )


def _positive(name: str, value: float) -> None:
    if not value > 0 or math.isnan(value):
        raise OptionError(f"{name} is {value}", expected="a positive number", fix=f"give {name} a number above 0")


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value <= LARGEST:
        raise OptionError(
            f"{name} is {value}",
            expected=f"a number from 0 to {LARGEST:g} (evidence cannot be negative)",
            fix="use Heaviside(threshold=...) for a negative threshold",
        )


def check_mode(value: str) -> None:
    """Refuse anything but `gate` and `clamp`."""
    check_choice(value, "mode", ("gate", "clamp"))
