"""Stages by replay: each stage runs the module's own forward and skips what ran before.

Most transformers cannot be traced, but are a stem, a list of blocks and an end. A stage replays forward on the same inputs.
Parts that finished before its start are not computed: the block of the exit before returns what it returned then, and earlier
parts return something of the same shape, which forward passes on but nobody reads. After the block of its own exit the stage
ends. So masks and positions are computed anew from the inputs, which costs little, and blocks run once. Inputs that only the
stem reads, such as images, are not passed on.

Whether a module can be replayed is found by trying: the stages must give what the module gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anytime.checks import Inputs, map_inputs, tensors_of
from anytime.errors import ShapeError, StateError
from anytime.models.attach.probe import call, first_tensor, hooked, logits_of
from anytime.models.attach.traced import UntraceableError, traced_through, unchanged
from anytime.models.base import Carry

_this_thread = threading.local()


class _Reached(BaseException):
    """Ends a stage from inside forward; not an Exception, so that no module handles it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class Gate:
    """Takes the place of a part's `forward`: skips the part during a replay, and calls it otherwise.

    It is an attribute of the part, so a copy of the module has gates for its own parts.
    """

    def __init__(self, part: nn.Module) -> None:
        self.part, self.forward = part, part.__dict__.get("forward")

    def __call__(self, *args: Any, **named: Any) -> Any:
        replay: _Replay | None = getattr(_this_thread, "replay", None)
        if replay is not None and (answer := replay.skipped.get(id(self.part))) is not None:
            return answer()
        run = self.forward or type(self.part).forward.__get__(self.part)
        output = run(*args, **named)
        if replay is not None and self.part is replay.end:
            raise _Reached(output)
        return output


@dataclass(frozen=True)
class _Replay:
    """What the gates of this thread do: the parts that are skipped, by identity, and the part after which forward ends."""

    skipped: Mapping[int, Callable[[], Any]]
    end: nn.Module | None


@dataclass(frozen=True)
class _Unit:
    """A part that runs once, with its output for the example: the tensors, their shapes, and everything else.

    Attributes:
        name: Its name in the module.
        shapes: The shapes of the tensors in the output.
        layout: How the output is made of the tensors and of `others`.
        leaves: The output's values in order, with None for each tensor.
    """

    name: str
    shapes: tuple[torch.Size, ...]
    layout: Any
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, output: Any) -> Self:
        leaves, layout = pytree.tree_flatten(output)
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        return cls(name, shapes, layout, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), is_tensor)

    @property
    def has_sizes(self) -> bool:
        """Whether the output has values, such as sizes, that may depend on the shape of the input."""
        return any(leaf is not None for leaf in self.leaves)

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """The output with these tensors."""
        left = iter(tensors)
        leaves = [next(left) if given else leaf for given, leaf in zip(self.is_tensor, self.leaves, strict=True)]
        return pytree.tree_unflatten(leaves, self.layout)


