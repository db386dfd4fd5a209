"""Models that return the logits of all exits at once, as most published code does, made models with exits by `from_outputs`.

A module whose forward returns everything at once is run as a whole: its metrics are the same, but it cannot stop early. A
forward that yields stops early between its yields. A list of stages (`anytime.models.stage_list`) runs stage by stage, on any
engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from anytime.checks import Inputs, as_tensor, check_choice, check_count, count_rows, map_inputs
from anytime.errors import OptionError, ShapeError
from anytime.models.attach.probe import call, check_example, evaluating, named_logits
from anytime.models.base import ExitModel, MultiExit
from anytime.models.stage_list import Stage, StageList

_LIST = "a list with one tensor (batch, classes) per exit, or a tensor (exits, batch, classes)"


@dataclass(frozen=True)
class OutputReader:
    """Finds the logits of all exits in the output of a model.

    Args:
        exits_dim: The dimension of the exits in a stacked tensor: 0 for `(exits, batch, classes)`, 1 for
            `(batch, exits, classes)`. None is 0, and refuses a tensor where the two cannot be told apart.
        key: The key of a dict, or the name of an attribute, that holds the logits; `logits` by default.
        select: A function from the output to the logits, for anything else.
    """

    exits_dim: Literal[0, 1] | None = None
    key: str | None = None
    select: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        check_choice(self.exits_dim, "exits_dim", (None, 0, 1))
        if self.select is not None and not callable(self.select):
            raise OptionError(
                f"select is {self.select!r}", expected="a function of the output", fix="pass select=lambda output: output[0]"
            )
        if self.select is not None and self.key is not None:
            raise OptionError("both select and key", expected="one of them", fix="use the key inside of select")

    def read(self, output: Any, rows: int) -> list[Tensor]:
        """The logits of each exit, `(batch, classes)`, in the output for a batch of `rows` inputs."""
        found = self.select(output) if self.select is not None else self._named(output)
        if isinstance(found, Tensor | np.ndarray):
            found = as_tensor(found, "the model's output")
            return list(self._stacked(found, rows))
        if not isinstance(found, list | tuple):
            raise ShapeError(
                f"the model returns a {type(found).__name__}",
                expected=f"{_LIST}, or a dict or an object that has this as its logits",
                fix="pass select=, a function from the output to the list: from_outputs(model, select=lambda output: ...)",
            )
        return [self._exit(exit, logits, rows, fix=_how_to_select(found)) for exit, logits in enumerate(found, 1)]

    def next_of(self, yielded: Any, exit: int, rows: int) -> Tensor:
        """The logits that a generator yielded at an exit, counted from 1."""
        logits = self.select(yielded) if self.select is not None else self._named(yielded)
        return self._exit(
            exit,
            logits,
            rows,
            fix="select the logits in what is yielded: from_outputs(model, example=x, select=lambda yielded: yielded[0])",
        )

    def _named(self, output: Any) -> Any:
        name = self.key or "logits"
        if isinstance(output, Mapping):
            if name not in output:
                raise OptionError(
                    f"the model returns a dict with the keys {', '.join(map(str, output))}",
                    expected=f"one named {name!r} with the logits of all exits",
                    fix="pass its name: from_outputs(model, key='...'); for one key per exit, select="
                    f"lambda output: [output[{next(iter(output), None)!r}], ...]",
                )
            return output[name]
        if self.key is not None and not hasattr(output, name):
            raise OptionError(
                f"the model returns a {type(output).__name__} without {name!r}",
                expected=f"a dict or an object with {name!r}",
                fix="omit key, or pass select=lambda output: ...",
            )
        return getattr(output, name, output)

    def _stacked(self, logits: Tensor, rows: int) -> Tensor:
        fix = "from_outputs(model, exits_dim=1) for (batch, exits, classes), exits_dim=0 for (exits, batch, classes)"
        if logits.ndim != 3:
            raise ShapeError(
                f"the model returns a tensor of shape {tuple(logits.shape)} for {rows} inputs",
                expected=_LIST,
                fix="return the logits of all exits, or add exits to this model with anytime.attach_exits",
            )
        if self.exits_dim is None and logits.shape[0] == logits.shape[1]:
            raise ShapeError(
                f"the model returns shape {tuple(logits.shape)}: as many exits as inputs, so that either may come first",
                expected="a batch of another size, or the dimension of the exits",
                fix=fix,
            )
        if logits.shape[1 - (self.exits_dim or 0)] != rows:
            raise ShapeError(
                f"the model returns shape {tuple(logits.shape)} for {rows} inputs",
                expected="(batch, exits, classes)" if self.exits_dim else "(exits, batch, classes)",
                fix=fix,
            )
        return logits.transpose(0, 1) if self.exits_dim else logits

    def _exit(self, exit: int, logits: Any, rows: int, *, fix: str) -> Tensor:
        logits = named_logits(logits)
        if isinstance(logits, np.ndarray):
            logits = as_tensor(logits, f"exit {exit} of the model's output")
        if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == rows:
            return logits
        got = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ShapeError(
            f"exit {exit} of the model's output is {got} for {rows} inputs",
            expected=f"logits of shape ({rows}, classes) at every exit",
            fix=fix,
        )


def _how_to_select(output: Sequence[Any]) -> str:
    """The fix for a list that does not hold the logits of the exits."""
    lists = [place for place, part in enumerate(output) if isinstance(part, list | tuple)]
    how = f"output[{lists[0]}]" if lists else "output[0]"
    if lists and lists[0] > 0 and isinstance(output[0], Tensor):  # the last exit, and a list of those before
        how = f"[*output[{lists[0]}], output[0]]"
    return f"select the logits, first exit first: from_outputs(model, example=x, select=lambda output: {how})"


class OutputsModel(MultiExit):
    """A model with exits from a module or a function whose output has the logits of all exits.

    It is never `staged`. `stops_early` is true if forward is a generator, which runs to the requested exit only; otherwise the
    first exit costs as much as the last.

    Args:
        module: A module, or a function of the inputs.
        exits: The number of exits.
        reader: Finds the logits in the output.
    """

    def __init__(self, module: Callable[..., Any], exits: int, reader: OutputReader) -> None:
        super().__init__()
        self.module = module
        self.num_exits = exits
        self.reader = reader
        self.stops_early = inspect.isgeneratorfunction(module.forward if isinstance(module, nn.Module) else module)
        if isinstance(module, nn.Module):
            self.training = module.training

    def exits(self, x: Inputs) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; unless `stops_early`, all are computed before the first."""
        rows = count_rows(x)
        output = call(self.module, x)
        if not isinstance(output, Generator):
            found = self.reader.read(output, rows)
            self._check_count(len(found))
            yield from found
            return
        try:
            for exit in range(1, self.num_exits + 1):
                yielded = next(output, None)
                if yielded is None:
                    self._check_count(exit - 1)
                yield self.reader.next_of(yielded, exit, rows)
        finally:
            output.close()

    def extra_repr(self) -> str:
        """Whether it stops early."""
        when = "stops between yields" if self.stops_early else "computes all exits at once, cannot stop early"
        return f"{self.num_exits} exits, {when}"

    def _check_count(self, found: int) -> None:
        if found != self.num_exits:
            raise ShapeError(
                f"the model returned {found} exit{'s' * (found != 1)}",
                expected=f"{self.num_exits} for every input, as given or in the example",
                fix=f"pass exits={found} to from_outputs if this is right; if forward stops early by itself, switch that off",
            )


