"""A rule's step as a function of tensors only, so that it can be exported with a stage.

The state of a rule becomes a list of named tensors in a fixed order: `state_memory`, `state_margin`, `state_inner_memory` and
so on, each with the batch first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anytime.combine import Rule, State

OUTPUTS = ("probs", "log_probs", "fell_back", "labels")
"""The outputs of a step besides the new state."""
_ROWS = 4


class RuleStep(nn.Module):
    """A rule's step after some exits: `(logits, *state)` in, `(probs, log_probs, fell_back, labels, *state)` out.

    The step and its state are in float64, its answers in float32. Quantisation tools do not touch float64: an eight-bit step
    would predict other classes, and the infinities of log space have no scale.

    Args:
        rule: The rule.
        state: A state of the rule after so many exits, for its structure.
        last: Whether no step follows, so that no state is returned.
    """

    def __init__(self, rule: Rule[Any], state: State, *, last: bool) -> None:
        super().__init__()
        self.rule, self.state, self.last = rule, state, last
        self.eval()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        logits, *state = values
        with Exportable():
            after, prediction = self.rule._update(filled(self.state, iter(state)), logits.double())
        left = () if self.last else flat(after).values()
        return prediction.probs.float(), prediction.log_probs.float(), prediction.fell_back, prediction.labels, *left


def flat(state: State) -> dict[str, Tensor]:
    """The tensors of a state by name, in the order of its fields.

    >>> from anytime.combine import Caching
    >>> list(flat(Caching().step(Caching().start(3), torch.zeros(2, 4))[0]))
    ['state_memory', 'state_margin', 'state_labels']
    """
    return dict(_named("state", state))


def typical_states(rule: Rule[Any], *, exits: int, classes: int) -> Iterator[tuple[Tensor, State]]:
    """Logits for each exit and the state before them, with rows that are easy, hard, without evidence, and collapsed."""
    state = rule.start(exits)
    generator = torch.Generator().manual_seed(0)
    for exit in range(exits):
        logits = 4 * torch.randn(_ROWS, classes, generator=generator)
        logits[1] = -logits[1].abs() - 0.1
        logits[2] = logits[2].abs() if exit < exits // 2 else -logits[2].abs()
        yield logits, state
        state, _ = rule._update(state, logits.double())


class Exportable(TorchFunctionMode):
    """Rewrites operations of a rule's step so that exporters and runtimes support them; results are the same.

    Conditions that skip unnecessary work become true, since one graph serves all inputs. Operations on booleans or on
    infinity that runtimes lack are expressed by others.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is Tensor.__bool__:
            return True
        if func is torch.where and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            condition, one, other = args
            return (condition & one) | (~condition & other)
        if func is torch.threshold:
            given, least, other = args
            return torch.where(given > least, given, other)
        if func is Tensor.clamp and set(named) == {"max"}:
            return torch.minimum(args[0], torch.full_like(args[0], named["max"]))
        return func(*args, **named)


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    match value:
        case Tensor():
            yield name, value
        case State():
            for part in fields(value):
                yield from _named(f"{name}_{part.name}", getattr(value, part.name))
        case tuple():
            for place, part in enumerate(value):
                yield from _named(f"{name}_{place}", part)


def filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A state with other tensors, in the order of `flat`."""
    match value:
        case Tensor():
            return next(tensors)
        case State():
            return replace(value, **{part.name: filled(getattr(value, part.name), tensors) for part in fields(value)})
        case tuple():
            return tuple(filled(part, tensors) for part in value)
    return value


def is_own(part: Any) -> bool:
    """Whether a rule, and every rule and activation in it, is this library's own.

    The branches of these depend on values only to skip unnecessary work, so that one graph serves all inputs.
    """
    if not is_dataclass(part):
        return isinstance(part, int | float | str | tuple | None)
    known = type(part).__module__.startswith(f"{__package__.partition('.')[0]}.")
    return known and all(is_own(getattr(part, field.name)) for field in fields(part))