@dataclass
class ReplayedStages:
    """A module as functions of tensors, one per stage. A carry holds the inputs, then the output of the exit before.

    Attributes:
        places: The names of the parts with exits, in order.
        names: The names of a dict of inputs; empty for others.
        several: Whether the module takes a tuple.
        inputs: The number of tensors of the input.
        units: The parts that run once before the last exit, in the order in which they finish.
        fixed: The shapes of the inputs without the batch if the stages hold for these only, else None.
        recomputed: The names of parts that run again in later stages.
        free: For each tensor of the input, the dimensions besides the batch that vary.
        read: For each tensor of the input, whether stages after the first read it.
        trains: Whether the stages also give the module's results in train mode.
        overwrites: Whether forward writes to its inputs or to the output of an exit in place, so that stages copy them.
    """

    places: tuple[str, ...]
    names: tuple[str, ...]
    several: bool
    inputs: int
    units: tuple[_Unit, ...]
    fixed: tuple[torch.Size, ...] | None = None
    recomputed: tuple[str, ...] = ()
    free: tuple[dict[int, str], ...] = ()
    read: tuple[bool, ...] = ()
    trains: bool = False
    overwrites: bool = False

    @classmethod
    @torch.no_grad()
    def found(cls, module: nn.Module, places: Sequence[str], rows: Inputs, expected: Sequence[Tensor]) -> Self:
        """Find what can be skipped by a run on `rows`, and check that the stages give what the module gives.

        Args:
            module: The module, in eval mode.
            places: The names of the parts with exits.
            rows: At least one input.
            expected: What each exit reads for `rows`, and the module's logits.

        Raises:
            UntraceableError: A stage does not give what the module gives.
        """
        units = _units(module, places, rows)
        given = tensors_of(rows)
        stages = cls(
            tuple(places),
            tuple(rows) if isinstance(rows, Mapping) else (),
            isinstance(rows, tuple),
            len(given),
            tuple(units),
            read=(True,) * len(given),
        )
        stages._gate(module)
        stages._check_places()
        try:
            stages._choose(module, rows, expected)
            stages._check_other_inputs(module, rows)
            stages._forget_inputs(module, rows, expected)
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
        return stages

    def size(self, exit: int) -> int:
        """The number of tensors that a stage takes."""
        return sum(self.read) + len(self._unit(self.places[exit - 1]).shapes) if exit else self.inputs

    def run(self, module: nn.Module, exit: int, carry: Carry) -> tuple[Carry, Any]:
        """Run a stage: the values for the next stage, and what the exit reads. The given tensors are not changed."""
        inputs, before = self._parts(exit, tuple(tensor.clone() for tensor in carry) if self.overwrites else carry)
        if self.fixed is not None and any(now.shape[1:] != then for now, then in zip(inputs, self.fixed, strict=True)):
            raise ShapeError(
                f"the inputs have shapes {', '.join(str(tuple(tensor.shape)) for tensor in inputs)}",
                expected=f"the example's shapes, {', '.join(str(tuple(shape)) for shape in self.fixed)} without the batch",
                fix="resize or pad the inputs, or attach the exits with an example of this shape",
            )
        end = module.get_submodule(self.places[exit]) if exit < len(self.places) else None
        outer = getattr(_this_thread, "replay", None)
        _this_thread.replay = _Replay(self._skipped(module, exit, inputs, before), end)
        try:
            output = call(module, self._inputs(inputs))
        except _Reached as reached:
            tensors = tuple(leaf for leaf in pytree.tree_leaves(reached.output) if isinstance(leaf, Tensor))
            kept = (tensor for tensor, read in zip(self._parts(exit, carry)[0], self.read, strict=True) if read)
            return (*kept, *tensors), first_tensor(reached.output)
        finally:
            _this_thread.replay = outer
        if end is not None:
            raise StateError(
                f"an input did not pass {self.places[exit]!r}",
                expected="all exits for every input",
                fix="attach exits only where every input passes exactly once",
            )
        return (), output

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it holds names, no tensors

    def _parts(self, exit: int, carry: Carry) -> tuple[Carry, Carry]:
        """The inputs, with zeros for those that were not passed on, and the output of the exit before."""
        if not exit:
            return carry, ()
        before, left = carry[sum(self.read) :], iter(carry)
        shapes = self.fixed or ((),) * self.inputs
        zero = before[0].new_zeros(())
        inputs = (
            next(left) if read else zero.expand(len(before[0]), *shape) for read, shape in zip(self.read, shapes, strict=True)
        )
        return tuple(inputs), before

    @torch.no_grad()
    def check_train_mode(self, module: nn.Module, rows: Inputs) -> None:
        """Set `trains`: whether the stages give the module's results in its current modes, those of training."""
        try:
            self._compare(module, rows, _outputs(module, [module.get_submodule(place) for place in self.places], rows))
            self.trains = True
        except Exception:
            self.trains = False

    def _forget_inputs(self, module: nn.Module, rows: Inputs, expected: Sequence[Tensor]) -> None:
        """Do not pass on floating-point inputs that no later stage reads: with NaN in their place nothing changes."""
        given = tensors_of(rows)
        if self.fixed is None:
            return
        for index, tensor in enumerate(given):
            if tensor.is_floating_point():
                spoilt = torch.full_like(tensor, torch.nan)
                carry, _ = self.run(module, 0, given)
                try:
                    for exit in range(1, len(expected)):
                        changed = (*carry[:index], spoilt, *carry[index + 1 :])
                        carry, found = self.run(module, exit, changed)
                        if not torch.allclose(logits_of(found), expected[exit], rtol=1e-3, atol=1e-5):
                            raise UntraceableError
                    self.read = (*self.read[:index], False, *self.read[index + 1 :])
                except Exception:
                    continue

    def _skipped(self, module: nn.Module, exit: int, inputs: Carry, before: Carry) -> dict[int, Callable[[], Any]]:
        """What the parts return that finished before the stage: the last one its output, the others any tensors."""
        if not exit:
            return {}
        last = self._unit(self.places[exit - 1])
        skipped: dict[int, Callable[[], Any]] = {id(module.get_submodule(last.name)): lambda: last.output(before)}
        for unit in self.units[: self.units.index(last)]:
            if unit.name not in self.recomputed:
                make = _stand_in(unit, last, before, len(inputs[0]))
                skipped[id(module.get_submodule(unit.name))] = make
        return skipped

    def _inputs(self, tensors: Carry) -> Inputs:
        if self.names:
            return dict(zip(self.names, tensors, strict=True))
        return tensors if self.several else tensors[0]

    def _unit(self, name: str) -> _Unit:
        return next(unit for unit in self.units if unit.name == name)

    def _gate(self, module: nn.Module) -> None:
        for unit in self.units:
            part = module.get_submodule(unit.name)
            if not isinstance(part.__dict__.get("forward"), Gate):
                part.__dict__["forward"] = Gate(part)

    def _check_places(self) -> None:
        for place in self.places:
            unit = self._unit(place)
            rows = {shape[0] if shape else None for shape in unit.shapes}
            if len(rows) != 1 or None in rows:
                raise UntraceableError(f"{place} returns tensors without the batch as their first dimension")

    def _choose(self, module: nn.Module, rows: Inputs, expected: Sequence[Tensor]) -> None:
        """Skip the blocks and the parts that return what they return or, if that gives other results, the blocks only."""
        alike = {
            unit.name
            for unit in self.units
            if all(unit.shapes == self._unit(place).shapes for place in self.places if self._before(unit, place))
        }
        others = [unit.name for unit in self.units if not self._is_block(module, unit.name)]
        attempts = (tuple(name for name in others if name not in alike), tuple(others))
        reason: Exception | None = None
        for recomputed in dict.fromkeys(attempts):
            self.recomputed = recomputed
            odd = [u for u in self.units if u.name not in recomputed and (u.has_sizes or u.name not in alike)]
            self.fixed = tuple(tensor.shape[1:] for tensor in tensors_of(rows)) if odd else None
            try:
                self._compare(module, rows, expected)
                self._compare(module, map_inputs(lambda tensor: tensor[:1], rows), [value[:1] for value in expected])
                return
            except Exception as error:
                reason = error
        raise UntraceableError(f"replaying forward gives other results ({type(reason).__name__}: {reason})")

    def _before(self, unit: _Unit, place: str) -> bool:
        return self.units.index(unit) <= self.units.index(self._unit(place))

    def _is_block(self, module: nn.Module, name: str) -> bool:
        outer = module.get_submodule(name.rpartition(".")[0])
        return name in self.places or isinstance(outer, nn.ModuleList | nn.Sequential)

    def _compare(self, module: nn.Module, rows: Inputs, expected: Sequence[Tensor]) -> None:
        carry: Carry = tuple(tensor.clone() for tensor in tensors_of(rows))
        for exit, wanted in enumerate(expected):
            kept = [tensor.clone() for tensor in carry]
            left, found = self.run(module, exit, carry)
            if not all(torch.equal(now, then) for now, then in zip(carry, kept, strict=True)):
                self.overwrites = True
                return self._compare(module, rows, expected)
            found = logits_of(found) if exit == len(self.places) else found
            if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise UntraceableError(f"stage {exit + 1} gives another result than the module")
            carry = left
        return None

    def _check_other_inputs(self, module: nn.Module, rows: Inputs) -> None:
        """Shorter sequences must work too; otherwise the stages hold for the shape of the example only."""
        given = tensors_of(rows)
        lengths = {tensor.shape[1] for tensor in given if tensor.ndim == 2 and not tensor.is_floating_point()}
        if self.fixed is not None or len(lengths) != 1 or (length := lengths.pop()) < 3:
            self.fixed = tuple(tensor.shape[1:] for tensor in given)
            return

        def crop(tensor: Tensor) -> Tensor:
            return tensor[:, : length - 1] if tensor.ndim > 1 and tensor.shape[1] == length else tensor

        shorter = map_inputs(crop, rows)
        try:
            outputs = _outputs(module, [module.get_submodule(place) for place in self.places], shorter)
            self._compare(module, shorter, outputs)
        except Exception:
            self.fixed = tuple(tensor.shape[1:] for tensor in given)
            return
        self.free = tuple({1: "length"} if crop(tensor).shape != tensor.shape else {} for tensor in given)

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """For each tensor of a carry, the dimensions besides the batch that vary between inputs."""
        inputs = self.free or tuple({} for _ in range(self.inputs))
        if not exit:
            return inputs
        varies: dict[int, str] = {1: "length"} if any(inputs) else {}
        kept = [sizes for sizes, read in zip(inputs, self.read, strict=True) if read]
        return (*kept, *(varies for _ in range(self.size(exit) - len(kept))))


