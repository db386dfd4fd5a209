"""From logits to evidence: the activations of the paper's products and mixtures.

An activation maps the logits of one exit to non-negative evidence per class. All of them return the logarithm of the
evidence, so that zero evidence is `-inf` and nothing overflows. A factor common to all classes cancels when a rule
normalises, so it may be left out, as the paper's constant C_b of the clipped ReLU is.

Gradients are finite wherever the logits are: a class without evidence has a gradient of zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.checks import check_choice, check_number
from anytime.errors import OptionError, ShapeError

Gate = Literal["gate", "clamp"]
LARGEST = 1e30
"""The largest threshold: it and its sums with logits are float32 numbers."""
TOP = 3
_STEEPEST = 1e6
_FEW = 4096
_FLAT = 1e-30
"""Below this the derivative of the logarithm, 1/f, counts as zero: it would overflow float32."""


@runtime_checkable
class Activation(Protocol):
    """Anything with `log_evidence`."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        """Logarithm of the evidence, of the shape of `logits`, `(..., classes)`; `-inf` where there is none."""
        ...


@dataclass(frozen=True)
class ReLU:
    """max(f, 0): the paper's choice. Classes with a negative logit leave the support for good."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, 0.0, "gate")


@dataclass(frozen=True)
class Heaviside:
    """[f > threshold]: the hard product, monotone for every class of the final support."""

    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_number(self.threshold, "threshold", low=-LARGEST, most=LARGEST)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return torch.where(logits > self.threshold, 0.0, -math.inf).to(logits.dtype)


@dataclass(frozen=True)
class ClippedReLU:
    """max(min(f, limit), 0): the Heaviside as `limit` goes to 0, the ReLU as it goes to infinity."""

    limit: float = 1.0

    def __post_init__(self) -> None:
        check_number(self.limit, "limit", above=0, most=math.inf)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, 0.0, "gate").clamp(max=math.log(self.limit))


@dataclass(frozen=True)
class Softplus:
    """log(1 + e^f): full support; the likelihood for fine-tuning with the product."""

    def log_evidence(self, logits: Tensor) -> Tensor:
        # log(softplus(f)) = f - e^f/2 + ... for very negative f, where softplus itself underflows.
        return torch.where(logits < -15.0, above_overflow(logits), torch.log(F.softplus(logits.clamp(min=-15.0))))


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + e^-f): tested by the paper and rejected.

    The evidence is always float64: it differs from 1 by e^-f only, so float32 would round large logits to ties.
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
        mode: `gate` is f·[f > b], as the paper's text says: classes at or below b leave the support. `clamp` is max(f, b), as
            the paper's printed formula and its released code: nothing leaves the support when b > 0.
    """

    threshold: float
    mode: Gate = "gate"

    def __post_init__(self) -> None:
        fix = "use Heaviside(threshold=...) for a negative threshold: evidence cannot be negative"
        check_number(self.threshold, "threshold", low=0, most=LARGEST, fix=fix)
        check_choice(self.mode, "mode", ("gate", "clamp"))

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, self.threshold, self.mode)


@dataclass(frozen=True)
class AdaptiveReLU:
    """A ReLU with an adaptive threshold τ (appendix B.3.1): f·[f > τ(f)], or max(f, τ(f)) with `mode='clamp'`.

    τ(f) = C · p(top three logits), where p is a logistic regression that predicts whether the answer is correct: a confident
    exit drops more classes. `anytime.calibrate.fit_adaptive_threshold` finds the numbers.

    Args:
        scale: C, at least 0; 0 is the plain ReLU.
        coefficients: One for each of the top logits, largest first; at most three.
        intercept: Of the logistic regression.
        mode: `gate` removes classes at or below τ from the support, `clamp` raises them to τ.
    """

    scale: float
    coefficients: tuple[float, ...]
    intercept: float
    mode: Gate = "gate"

    def __post_init__(self) -> None:
        fix = "find the numbers with anytime.calibrate.fit_adaptive_threshold"
        check_number(self.scale, "scale", low=0, most=LARGEST, fix=fix)
        check_number(self.intercept, "intercept", low=-LARGEST, most=LARGEST, fix=fix)
        limits = {"low": -_STEEPEST, "most": _STEEPEST}
        numbers = tuple(check_number(value, "coefficients", **limits, fix=fix) for value in self.coefficients)
        if not 1 <= len(numbers) <= TOP:
            raise OptionError(f"got {len(numbers)} coefficients", expected=f"one to {TOP}", fix=fix)
        object.__setattr__(self, "coefficients", numbers)
        check_choice(self.mode, "mode", ("gate", "clamp"))

    def threshold(self, logits: Tensor) -> Tensor:
        """τ(f) for each row, `(..., 1)`."""
        if logits.shape[-1] < len(self.coefficients):
            raise ShapeError(
                f"logits with {logits.shape[-1]} classes",
                expected=f"at least {len(self.coefficients)} classes, the number of coefficients",
                fix="fit the threshold on logits of this model",
            )
        # The clamp keeps the sum finite; the sigmoid is flat long before.
        top = logits.topk(len(self.coefficients), dim=-1).values.clamp(-LARGEST, LARGEST)
        slope = torch.tensor(self.coefficients, dtype=logits.dtype, device=logits.device)
        return self.scale * torch.sigmoid((top * slope).sum(-1, keepdim=True) + self.intercept)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, self.threshold(logits), self.mode)


def log_above(logits: Tensor, threshold: float | Tensor, mode: Gate) -> Tensor:
    """Logarithm of f·[f > b] (`gate`) or of max(f, b) (`clamp`), for b ≥ 0."""
    if isinstance(threshold, Tensor):
        values = torch.maximum(logits, threshold) if mode == "clamp" else logits
        alive = values > (0.0 if mode == "clamp" else threshold)
        return torch.where(alive, _log(torch.where(alive, values, 1.0)), -math.inf)
    if mode == "clamp" and threshold > 0:
        return _log(logits.clamp(min=threshold))
    if threshold == 0 and not logits.requires_grad and not torch.compiler.is_compiling() and logits.numel() < _FEW:
        return logits.clamp(min=0).log()  # for few numbers the calls cost more than the work
    # The logarithm of zero is many times slower than of other numbers. As log f < f, a minimum inserts -inf afterwards.
    survivors = _log(torch.threshold(logits, threshold, 1.0))
    return torch.minimum(survivors, torch.threshold(logits, threshold, -math.inf))


def below_best(logits: Tensor) -> Tensor:
    """Logits minus the largest of their row: the logarithm of e^f up to a factor, exact near the best class."""
    return above_overflow(logits - logits.amax(-1, keepdim=True))


def above_overflow(values: Tensor) -> Tensor:
    """Values clamped so far above the smallest number of their type that a weighted sum over exits stays finite."""
    return values.clamp(min=torch.finfo(values.dtype).min / 1e9)


def _log(values: Tensor) -> Tensor:
    """The logarithm of positive numbers, with a finite gradient also for the smallest of them."""
    logarithm = values.log()
    if not values.requires_grad:
        return logarithm
    smooth = values.clamp(min=_FLAT).log()
    return smooth + (logarithm - smooth).detach()
