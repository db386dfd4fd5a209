"""Stages by replay: each stage runs the module's own forward and skips the parts that ran before.

Most transformers cannot be traced, but are a stem, a list of blocks and an end. A stage runs forward on the same inputs again.
A part that finished before the start of the stage is not called: the part of the exit before gives what it returned then, and
the others give blank tensors. After the part of its own exit the stage ends. So code between the parts, such as that for masks
and positions, runs in every stage, and parts run once.

If a later stage reads the output of an earlier part by another way than the exit before it (a skip connection, rotary
embeddings), that output is carried along or, if its first dimension is not the batch, computed again. What a stage reads is
found by trying: with NaN in all blank tensors, and following what is computed from them (`blanks`), the stages must give what
the module gives, to the whole batch and to one of its rows, and for shorter and padded sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from anytime.checks import Inputs, map_inputs, tensors_of
from anytime.errors import ShapeError, StateError
from anytime.models.attach.blanks import Dependence
from anytime.models.attach.gates import Reached, Replay, add_gates
from anytime.models.attach.probe import call, first_tensor, is_close, logits_of
from anytime.models.attach.recorded import Key, Pattern, Recording, TensorPattern, parts_around, sequence_length, sizes_of
from anytime.models.attach.traced import UntraceableError
from anytime.models.base import Carry

_INPUT = ""  # no part has this name: (_INPUT, 0) stands for the first tensor of the inputs
_BLOCKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_FEW_TOKENS = 16

Example = tuple[Inputs, tuple[Tensor, ...]]
"""Inputs, with what each exit reads for them, and the logits."""


@dataclass
class ReplayedStages:
    """A module as functions of tensors, one per stage. A carry holds inputs, outputs of earlier parts, then that of the exit.

    Attributes:
        places: The calls that end the stages but the last.
        names: The names of a dict of inputs; empty for others.
        several: Whether the module takes a tuple.
        calls: The calls up to the last place in the order in which they finish, the tensors of the inputs first, with the
            patterns of their outputs.
        mask: The index of the attention mask among the inputs, which heads read.
        needed: The calls that a later stage reads by another way than the exit before it.
        trains: Whether the stages also give the module's results in train mode.
        overwrites: Whether forward overwrites what it is given, so that stages copy it.
        dependence: Follows what depends on blank tensors, while the stages are compared with the module.
    """

    places: tuple[Key, ...]
    names: tuple[str, ...]
    several: bool
    calls: dict[Key, Pattern | None]
    mask: int | None = None
    needed: frozenset[Key] = frozenset()
    trains: bool = False
    overwrites: bool = False
    dependence: Dependence | None = None

    @classmethod
    def found(cls, module: nn.Module, places: Sequence[Key], rows: Inputs, *, mask: int | None = None) -> Self:
        """Find what each stage must be given, by runs on `rows`.

        Args:
            module: The module, in eval mode. Gates are added to its parts.
            places: The calls of parts with exits.
            rows: At least one input.
            mask: The index of the attention mask among the inputs.

        Raises:
            UntraceableError: The stages would not give what the module gives.
        """
        if any(tensor.is_meta for tensor in tensors_of(rows)):
            raise UntraceableError("values on the meta device cannot be compared")
        add_gates(parts_around(module, places).values())
        three = map_inputs(lambda tensor: tensor[[0, -1, 0]], rows)
        few = _with_length(three, _FEW_TOKENS)  # long sequences take long, and are only checked
        try:
            for x, whole in ((few, rows), (three, None)):
                if x is not None and (shorter := _shorter(x)) is not None:
                    try:
                        return cls._made(module, places, mask, x, shorter, whole=whole)
                    except Exception:  # the stages may still work for the length of the example
                        pass
            return cls._made(module, places, mask, three)
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error

    @classmethod
    def _made(
        cls, module: nn.Module, places: Sequence[Key], mask: int | None, *examples: Inputs, whole: Inputs | None = None
    ) -> Self:
        two = map_inputs(lambda tensor: tensor[:2], examples[0])
        inputs = [*examples, two]
        recorded = [Recording.of(module, places, x) for x in inputs]
        if any(list(each.outputs) != list(recorded[0].outputs) for each in recorded):
            raise UntraceableError("other parts run for inputs of another size")
        runs = [sizes_of(x, length=len(examples) > 1) for x in inputs]
        tensors = zip(*(tensors_of(x) for x in inputs), strict=True)
        calls = {(_INPUT, index): Pattern.of(seen, runs) for index, seen in enumerate(tensors)}
        calls |= {key: Pattern.of([each.outputs[key] for each in recorded], runs) for key in recorded[0].outputs}
        names = tuple(two) if isinstance(two, Mapping) else ()
        stages = cls(tuple(places), names, isinstance(two, tuple), calls, mask)
        for place in places:
            pattern = calls[place]
            if pattern is None or not pattern.begins_with_rows:
                raise UntraceableError(f"{place[0]} returns tensors without the batch as their first dimension")
        known = [(x, each.expected) for x, each in zip(examples, recorded, strict=False)]
        more = [] if mask is None else [stages._padded(examples[0])]
        more += [] if whole is None else [whole]
        stages._search(module, [*known, *((x, Recording.of(module, places, x).expected) for x in more)])
        return stages

    def size(self, exit: int) -> int:
        """The number of tensors that a stage takes."""
        return len(self.free_sizes(exit))

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """For each tensor of a carry, the dimensions besides the batch that vary between inputs."""
        return tuple(tensor.free_sizes for key in self._layout(exit) for tensor in self._pattern(key).carried)

    def run(self, module: nn.Module, exit: int, carry: Carry) -> tuple[Carry, Any]:
        """Run a stage: the values for the next stage, and what the exit reads. The given tensors are not changed."""
        if not exit:
            self._check_shapes(carry)
        passed = self._unpacked(exit, carry)
        given = self._unpacked(exit, tuple(tensor.clone() for tensor in carry)) if self.overwrites else passed
        blank = self._blanks(given, carry[0])
        end = self.places[exit] if exit < len(self.places) else None
        wanted = [key for key in self._layout(exit + 1) if key not in passed] if end else []
        calls = {key: (id(module.get_submodule(key[0])), key[1]) for key in self.calls if key[0] != _INPUT}
        known = {calls[key]: output for key, output in self._known(exit, given, blank)}
        replay = Replay(known, {calls[key]: None for key in wanted}, calls[end] if end else None, self.overwrites)
        inputs = [tensor for key in self._layout(0) for tensor in given.get(key) or blank(key)]
        try:
            with replay.running():
                output = call(module, self._inputs(inputs))
        except Reached as reached:
            found = {key: self._tensors(key, replay.kept[calls[key]], carry[0].shape[0]) for key in wanted}
            left = tuple(tensor for key in self._layout(exit + 1) for tensor in (passed | found)[key])
            return left, first_tensor(reached.output)
        if end is not None:
            raise StateError(
                f"an input did not pass {end[0]!r}",
                expected="all exits for every input",
                fix="attach exits only where every input passes exactly once",
            )
        return (), output

    def mask_in(self, exit: int, carry: Carry) -> Tensor | None:
        """The attention mask in the carry of a stage."""
        return None if self.mask is None else carry[self._layout(exit).index((_INPUT, self.mask))]

    @torch.no_grad()
    def check_train_mode(self, module: nn.Module, rows: Inputs) -> None:
        """Set `trains`: whether the stages give the module's results in its current modes, those of training."""
        again = [key for key in self.calls if key in self.needed and not _has_rows(self.calls[key])]
        inner = [part for name, _ in again for part in module.get_submodule(name).modules()]
        try:
            if not any(isinstance(part, _DropoutNd | _NormBase) for part in inner):
                self._compare(module, (rows, Recording.of(module, self.places, rows).expected))
                self.trains = True
        except Exception:
            self.trains = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it holds names, no tensors

    def _layout(self, exit: int) -> list[Key]:
        """The calls whose outputs a carry holds, in order."""
        if not exit:
            return [key for key in self.calls if key[0] == _INPUT]
        end = self.places[exit - 1]
        return [*(key for key in self._before(end) if key in self.needed and _has_rows(self.calls[key])), end]

    def _before(self, end: Key) -> list[Key]:
        keys = list(self.calls)
        return keys[: keys.index(end)]

    def _pattern(self, key: Key) -> Pattern:
        pattern = self.calls[key]
        assert pattern is not None
        return pattern

    def _unpacked(self, exit: int, carry: Carry) -> dict[Key, Carry]:
        left = iter(carry)
        return {key: tuple(next(left) for _ in self._pattern(key).carried) for key in self._layout(exit)}

    def _tensors(self, key: Key, output: Any, rows: int) -> Carry:
        """The tensors of an output, each with all rows."""
        pattern = self._pattern(key)
        tensors = pattern.tensors_in(output)
        if tensors is None:
            raise StateError(
                f"{key[0]!r} returned another structure than for the example",
                expected="the same structure for every input",
                fix="attach the exits with method='thread'",
            )
        carried = (tensor for tensor, known in zip(tensors, pattern.tensors, strict=True) if known.has_rows)
        return tuple(tensor if tensor.shape[0] == rows else tensor.expand(rows, *tensor.shape[1:]) for tensor in carried)

    def _blanks(self, given: Mapping[Key, Carry], like: Tensor) -> Callable[[Key], Carry]:
        """Blank tensors for a call, which nobody should read; equal ones are made once.

        NaN shows where an input makes forward read one, unless there may be gradients, for which NaN times zero is NaN.
        """
        value = 0.0 if torch.is_grad_enabled() else torch.nan
        sizes = {"batch": like.shape[0]}
        dtypes: dict[torch.dtype, torch.dtype] = {}  # the module may have been converted since
        for key, tensors in given.items():
            for tensor, pattern in zip(tensors, self._pattern(key).carried, strict=True):
                sizes |= {name: tensor.shape[place] for place, name in pattern.free_sizes.items()}
                dtypes[pattern.dtype] = tensor.dtype
        made: dict[TensorPattern, Tensor] = {}

        def blank(key: Key) -> Carry:
            tensors = self._pattern(key).tensors
            for pattern in tensors:
                if pattern not in made:
                    made[pattern] = pattern.filled(value, sizes, like, dtypes.get(pattern.dtype, pattern.dtype))
            if self.dependence is not None:
                self.dependence.mark(made.values())
            return tuple(made[pattern] for pattern in tensors)

        return blank

    def _known(
        self, exit: int, given: Mapping[Key, Carry], blank: Callable[[Key], Carry]
    ) -> Iterator[tuple[Key, Callable[[], Any]]]:
        """What the calls return that finished before the stage."""
        for key in [*self._before(self.places[exit - 1]), self.places[exit - 1]] if exit else []:
            if key[0] == _INPUT:
                continue
            if key in given:
                yield key, partial(self._output, key, given[key], blank)
            elif key not in self.needed:
                yield key, lambda key=key: self._pattern(key).output(blank(key))  # type: ignore[misc]

    def _output(self, key: Key, carried: Carry, blank: Callable[[Key], Carry]) -> Any:
        """What a call returned, with blank tensors in place of those that are not carried."""
        pattern = self._pattern(key)
        if len(carried) == len(pattern.tensors):
            return pattern.output(carried)
        left = iter(carried)
        tensors = [next(left) if known.has_rows else other for known, other in zip(pattern.tensors, blank(key), strict=True)]
        return pattern.output(tensors)

    def _inputs(self, tensors: Sequence[Tensor]) -> Inputs:
        if self.names:
            return dict(zip(self.names, tensors, strict=True))
        return tuple(tensors) if self.several else tensors[0]

    def _check_shapes(self, inputs: Carry) -> None:
        """Without a free length, the stages hold for the shapes of the example only."""
        if any(self.free_sizes(0)):
            return
        shapes = [self._pattern(key).tensors[0].shape[1:] for key in self._layout(0)]
        if any(tensor.shape[1:] != shape for tensor, shape in zip(inputs, shapes, strict=True)):
            raise ShapeError(
                f"the inputs have shapes {', '.join(str(tuple(tensor.shape)) for tensor in inputs)}",
                expected=f"the example's shapes, {', '.join(map(str, shapes))} without the batch",
                fix="resize or pad the inputs, or attach the exits with an example of this shape",
            )

    def _search(self, module: nn.Module, examples: Sequence[Example]) -> None:
        """Find the calls that later stages need: as few as possible, and blocks at once, as they are many."""
        earlier = self._before(self.places[-1])
        least = frozenset(
            key
            for key in earlier
            if (pattern := self.calls[key]) is None or not pattern.can_be_blank or key == (_INPUT, self.mask)
        )
        blocks = frozenset(key for key in earlier if key not in least and self._is_block(module, key))
        reason: Exception | None = None

        def works(needed: frozenset[Key]) -> bool:
            nonlocal reason
            self.needed, reason = needed, None
            try:
                self._compare(module, examples[0], drop=True)
            except Exception as error:
                reason = error
            return reason is None

        def smallest() -> frozenset[Key]:
            if works(least):
                return least
            needed = frozenset(earlier)
            for group in (blocks, *(frozenset({key}) for key in earlier if key not in least)):
                if needed & group and works(needed - group):
                    needed -= group
            return needed

        for self.overwrites in (False, True):
            needed = smallest()
            if works(needed):
                break
        else:
            raise UntraceableError(f"replaying forward gives other results ({type(reason).__name__}: {reason})")
        for key in needed:
            if self._is_block(module, key) and not _has_rows(self.calls[key]):
                raise UntraceableError(f"later stages need {key[0]}, whose output does not have the batch first")
        for example in examples:
            self._compare(module, example)

    def _padded(self, x: Inputs) -> Inputs:
        """The same sequences, the first with a padding token."""
        assert self.mask is not None
        tensors = list(tensors_of(x))
        mask = tensors[self.mask] = tensors[self.mask].clone()
        mask[0, -1] = 0
        return self._inputs(tensors)

    def _is_block(self, module: nn.Module, key: Key) -> bool:
        return key in self.places or isinstance(module.get_submodule(key[0].rpartition(".")[0]), _BLOCKS)

    @torch.no_grad()
    def _compare(self, module: nn.Module, example: Example, *, drop: bool = False) -> None:
        """Check that the stages give what is expected; with `drop`, one row goes on after the first exit."""
        x, expected = example
        carry: Carry = tensors_of(x)
        for exit, wanted in enumerate(expected):
            versions = [tensor._version for tensor in carry]
            left, found = self._run_followed(module, exit, carry)
            if [tensor._version for tensor in carry] != versions:
                raise UntraceableError("forward overwrites what it is given")
            found = logits_of(found) if exit == len(self.places) else found
            if not is_close(found, wanted[-len(carry[0]) :]):
                raise UntraceableError(f"stage {exit + 1} gives another result than the module")
            carry = tuple(tensor[-1:] for tensor in left) if drop else left

    def _run_followed(self, module: nn.Module, exit: int, carry: Carry) -> tuple[Carry, Any]:
        """Run a stage, and check that nothing in its results is computed from a blank tensor."""
        self.dependence = Dependence()
        try:
            with self.dependence:
                left, found = self.run(module, exit, carry)
            logits = logits_of(found) if exit == len(self.places) else found
            self.dependence.check((*left, logits), f"stage {exit + 1}")
        finally:
            self.dependence = None
        return left, found


def _has_rows(pattern: Pattern | None) -> bool:
    return pattern is not None and pattern.has_rows


def _shorter(x: Inputs) -> Inputs | None:
    """The same sequences without their last token."""
    length = sequence_length(x)
    return None if length is None or length < 3 else _with_length(x, length - 1)


def _with_length(x: Inputs, wanted: int) -> Inputs | None:
    """The first tokens of the same sequences; None if they are not longer."""
    length = sequence_length(x)
    if length is None or length <= wanted:
        return None
    return map_inputs(lambda tensor: tensor[:, :wanted] if tensor.ndim > 1 and tensor.shape[1] == length else tensor, x)