def from_outputs(
    source: Callable[..., Any] | Iterable[Stage],
    *,
    exits: int | None = None,
    example: Inputs | None = None,
    exits_dim: Literal[0, 1] | None = None,
    key: str | None = None,
    select: Callable[[Any], Any] | None = None,
) -> OutputsModel | StageList:
    """A model with exits from code that returns a list of logits.

    Three forms, by what they can do:

    - A module or a function that *returns* the logits of all exits: metrics, rules and a `Runner` work, but every answer costs
      all exits. `stops_early` is false.
    - A module whose forward *yields* the logits of each exit: it stops early. `stops_early` is true.
    - A *list of stages*: it stops early, rows that are done are dropped, and all engines and the export work. A stage is a
      module `features -> (features, logits)` or a pair of a body `features -> features` and a head `features -> logits`; the
      last may be a module `features -> logits`. Features are a tensor, or a list, tuple or dict of tensors.

    Args:
        source: One of these.
        exits: The number of exits; or pass an example. A list of stages needs neither, unless its features are several tensors.
        example: A batch; the model runs on it once, in eval mode.
        exits_dim: Where the exits are in a stacked tensor: 0 for `(exits, batch, classes)`, 1 for `(batch, exits, classes)`.
        key: The key of a dict, or the attribute of an object, that holds the logits; `logits` by default.
        select: A function from the output to the list of logits, for nested results.

    Example:
        >>> class Branchy(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        ...         self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        ...
        ...     def forward(self, x):
        ...         early = self.first(x).relu()
        ...         return [self.heads[0](early), self.heads[1](self.second(early).relu())]
        >>> net = Branchy()
        >>> model = from_outputs(net, example=torch.randn(2, 4))
        >>> model.num_exits, model.staged, model.stops_early
        (2, False, False)
        >>> stages = from_outputs([(nn.Sequential(net.first, nn.ReLU()), net.heads[0]),
        ...                        (nn.Sequential(net.second, nn.ReLU()), net.heads[1])])
        >>> x = torch.randn(5, 4)
        >>> stages.staged, torch.equal(stages(x), model(x))
        (True, True)
    """
    given = None if example is None else check_example(example)
    if exits is not None:
        check_count(exits, "exits", fix="pass the number of logits that the model returns, or an example")
    if isinstance(source, Sequence | Iterator | nn.ModuleList):
        if (exits_dim, key, select) != (None, None, None):
            raise OptionError(
                "exits_dim, key or select with a list of stages",
                expected="stages that return (features, logits)",
                fix="omit them, and wrap a stage that returns anything else",
            )
        return StageList(source if isinstance(source, nn.ModuleList) else list(source), exits=exits, example=given)
    if not callable(source):
        raise OptionError(
            f"the source is a {type(source).__name__}",
            expected="a module or function that returns the logits of all exits, or a list of stages",
            fix="pass the module itself: from_outputs(model, example=x)",
        )
    if isinstance(source, ExitModel):
        raise OptionError(
            f"the source is a {type(source).__name__}, which has exits",
            expected="a module that returns the logits of all exits at once",
            fix="use it as it is: wrapped, it could not stop early",
        )
    reader = OutputReader(exits_dim, key, select)
    if given is None and exits is None:
        raise OptionError(
            "neither exits nor an example", expected="the number of exits", fix="pass exits=5, or example=x to count them"
        )
    if given is None:
        return OutputsModel(source, exits or 0, reader)
    found = len(list(read_outputs(source, on_device_of(source, given), reader)))
    if found == 1 and exits is None:
        raise OptionError(
            "the model returned one exit for the example",
            expected="the logits of all exits, also in eval mode",
            fix="if forward stops early by itself, switch that off, e.g. by a threshold that is never reached; "
            "pass exits=1 if it has a single exit",
        )
    if exits not in (None, found):
        raise OptionError(f"exits is {exits}, the model returns {found}", expected=f"{found}", fix=f"pass exits={found}")
    model = OutputsModel(source, found, reader)
    model.input_names = tuple(given) if isinstance(given, Mapping) else ()
    return model


@torch.no_grad()
def read_outputs(source: Callable[..., Any], x: Inputs, reader: OutputReader) -> list[Tensor]:
    """The logits of all exits in the output of a module, in eval mode, or of a function."""
    with evaluating(source if isinstance(source, nn.Module) else nn.Module()):
        output = call(source, x)
        if isinstance(output, Generator):
            return [reader.next_of(yielded, exit, count_rows(x)) for exit, yielded in enumerate(output, 1)]
        return reader.read(output, count_rows(x))


def on_device_of(model: Any, x: Inputs) -> Inputs:
    """Inputs on the device of a model, floating-point ones in its type; of a function without parameters, as they are."""
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    like = next((tensor for tensor in held if tensor.is_floating_point()), next(iter(held), None))
    if like is None:
        return x
    kind = like.dtype if like.is_floating_point() else None
    return map_inputs(lambda tensor: tensor.to(like.device, kind if tensor.is_floating_point() else None), x)
