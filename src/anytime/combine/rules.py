"""The rules of the paper (section 4): what to answer, given the logits of the exits seen so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from anytime.checks import check_choice, check_number
from anytime.combine.activations import Activation, Exponential, ReLU
from anytime.combine.base import LARGEST, SMALLEST, Rule, decide, evidence_or_logits, never_fell_back
from anytime.combine.prediction import Prediction, State, log_odds, top_class
from anytime.errors import OptionError

Weights = Literal["linear", "ones"] | tuple[float, ...]
Shift = float | Literal["1/K"]
Ties = Literal["earlier", "later"]
S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Latest(Rule[State]):
    """The softmax of the current exit: what an early-exit network does by default."""

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        # The memory only fixes shape and device, so that a wrong batch is noticed.
        return State(state.exits, state.seen + 1, logits), _softmax(logits)


@dataclass(frozen=True)
class CachingState(State):
    """`memory` is the logarithm of the cached distribution, `labels` its labels, `margin` its confidence as log-odds."""

    margin: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class Caching(Rule[CachingState]):
    """The most confident softmax so far (Caching Anytime).

    Args:
        ties: Which of two equally confident answers to keep: `earlier` as in the paper's text, or `later` as in its
            released code.
    """

    state_type: ClassVar[type[State]] = CachingState
    ties: Ties = "earlier"

    def __post_init__(self) -> None:
        check_choice(self.ties, "ties", ("earlier", "later"))

    def _update(self, state: CachingState, logits: Tensor) -> tuple[CachingState, Prediction]:
        softmax = _softmax(logits)
        # From the logits: log-probabilities are rounded, which would tell equal distributions in another order apart.
        answer, margin = keep_more_confident(softmax, log_odds(logits, softmax.labels), state, self.ties)
        return CachingState(state.exits, state.seen + 1, answer.log_probs, margin, answer.labels), answer


@dataclass(frozen=True)
class _Experts(Rule[S]):
    """What products and mixtures share: evidence from an activation, and weights per exit."""

    activation: Activation = field(default_factory=ReLU)
    weights: Weights = "linear"
    shift: Shift = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.activation, type) or not isinstance(self.activation, Activation):
            raise OptionError(
                f"activation is {self.activation!r}",
                expected="an activation, such as ReLU() or ClippedReLU(limit=2.0) of anytime.combine",
                fix="write ReLU() with parentheses; from a name, use anytime.parse_rule('product(softplus)')",
            )
        if self.shift != "1/K":
            check_number(
                self.shift, "shift", low=-LARGEST, most=LARGEST, fix="pass a number, or '1/K' for one over the classes"
            )
        object.__setattr__(self, "weights", _check_weights(self.weights))

    @property
    def reads_scale(self) -> bool:
        """Whether adding a constant to all logits of a row changes the prediction: not for softmaxes."""
        return not isinstance(self.activation, Exponential)

    def check_exits(self, exits: int) -> None:
        """Refuse a number of exits that there are no weights for."""
        weights_of(self.weights, exits)

    def _log_evidence(self, logits: Tensor) -> Tensor:
        amount = 1.0 / logits.shape[-1] if isinstance(self.shift, str) else self.shift
        return self.activation.log_evidence(logits + amount if amount else logits)


@dataclass(frozen=True)
class Product(_Experts[State]):
    """The product of experts over the exits (Product Anytime): p_m(y) ∝ Π_{i≤m} a(f_i(y))^{w_i}.

    A class without evidence at one exit leaves the support for good. Where no class is left the row has collapsed:
    the prediction is the softmax of the current exit, there and at all later exits, and `fell_back` is true.

    Args:
        activation: a; the ReLU by default.
        weights: `linear` is w_i = i/M, `ones` is 1, or one number per exit: 0, which leaves the exit out, or 1e-6 to 1e6.
        shift: Added to the logits first; `1/K` is the paper's choice for few classes.

    Example:
        >>> logits = torch.tensor([[[2.0, 1.0, -1.0]], [[3.0, -1.0, 1.0]]])
        >>> Product()(logits).probs[-1, 0].tolist()  # the third class left at the first exit, the second at the second
        [1.0, 0.0, 0.0]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.weights, str) and not all(
            weight == 0 or SMALLEST <= weight <= LARGEST for weight in self.weights
        ):
            raise OptionError(
                f"weights are {self.weights}",
                expected=f"0, or {SMALLEST:g} to {LARGEST:g}, for each exit: other powers of the evidence overflow",
                fix="divide the weights by the largest; use 0 to leave an exit out",
            )

    def combine(self, logits: Tensor) -> Prediction:
        """As the call, for logits that are known to be finite floats of the right shape."""
        found = None
        if logits.is_cuda:  # one read and one write, in place of some ten of each
            from anytime.combine.fused import combine_product

            found = combine_product(self, logits)
        return super().combine(logits) if found is None else found

    def after(self, logits: Tensor, exits: int) -> Prediction:
        """The prediction after some of `exits` exits, from the evidence of all of them in one operation."""
        weights, taken = _taken(self.weights, exits, len(logits), logits.dtype, logits.device)
        if not taken:
            return decide(torch.zeros_like(logits[0]), logits[-1])
        given = logits if len(taken) == len(logits) else logits[list(taken)]
        return decide((self._log_evidence(given) * weights).sum(0), logits[-1])

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        weight = weights_of(self.weights, state.exits)[state.seen]
        total = torch.zeros_like(logits) if state.memory is None else state.memory
        if weight > 0:  # 0 · -inf would be NaN
            total = total + weight * self._log_evidence(logits)
        return State(state.exits, state.seen + 1, total), decide(total, logits)


