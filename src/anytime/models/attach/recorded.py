"""What the parts of a module return in a run, and how its sizes follow from the batch size and the length of sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anytime.checks import Inputs, count_rows, tensors_of
from anytime.models.attach.probe import call, first_tensor, hooked, logits_of
from anytime.models.attach.traced import UntraceableError, traced_through, unchanged

Key = tuple[str, int]
"""A call of a part: its name, and how often it ran before."""
Sizes = Mapping[str, int]
"""The sizes of a run: of the batch, and of sequences if their length may vary."""

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class TensorPattern:
    """A tensor of a run.

    Attributes:
        shape: Each size as a number, or the name of the size that it equals; None if it varies in another way.
        dtype: Its dtype.
    """

    shape: tuple[int | str | None, ...]
    dtype: torch.dtype

    @property
    def has_rows(self) -> bool:
        """Whether the batch is its first dimension, or can be: a single row holds for all."""
        return bool(self.shape) and self.shape[0] in ("batch", 1) and "batch" not in self.shape[1:]

    @property
    def free_sizes(self) -> dict[int, str]:
        """The dimensions besides the batch that vary."""
        return {place: size for place, size in enumerate(self.shape) if isinstance(size, str) and size != "batch"}

    def filled(self, value: float, sizes: Sizes, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of this shape."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        return like.new_full(shape, value if dtype.is_floating_point else 0, dtype=dtype)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pattern:
    """The output of a call: tensors, in a structure with other values that are the same in every run.

    Attributes:
        structure: The output with a `TensorPattern` in place of each tensor.
        tensors: These, in order.
    """

    structure: Any
    tensors: tuple[TensorPattern, ...]

    @classmethod
    def of(cls, outputs: Sequence[Any], runs: Sequence[Sizes]) -> Self | None:
        """The pattern of outputs in runs of different sizes; None if there is none."""
        flat = [pytree.tree_flatten(output) for output in outputs]
        if any(layout != flat[0][1] for _, layout in flat):
            return None
        leaves: list[Any] = []
        for seen in zip(*(leaves for leaves, _ in flat), strict=True):
            if isinstance(seen[0], Tensor):
                leaves.append(_tensor_pattern(seen, runs))
            elif isinstance(seen[0], _PLAIN) and all(value == seen[0] for value in seen):
                leaves.append(seen[0])
            else:
                return None
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, TensorPattern))
        return cls(pytree.tree_unflatten(leaves, flat[0][1]), tensors)

    @property
    def is_predictable(self) -> bool:
        """Whether all sizes are known before the call."""
        return all(None not in tensor.shape for tensor in self.tensors)

    @property
    def has_rows(self) -> bool:
        """Whether its tensors can be carried along."""
        return self.is_predictable and all(tensor.has_rows for tensor in self.tensors)

    @property
    def begins_with_rows(self) -> bool:
        """Whether its first tensor can be carried along, and nobody should read the others, such as the state of an LSTM."""
        others = [tensor for tensor in self.tensors if not tensor.has_rows]
        floats = all(tensor.dtype.is_floating_point for tensor in others)
        return self.is_predictable and bool(self.tensors) and self.tensors[0].has_rows and floats

    @property
    def carried(self) -> tuple[TensorPattern, ...]:
        """The tensors that can be carried along."""
        return tuple(tensor for tensor in self.tensors if tensor.has_rows)

    @property
    def can_be_blank(self) -> bool:
        """Whether a tensor that nobody should read can take its place: NaN in it would be seen."""
        return self.is_predictable and any(tensor.dtype.is_floating_point for tensor in self.tensors)

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """The output with these tensors."""
        left = iter(tensors)
        return pytree.tree_map_only(TensorPattern, lambda _: next(left), self.structure)

    def tensors_in(self, output: Any) -> tuple[Tensor, ...] | None:
        """The tensors of an output; None if it has another structure."""
        leaves, layout = pytree.tree_flatten(output)
        found = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        same = layout == pytree.tree_structure(self.structure) and len(found) == len(self.tensors)
        return found if same else None


@dataclass(frozen=True)
class Recording:
    """A run of a module.

    Attributes:
        outputs: The outputs of the calls, in the order in which they finished.
        expected: What each exit reads, and the logits.
    """

    outputs: Mapping[Key, Any]
    expected: tuple[Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module, places: Sequence[Key], x: Inputs) -> Self:
        """Record the calls of the parts around and at the places, up to the last place."""
        parts = parts_around(module, places)
        counts: Counter[str] = Counter()
        outputs: dict[Key, Any] = {}
        reads: dict[Key, Tensor] = {}
        names = {id(part): name for name, part in parts.items()}
        through = traced_through(module, [module.get_submodule(name) for name, _ in places])

        def note(part: nn.Module, args: Any, output: Any) -> None:
            name = names[id(part)]
            key = name, counts[name]
            counts[name] += 1
            if len(reads) < len(places):
                outputs[key] = output
            if key in places:
                reads[key] = first_tensor(output).clone()

        with torch.no_grad(), unchanged(through), hooked(list(parts.values()), note):
            logits = logits_of(call(module, x))
        if len(reads) < len(places):
            raise UntraceableError("an exit was not reached")
        return cls(outputs, (*(reads[place] for place in places), logits))


def parts_around(module: nn.Module, places: Sequence[Key]) -> dict[str, nn.Module]:
    """The parts at the places and beside them: forward of a module that contains a place calls them."""
    ends = [module.get_submodule(name) for name, _ in places]
    through = traced_through(module, ends)
    names = {id(part): name for name, part in module.named_modules()}
    inner = [child for outer in through for child in outer.children()]
    stops = [part for part in inner if any(part is end for end in ends) or not any(part is outer for outer in through)]
    return {names[id(part)]: part for part in stops}


def _tensor_pattern(tensors: Sequence[Tensor], runs: Sequence[Sizes]) -> TensorPattern:
    shapes = [tensor.shape if tensor.ndim == tensors[0].ndim else torch.Size() for tensor in tensors]
    if any(len(shape) != tensors[0].ndim for shape in shapes):
        return TensorPattern((None,), tensors[0].dtype)
    return TensorPattern(tuple(_size(seen, runs) for seen in zip(*shapes, strict=True)), tensors[0].dtype)


def _size(seen: tuple[int, ...], runs: Sequence[Sizes]) -> int | str | None:
    if len(set(seen)) == 1:
        return seen[0]
    return next((name for name in runs[0] if all(run[name] == size for run, size in zip(runs, seen, strict=True))), None)


def sizes_of(x: Inputs, *, length: bool) -> Sizes:
    """The sizes of a run on `x`: of its batch, and the length of its sequences."""
    return {"batch": count_rows(x), **({"length": sequence_length(x) or 0} if length else {})}


def sequence_length(x: Inputs) -> int | None:
    """The length of the sequences, if some of the tensors hold tokens."""
    lengths = {tensor.shape[1] for tensor in tensors_of(x) if tensor.ndim == 2 and not tensor.is_floating_point()}
    return lengths.pop() if len(lengths) == 1 else None
