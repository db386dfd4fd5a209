"""What the last linear layer of each exit reads, and which layer that is, for any model whose exits end in one.

Methods that put a distribution over the last layer (`anytime.calibrate.fit_laplace`) need its input beside its output. It is
watched while the model runs to the exit that was asked for, and only then: between two exits the model has no hooks, so
that a run may be dropped at any exit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anytime.errors import OptionError, ShapeError
from anytime.models.attach.probe import evaluating, hooked
from anytime.models.base import ExitModel

_Call = tuple[nn.Module, tuple[Any, ...], Any]
"""A layer, its arguments, its output."""


def exit_features(model: ExitModel, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features `(batch, width)` and the logits `(batch, classes)` of each exit; as lazy as `model.exits`.

    Args:
        model: A torch module whose exits each give what an `nn.Linear` gave. It runs in the mode that it is in.
        x: A batch.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> model = MLP(MLPConfig(classes=4, width=8, exits=3))
        >>> features, logits = next(exit_features(model, torch.randn(5, 2)))  # only the first stage has run
        >>> features.shape, logits.shape
        (torch.Size([5, 8]), torch.Size([5, 4]))
    """
    for _, features, logits in _watched_exits(model, x):
        yield features, logits


def last_layers(model: ExitModel, example: Tensor) -> list[nn.Linear]:
    """The linear layer that gives the logits of each exit.

    Args:
        model: As for `exit_features`. It is run once in eval mode, and left in the mode it came in.
        example: A batch; one row is enough.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> model = MLP(MLPConfig(classes=4, exits=3))
        >>> [layer is head for layer, head in zip(last_layers(model, torch.randn(1, 2)), model.heads)]
        [True, True, True]
    """
    with evaluating(_checked(model)), torch.no_grad():
        return [layer for layer, _, _ in _watched_exits(model, example)]


def collect_features(model: ExitModel, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """The features of each exit, `(rows, width)`, and the labels of all batches, `(rows,)`.

    Args:
        model: As for `exit_features`. It is run in eval mode, without gradients, and left in the mode it came in.
        batches: Inputs with labels.
    """
    kept: list[list[Tensor]] = []
    labels = []
    with evaluating(_checked(model)), torch.no_grad():
        for x, wanted in batches:
            kept.append([features for features, _ in exit_features(model, x)])
            labels.append(wanted)
    if not kept:
        raise ShapeError("there are no batches", expected="inputs with labels", fix="give at least one batch")
    return [torch.cat(features) for features in zip(*kept, strict=True)], torch.cat(labels)


def _watched_exits(model: ExitModel, x: Tensor) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
    linears: list[nn.Module] = [module for module in _checked(model).modules() if isinstance(module, nn.Linear)]
    calls: list[_Call] = []

    def note(layer: nn.Module, args: Any, output: Any) -> None:
        calls.append((layer, args, output))

    run = iter(model.exits(x))
    try:
        for exit in range(model.num_exits):
            with hooked(linears, note):
                logits = next(run, None)
            if logits is None:
                raise ShapeError(
                    f"the model gave {exit} exits",
                    expected=f"num_exits = {model.num_exits}",
                    fix="correct either; anytime.testing.check_model looks for more",
                )
            layer, features = _source(calls, logits, exit)
            calls.clear()
            yield layer, features, logits
    finally:
        close = getattr(run, "close", None)
        if close is not None:
            close()


def _source(calls: list[_Call], logits: Tensor, exit: int) -> tuple[nn.Linear, Tensor]:
    """The layer whose output the logits are, not merely equal to, and a copy of its input: a later stage may write there."""
    for layer, args, output in reversed(calls):
        if output is logits and isinstance(layer, nn.Linear) and args and args[0].ndim == 2:
            return layer, args[0].clone()
    raise OptionError(
        f"the logits of exit {exit + 1} do not come straight from a linear layer",
        expected="exits that yield what an nn.Linear gave for features of shape (batch, width)",
        fix="end every exit in an nn.Linear, and do scaling, averaging or reshaping after exits(x)",
    )


def _checked(model: ExitModel) -> nn.Module:
    if isinstance(model, nn.Module) and isinstance(model, ExitModel):
        return model
    raise OptionError(
        f"the model is a {type(model).__name__}",
        expected="a torch module with num_exits and exits(x), whose layers can be watched",
        fix="save its features yourself and give them to anytime.calibrate.fit_laplace",
    )