@dataclass(frozen=True)
class MixtureState(State):
    """`memory` is the logarithm of the mean so far, `fell_back` the rows where an exit had no evidence."""

    fell_back: Tensor | None = None


@dataclass(frozen=True)
class Mixture(_Experts[MixtureState]):
    """The mean over the exits so far of each exit's normalised evidence: the paper's ablation.

    An exit without evidence for any class contributes its softmax, and `fell_back` is true from there on.

    Args:
        activation: a; the ReLU by default.
        weights: `ones` for the plain mean, `linear` for i/M, or one number per exit, of which only the ratios matter; the
            first must be positive.
        shift: Added to the logits first.
    """

    state_type: ClassVar[type[State]] = MixtureState
    weights: Weights = "ones"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.weights, str) and self.weights[0] == 0:
            raise OptionError(
                f"weights are {self.weights}",
                expected="a positive first weight, so that there is a mean at the first exit",
                fix="give the first exit a small weight, or remove it from the logits",
            )

    def _update(self, state: MixtureState, logits: Tensor) -> tuple[MixtureState, Prediction]:
        kept, added = log_fractions(weights_of(self.weights, state.exits), state.seen)
        total, fell_back, ranking = state.memory, state.fell_back, state.memory
        if added > -math.inf:
            evidence, lost = evidence_or_logits(self._log_evidence(logits), logits)
            expert = evidence.log_softmax(-1)
            if total is None or fell_back is None:
                total, fell_back, ranking = expert, lost, evidence
            else:
                total = ranking = _log_add(total + kept, expert + added)
                fell_back = fell_back | lost
        assert total is not None  # the first weight is positive
        assert fell_back is not None
        assert ranking is not None
        prediction = Prediction(total.clamp(max=0).to(logits.dtype), fell_back, top_class(ranking))
        return MixtureState(state.exits, state.seen + 1, total, fell_back), prediction


def keep_more_confident(answer: Prediction, margin: Tensor, state: CachingState, ties: Ties) -> tuple[Prediction, Tensor]:
    """The more confident of an answer, whose log-odds are `margin`, and the cached one in each row, and its log-odds."""
    if state.memory is None or state.margin is None or state.labels is None:
        return answer, margin
    newer = margin > state.margin if ties == "earlier" else margin >= state.margin
    fell_back: Tensor | None = getattr(state, "fell_back", None)
    kept = Prediction(
        torch.where(newer[:, None], answer.log_probs, state.memory),
        answer.fell_back if fell_back is None else torch.where(newer, answer.fell_back, fell_back),
        torch.where(newer, answer.labels, state.labels),
    )
    return kept, torch.where(newer, margin, state.margin)


def _softmax(logits: Tensor) -> Prediction:
    return Prediction(logits.log_softmax(-1), never_fell_back(logits), top_class(logits))


def _log_add(one: Tensor, other: Tensor) -> Tensor:
    """log(e^one + e^other), whose gradient is zero, not NaN, where both are zero evidence."""
    if not (one.requires_grad or other.requires_grad):
        return torch.logaddexp(one, other)
    nothing = (one == -math.inf) & (other == -math.inf)
    return torch.where(nothing, -math.inf, torch.logaddexp(torch.where(nothing, 0.0, one), other))


@cache
def log_fractions(weights: tuple[float, ...], exit: int) -> tuple[float, float]:
    """Logarithms of the fractions of the mean that belong to the exits before and to this one."""
    logarithms = [math.log(weight) if weight > 0 else -math.inf for weight in weights[: exit + 1]]
    highest = max(logarithms)
    totals = [math.fsum(math.exp(each - highest) for each in part) for part in (logarithms[:-1], logarithms)]
    before, total = (highest + math.log(each) if each else -math.inf for each in totals)
    return before - total, logarithms[-1] - total


def weights_of(weights: Weights, exits: int) -> tuple[float, ...]:
    """One number per exit from the `weights` of a product or a mixture."""
    if weights == "linear":
        return tuple(exit / exits for exit in range(1, exits + 1))
    if weights == "ones":
        return (1.0,) * exits
    if len(weights) != exits:
        raise OptionError(
            f"got {len(weights)} weights for {exits} exits",
            expected=f"{exits} weights, one per exit",
            fix="pass as many weights as exits, or 'linear' or 'ones'",
        )
    return tuple(float(weight) for weight in weights)


@cache
def _taken(weights: Weights, exits: int, seen: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """The positive weights of the first exits, `(taken, 1, 1)`, and the exits they belong to."""
    taken = [(exit, weight) for exit, weight in enumerate(weights_of(weights, exits)[:seen]) if weight > 0]
    with torch.inference_mode(False):  # it is cached, and may be used with gradients later
        numbers = torch.tensor([weight for _, weight in taken], dtype=dtype, device=device)
    return numbers[:, None, None], tuple(exit for exit, _ in taken)


def _check_weights(weights: Any) -> Weights:
    if isinstance(weights, str):
        check_choice(weights, "weights", ("linear", "ones"), fix="pass 'linear' (i/M, the paper's choice), 'ones' or numbers")
        return weights  # type: ignore[return-value]
    values = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(values, Sequence) or not values:
        raise OptionError(f"weights are {weights!r}", expected="one number per exit", fix="pass 'linear' (i/M) or numbers")
    return tuple(check_number(weight, "weights", low=0) for weight in values)
