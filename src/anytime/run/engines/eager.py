"""The eager engine: plain torch. It runs any model, including one that only has the generator `exits(x)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_inputs, count_rows, map_inputs, tensors_of
from anytime.errors import OptionError, ShapeError, StateError
from anytime.models.base import Carry, ExitModel, StagedModel, is_staged
from anytime.models.given import explain, names_of, structured
from anytime.models.modes import Modes
from anytime.run.engines.running import Joinable, Running, as_answer, device_of


class EagerEngine:
    """Runs a model stage by stage with torch, on the model's device and in eval mode.

    A model in training mode stays in it: the engine then runs an eval-mode copy that shares the weights. A model that is not
    staged is run by its generator; rows that are dropped are then computed all the same.

    Args:
        model: Any model with exits.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> run = EagerEngine(MLP(MLPConfig(classes=4, exits=3))).begin(torch.zeros(5, 2))
        >>> run.advance().shape
        torch.Size([5, 4])
        >>> run.keep(torch.tensor([0, 3]))
        >>> run.advance().shape
        torch.Size([2, 4])
        >>> run.close()
    """

    name = "eager"
    in_python = True
    TOLERANCE = 0.0
    """The reference that other engines are compared with."""

    def __init__(self, model: ExitModel) -> None:
        self.why = "requested"
        self.num_exits = model.num_exits
        self._model = _in_eval_mode(model)
        self.device, self._dtype = device_of(model), dtype_of(model)
        self.joins = is_staged(self._model)
        self.input_names = names_of(model)

    def begin(self, x: Inputs) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        inputs = map_inputs(self._prepared, check_inputs(x))
        if is_staged(self._model):
            return _ByStages(self._model, tensors_of(inputs, self.input_names), self.input_names)
        return _ByGenerator(self._model, inputs)

    def _prepared(self, x: Tensor) -> Tensor:
        return x.to(self.device, self._dtype if x.is_floating_point() else None)


class _ByStages(Joinable[Tensor]):
    def __init__(self, model: StagedModel, given: Carry, names: tuple[str, ...]) -> None:
        super().__init__(model.num_exits, len(given[0]))
        self._model, self._names = model, names
        self._carry: Carry = given

    def _run(self, exit: int) -> Tensor:
        with torch.inference_mode():
            try:
                left, logits = self._model.stage(exit, self._carry)
                answer = as_answer(_checked(logits, exit, self._batch))
            except Exception as error:
                if exit == 0:
                    explain(self._carry, self._names, self._try, error)
                raise
            self._carry = left
            return answer

    def _try(self, given: Carry) -> None:
        """Run the first stage on other inputs."""
        _checked(self._model.stage(0, _as_model(given, self._model))[1], 0, len(given[0]))


class _ByGenerator(Running[Tensor]):
    def __init__(self, model: ExitModel, x: Inputs) -> None:
        rows = count_rows(x)
        super().__init__(model.num_exits, rows)
        self._model, self._x = model, x
        with torch.inference_mode():
            self._exits_left: Iterator[Tensor] = iter(model.exits(x))
        self._rows, self._given = torch.arange(rows), rows
        self._left: Modes | None = None

    def _run(self, exit: int) -> Tensor:
        with torch.inference_mode():
            try:
                logits = self._next()
                if logits is None:
                    raise StateError(
                        f"the model's exits(x) ended after {exit} of {self._exits} exits",
                        expected="num_exits exits",
                        fix=f"set num_exits to {exit}, or yield logits for every exit",
                    )
                # Indexing copies: a generator may reuse the memory of its logits.
                return as_answer(_checked(logits, exit, self._given))[self._rows]
            except Exception as error:
                if exit == 0:
                    names = tuple(map(str, self._x)) if isinstance(self._x, Mapping) else ()
                    explain(tensors_of(self._x), names, self._try, error)
                raise

    def _try(self, given: Carry) -> None:
        """Run to the first exit, on other inputs of the same structure."""
        again: Any = iter(self._model.exits(structured(_as_model(given, self._model), self._x)))
        try:
            _checked(next(again), 0, len(given[0]))
        finally:
            getattr(again, "close", bool)()

    def _next(self) -> Tensor | None:
        """Modes that the generator leaves on, e.g. autocast around a yield, are kept for it and switched off for its thread."""
        own = Modes.now()
        if self._left is not None:
            self._left.restore()
        try:
            return next(self._exits_left, None)
        finally:
            left = Modes.now()
            self._left = None
            if left != own:
                self._left = left
                own.restore()

    def _select(self, rows: Tensor) -> None:
        self._rows = self._rows[rows]

    def _drop(self) -> None:
        close = getattr(self._exits_left, "close", None)
        if close is not None:
            with Modes.now().again():  # the generator turns off modes that it left on
                close()


def _in_eval_mode(model: ExitModel) -> ExitModel:
    """The model, or an eval-mode copy that shares its weights if a part of it is in training mode."""
    if not isinstance(model, nn.Module) or not any(part.training for part in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    try:
        copy = deepcopy(model, shared)
    except Exception as error:
        raise OptionError(
            f"the {type(model).__name__} is in training mode and cannot be copied: {error}",
            expected="a model in eval mode, or one that copy.deepcopy can copy",
            fix="call model.eval() first",
        ) from error
    return copy.eval()


def _checked(logits: object, exit: int, rows: int) -> Tensor:
    if isinstance(logits, Tensor) and logits.ndim >= 2 and len(logits) == rows:
        return logits
    got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise ShapeError(
        f"exit {exit + 1} of the model returned {got}",
        expected=f"logits of shape ({rows}, classes), one row per input",
        fix="return (batch, classes) logits from every exit, and pass inputs with the batch first",
    )


def _as_model(given: Carry, model: object) -> Carry:
    """Floating-point tensors in the type of the model."""
    dtype = dtype_of(model)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in given)


def dtype_of(model: object) -> torch.dtype | None:
    """The floating-point type of a model, to which inputs are converted: NumPy defaults to float64."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
    return None
