"""Adaptive thresholds: a ReLU whose threshold follows how sure the exit is (appendix B.3.1 of the paper).

τ(f) = C · p(top three logits), where p is a logistic regression that foretells whether the answer is right. A sure exit
drops more classes, an unsure one keeps them. `anytime.calibrate.fit_adaptive_threshold` finds the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anytime.combine.activations import LARGEST, Gate, check_mode, log_above
from anytime.errors import OptionError, ShapeError

TOP = 3
_STEEPEST = 1e6


@dataclass(frozen=True)
class AdaptiveReLU:
    """f·[f > τ(f)], or max(f, τ(f)) with `mode='clamp'`, as printed in the paper.

    Args:
        scale: C, at least 0; 0 is the plain ReLU.
        coefficients: Of the sorted top logits, largest first; at most three.
        intercept: Of the logistic regression.
        mode: `gate` takes classes at or under τ out of the support, `clamp` lifts them to τ.
    """

    scale: float
    coefficients: tuple[float, ...]
    intercept: float
    mode: Gate = "gate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", tuple(float(value) for value in self.coefficients))
        usable = 0 <= self.scale <= LARGEST and abs(self.intercept) <= LARGEST
        usable = usable and all(abs(value) <= _STEEPEST for value in self.coefficients)
        if not (usable and 1 <= len(self.coefficients) <= TOP):
            raise OptionError(
                f"scale {self.scale}, coefficients {self.coefficients}, intercept {self.intercept}",
                expected=f"a scale from 0 to {LARGEST:g} and one to {TOP} coefficients from -{_STEEPEST:g} to {_STEEPEST:g}",
                fix="let anytime.calibrate.fit_adaptive_threshold find them",
            )
        check_mode(self.mode)

    def threshold(self, logits: Tensor) -> Tensor:
        """τ(f) for each row, `(..., 1)`."""
        if logits.shape[-1] < len(self.coefficients):
            raise ShapeError(
                f"logits with {logits.shape[-1]} classes",
                expected=f"at least {len(self.coefficients)} classes, as many as this threshold reads",
                fix="fit the threshold on logits of this model",
            )
        # The sigmoid is flat long before a limit that keeps the sum finite.
        top = logits.topk(len(self.coefficients), dim=-1).values.clamp(-LARGEST, LARGEST)
        slope = torch.tensor(self.coefficients, dtype=logits.dtype, device=logits.device)
        return self.scale * torch.sigmoid((top * slope).sum(-1, keepdim=True) + self.intercept)

    def log_evidence(self, logits: Tensor) -> Tensor:
        return log_above(logits, self.threshold(logits), self.mode)