def _units(module: nn.Module, places: Sequence[str], rows: Inputs) -> list[_Unit]:
    """The parts around and at the places that run once, up to the last place, in the order in which they finish."""
    parts = [module.get_submodule(place) for place in places]
    through = traced_through(module, parts)
    ends = {id(part) for part in parts}
    around = {id(part) for part in through}
    inner = [child for outer in through for child in outer.children() if id(child) in ends or id(child) not in around]
    names = {id(part): name for name, part in module.named_modules()}
    calls: list[tuple[nn.Module, Any]] = []
    with unchanged(through), hooked(inner, lambda part, args, output: calls.append((part, output))):
        call(module, rows)
    count: dict[int, int] = {}
    for part, _ in calls:
        count[id(part)] = count.get(id(part), 0) + 1
    if any(count.get(end) != 1 for end in ends):
        raise UntraceableError("a part with an exit does not run exactly once")
    last = max(index for index, (part, _) in enumerate(calls) if id(part) in ends)
    return [_Unit.of(names[id(part)], output) for part, output in calls[: last + 1] if count[id(part)] == 1]


def _outputs(module: nn.Module, parts: Sequence[nn.Module], rows: Inputs) -> list[Tensor]:
    """What the exits read, in the order of the parts, and the module's logits."""
    found: dict[int, Tensor] = {}
    with hooked(list(parts), lambda part, args, output: found.update({id(part): first_tensor(output).clone()})):
        logits = logits_of(call(module, rows))
    return [*(found[id(part)] for part in parts), logits]


def _stand_in(unit: _Unit, last: _Unit, before: Carry, rows: int) -> Callable[[], Any]:
    """Output of a skipped part that nobody reads: the tensors of the exit before where shapes agree, else zeros."""

    def tensors() -> Any:
        if unit.shapes == last.shapes:
            return unit.output(before)
        same = dict(zip(last.shapes, before, strict=True))
        return unit.output(
            [
                same[shape] if shape in same else before[0].new_zeros(()).expand((rows, *shape[1:]) if shape else shape)
                for shape in unit.shapes
            ]
        )

    return tensors
