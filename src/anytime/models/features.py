"""The last linear layer of each exit and its input, for any model whose exits end in one.

Methods with a distribution over the last layer (`anytime.calibrate.fit_laplace`) need its input. Hooks record it while the
model runs to the requested exit; between two exits there are none, so a run may be abandoned at any exit.
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
"""A layer, its arguments and its output."""


def exit_features(model: ExitModel, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features `(batch, width)` and the logits `(batch, classes)` of each exit, as lazily as `model.exits`.

    Args:
        model: A torch module whose exits yield the output of an `nn.Linear`. It runs in its current mode.
        x: A batch.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> model = MLP(MLPConfig(classes=4, width=8, exits=3))
        >>> features, logits = next(exit_features(model, torch.randn(5, 2)))  # only the first stage has run
        >>> features.shape, logits.shape
        (torch.Size([5, 8]), torch.Size([5, 4]))
    """
    for _, features, logits in _recorded_exits(model, x):
        yield features, logits


def last_layers(model: ExitModel, example: Tensor) -> list[nn.Linear]:
    """The linear layer that computes the logits of each exit.

    Args:
        model: As for `exit_features`. It runs once in eval mode, and its mode is restored.
        example: A batch; one row is enough.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> model = MLP(MLPConfig(classes=4, exits=3))
        >>> [layer is head for layer, head in zip(last_layers(model, torch.randn(1, 2)), model.heads)]
        [True, True, True]
    """
    with evaluating(_checked(model)), torch.no_grad():
        return [layer for layer, _, _ in _recorded_exits(model, example)]


def collect_features(model: ExitModel, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """The features of each exit, `(rows, width)`, and the labels of all batches, `(rows,)`.

    Args:
        model: As for `exit_features`. It runs in eval mode without gradients, and its mode is restored.
        batches: Pairs of inputs and labels.
    """
    kept: list[list[Tensor]] = []
    labels = []
    with evaluating(_checked(model)), torch.no_grad():
        for x, y in batches:
            kept.append([features for features, _ in exit_features(model, x)])
            labels.append(y)
    if not kept:
        raise ShapeError("batches is empty", expected="pairs of inputs and labels", fix="pass at least one batch")
    return [torch.cat(features) for features in zip(*kept, strict=True)], torch.cat(labels)


def _recorded_exits(model: ExitModel, x: Tensor) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
    linears: list[nn.Module] = [module for module in _checked(model).modules() if isinstance(module, nn.Linear)]
    calls: list[_Call] = []

    def record(layer: nn.Module, args: Any, output: Any) -> None:
        calls.append((layer, args, output))

    run = iter(model.exits(x))
    try:
        for exit in range(model.num_exits):
            with hooked(linears, record):
                logits = next(run, None)
            if logits is None:
                raise ShapeError(
                    f"exits(x) yields {exit} exits",
                    expected=f"num_exits = {model.num_exits}",
                    fix="set num_exits to the number of exits; anytime.testing.check_model finds further problems",
                )
            layer, features = _source(calls, logits, exit)
            calls.clear()
            yield layer, features, logits
    finally:
        close = getattr(run, "close", None)
        if close is not None:
            close()


def _source(calls: list[_Call], logits: Tensor, exit: int) -> tuple[nn.Linear, Tensor]:
    """The layer whose output the logits are (not merely equal), and a copy of its input, which a later stage may overwrite."""
    for layer, args, output in reversed(calls):
        if output is logits and isinstance(layer, nn.Linear) and args and args[0].ndim == 2:
            return layer, args[0].clone()
    raise OptionError(
        f"the logits of exit {exit + 1} are not the output of a linear layer",
        expected="exits that yield the output of an nn.Linear for features of shape (batch, width)",
        fix="end every exit with an nn.Linear; scale, average or reshape after exits(x)",
    )


def _checked(model: ExitModel) -> nn.Module:
    if isinstance(model, nn.Module) and isinstance(model, ExitModel):
        return model
    raise OptionError(
        f"the model is a {type(model).__name__}",
        expected="a torch.nn.Module with num_exits and exits(x)",
        fix="collect the features yourself and pass them to anytime.calibrate.fit_laplace",
    )
