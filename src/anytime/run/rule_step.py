"""A rule's step as a function of tensors alone, so that it can be exported beside a stage.

The state of a rule becomes a list of tensors with names, in a fixed order: `state_memory`, `state_margin`,
`state_inner_memory` and so on, each with the batch first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anytime.combine.base import Rule, State

GIVES = ("probs", "log_probs", "fell_back", "labels")
"""What a step gives besides the new state."""
_ROWS = 4


class RuleStep(nn.Module):
    """The step of a rule after a number of exits: `(logits, *state)` in, `(probs, log_probs, fell_back, labels, *state)` out.

    It computes in float64, keeps its state so, and gives answers in float32. Tools that quantise a graph leave float64 alone: a
    step of eight bits would answer with other classes, and the infinities of log space have no scale.

    Args:
        rule: The rule.
        state: One of its states after so many exits; what counts is its form.
        last: Whether no step follows, so that no state is given.
    """

    def __init__(self, rule: Rule[Any], state: State, *, last: bool) -> None:
        super().__init__()
        self.rule, self.state, self.last = rule, state, last
        self.eval()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        logits, *state = values
        with Exportable():
            after, prediction = self.rule._update(_filled(self.state, iter(state)), logits.double())
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
    """Lets a rule's step be exported as it is written; the numbers stay the same.

    Where a rule looks whether some work can be left out, the work is done: the same step must do for all inputs. And where
    runtimes lack an operation on truth values, or on infinity, it is put in words that they have.
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


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    match value:
        case Tensor():
            return next(tensors)
        case State():
            return replace(value, **{part.name: _filled(getattr(value, part.name), tensors) for part in fields(value)})
        case tuple():
            return tuple(_filled(part, tensors) for part in value)
    return value
