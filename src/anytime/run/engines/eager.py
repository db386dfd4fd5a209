"""The eager engine: torch as it is. It runs any model, also one that has a generator alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from anytime.errors import ShapeError, StateError
from anytime.models.base import Carry, ExitModel, StagedModel, is_staged
from anytime.models.modes import Modes
from anytime.run.engines.running import Joinable, Running, as_answer, check_inputs, device_of


class EagerEngine:
    """Runs a model stage by stage with torch, where the model lies.

    A model that is not staged is run by its generator; rows that are dropped then are computed all the same.

    Args:
        model: Any model with exits. It is put into eval mode.

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
    TOLERANCE = 0.0
    """It is what the others are measured against."""

    def __init__(self, model: ExitModel) -> None:
        self.why = "asked for"
        self.num_exits = model.num_exits
        self._model = model.eval() if isinstance(model, nn.Module) else model
        self.device, self._dtype = device_of(model), _dtype_of(model)
        self.joins = is_staged(self._model)

    def begin(self, x: Tensor) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        inputs = self._prepared(check_inputs(x))
        if is_staged(self._model):
            return _ByStages(self._model, inputs)
        return _ByGenerator(self._model, inputs)

    def _prepared(self, x: Tensor) -> Tensor:
        return x.to(self.device, self._dtype if x.is_floating_point() else None)


class _ByStages(Joinable[Tensor]):
    def __init__(self, model: StagedModel, x: Tensor) -> None:
        super().__init__(model.num_exits, len(x))
        self._model = model
        self._carry: Carry = (x,)

    def _run(self, exit: int) -> Tensor:
        with torch.inference_mode():
            self._carry, logits = self._model.stage(exit, self._carry)
            return as_answer(_checked(logits, exit, self._batch))


class _ByGenerator(Running[Tensor]):
    def __init__(self, model: ExitModel, x: Tensor) -> None:
        super().__init__(model.num_exits, len(x))
        with torch.inference_mode():
            self._exits_left: Iterator[Tensor] = iter(model.exits(x))
        self._rows, self._given = torch.arange(len(x)), len(x)
        self._left: Modes | None = None

    def _run(self, exit: int) -> Tensor:
        with torch.inference_mode():
            logits = self._next()
            if logits is None:
                raise StateError(
                    f"the model's exits(x) ended after {exit} of {self._exits} exits",
                    expected="as many as its num_exits says",
                    fix="correct num_exits, or exits(x)",
                )
            # Picking rows copies: a generator may use the memory of its logits again.
            return as_answer(_checked(logits, exit, self._given))[self._rows]

    def _next(self) -> Tensor | None:
        """Modes that it leaves on, as by `with torch.autocast(...)` around a yield, are kept for it, and off for its thread."""
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
            with Modes.now().again():  # what it left on it turns off, here or elsewhere
                close()


def _checked(logits: object, exit: int, rows: int) -> Tensor:
    if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == rows:
        return logits
    came = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise ShapeError(
        f"exit {exit + 1} of the model gave {came}",
        expected=f"logits of shape ({rows}, classes), one row per input",
        fix="correct the model, or give its inputs with the batch first",
    )


def _dtype_of(model: object) -> torch.dtype | None:
    """Of what a model's numbers are, so that inputs can be: NumPy's are float64 unless told otherwise."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
    return None
