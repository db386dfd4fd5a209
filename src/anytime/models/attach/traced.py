"""A module split into stages by tracing (torch.fx): values that later stages need are carried along, nothing runs twice.

Only the modules around an exit are traced; all others are called as they are, with their hooks. What tracing cannot follow
correctly is refused with `UntraceableError`: branches on values, tensors created in forward, `no_grad` or autocast inside,
attributes that forward sets. Branches on `self.training` are followed: there is one trace per combination of modes.
"""

from __future__ import annotations

import operator
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, fx, nn

from anytime.models.attach.probe import Place, is_close, logits_of, named_logits
from anytime.models.base import Carry

_ROOT = "module"
_PLAIN = (int, str, torch.dtype, torch.device, torch.layout, type(None))  # with bool and torch.Size

Kind = Literal["rows", "recompute", "neither"]
"""How a value reaches a later stage: a tensor with the batch first is carried, others are recomputed, or neither works."""


class UntraceableError(Exception):
    """Tracing would not give what the module computes, or it cannot be split; the text says why."""


class Trace:
    """The operations of a module, and for each exit the last operation and the value that it reads.

    Args:
        module: The module, traced in its current modes.
        places: The places of the exits, in the order in which they finish.
    """

    def __init__(self, module: nn.Module, places: Sequence[Place]) -> None:
        through = traced_through(module, [place.module for place in places])
        tracer = _Tracer(places, through)
        with unchanged(through):
            try:
                graph = tracer.trace(_OneInput(module))
            except Exception as error:
                raise UntraceableError(f"{where(error)}{type(error).__name__}: {error}") from error
        if sorted(tracer.reached) != list(range(len(places))):
            raise UntraceableError("some exits were not reached while tracing")
        self.input, *self.steps, self.output = graph.nodes
        self.reached = [tracer.reached[exit] for exit in range(len(places))]

    def outline(self) -> list[Any]:
        """The operations and their order, without constants such as whether dropout is on."""
        number = {node: place for place, node in enumerate((self.input, *self.steps))}
        steps = [(node.op, node.target, [number[used] for used in node.all_input_nodes]) for node in self.steps]
        ends = [(number[last], number[value]) for last, value in self.reached]
        return [steps, ends, [number[used] for used in self.output.all_input_nodes]]


@dataclass(frozen=True)
class _Stage:
    """The operations between two exits.

    Attributes:
        given: The values that the previous stage passes on.
        steps: The operations, starting with those that are recomputed.
        reads: The value that the exit reads, or the output of the module.
        left: The values for the next stage.
        forget: For each step the values that no later step needs.
        overwrites: For each of `given`, whether a step writes to it in place.
    """

    given: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]
    reads: Any
    left: tuple[fx.Node, ...]
    forget: Mapping[fx.Node, list[fx.Node]]
    overwrites: tuple[bool, ...]

    def run(self, module: nn.Module, carry: Carry) -> tuple[Carry, Any]:
        values: dict[fx.Node, Any] = dict(zip(self.given, carry, strict=True))
        for node in self.steps:
            values[node] = _run(node, values, module)
            for done in self.forget.get(node, ()):
                del values[done]
        return tuple(values[node] for node in self.left), fx.map_arg(self.reads, values.__getitem__)


class TracedStages:
    """A trace as functions of tensors, one per stage.

    Args:
        trace: The trace, which is split at its exits.
        kinds: How the value of each operation reaches later stages.

    Raises:
        UntraceableError: A later stage needs a value that can neither be carried nor recomputed.
    """

    def __init__(self, trace: Trace, kinds: Sequence[Kind]) -> None:
        self.trace, self.kinds = trace, tuple(kinds)
        self.stages = self._split()

    @classmethod
    @torch.no_grad()
    def found(cls, trace: Trace, module: nn.Module, rows: Tensor, expected: Sequence[Tensor]) -> Self:
        """Split a trace after a run on three rows, and check on one row that the stages give what the module gives.

        Args:
            trace: The trace of `module` in its current modes.
            module: The module.
            rows: At least one input.
            expected: What each exit reads for `rows`, and the module's logits.
        """
        try:
            stages = cls(trace, _kinds(trace, module, rows[[0, -1, 0]]))
            carry: Carry = (rows[:1].clone(),)
            for exit, stage in enumerate(stages.stages):
                if any(tensor.shape[0] != 1 for tensor in carry):
                    raise UntraceableError(f"a value needed after exit {exit} does not have the batch first")
                before = [tensor._version for tensor in carry]
                left, found = stage.run(module, carry)
                overwrites = tuple(tensor._version != version for tensor, version in zip(carry, before, strict=True))
                if _share_memory(carry, overwrites):
                    raise UntraceableError(f"values needed after exit {exit} share memory that is overwritten")
                stages.stages[exit] = replace(stage, overwrites=overwrites)
                _compare(found, expected[exit])
                carry = left
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
        return stages

    def size(self, exit: int) -> int:
        """The number of tensors that a stage takes."""
        return len(self.stages[exit].given)

    def of(self, other: Trace) -> Self:
        """The same split of a trace in other modes, where any value might be overwritten."""
        if self.trace.outline() != other.outline():
            raise UntraceableError("in these modes the module runs other operations than in eval mode")
        return type(self)(other, self.kinds)

    def run(self, module: nn.Module, exit: int, carry: Carry) -> tuple[Carry, Any]:
        """Run a stage: the values for the next stage, and what the exit reads. The given tensors are not changed."""
        stage = self.stages[exit]
        return stage.run(module, tuple(t.clone() if writes else t for t, writes in zip(carry, stage.overwrites, strict=True)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it holds names, no tensors

    def _split(self) -> list[_Stage]:
        """From the last stage to the first: the previous stage must leave what a stage is given."""
        trace = self.trace
        order = {node: place for place, node in enumerate((trace.input, *trace.steps))}
        ends = [0, *(order[last] for last, _ in trace.reached), len(trace.steps)]
        reads = [*(value for _, value in trace.reached), trace.output.args[0]]
        stages: list[_Stage] = []
        left: tuple[fx.Node, ...] = ()
        for exit in reversed(range(len(reads))):
            own = trace.steps[ends[exit] : ends[exit + 1]]
            results = {*left, *_nodes(reads[exit])}
            given, recomputed = self._needs(own, results, exit)
            steps = (*sorted(recomputed, key=order.__getitem__), *own)
            carried = tuple(sorted(given, key=order.__getitem__)) if exit else (trace.input,)
            forget = _last_uses(steps, kept=results)
            stages.insert(0, _Stage(carried, steps, reads[exit], left, forget, (True,) * len(carried)))
            left = carried
        return stages

    def _needs(self, own: list[fx.Node], results: set[fx.Node], exit: int) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that a stage must be given, and those that it must recompute."""
        kinds = dict(zip((self.trace.input, *self.trace.steps), self.kinds, strict=True))
        given, recomputed, inside = set(), set(), set(own)
        open_ = [*results, *(used for node in own for used in node.all_input_nodes)]
        while open_:
            node = open_.pop()
            if node in inside or node in recomputed:
                continue
            if kinds[node] == "neither":
                raise UntraceableError(f"{node.name}, needed after exit {exit}, is not a tensor with the batch first")
            if kinds[node] == "rows":
                given.add(node)
            else:
                recomputed.add(node)
                open_ += node.all_input_nodes
        return given, recomputed


def traced_through(module: nn.Module, places: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules whose forward is traced: those that contain a place, including `module`."""
    wanted = {id(place) for place in places}
    return [part for part in module.modules() if any(id(inner) in wanted for inner in part.modules() if inner is not part)]


def _kinds(trace: Trace, module: nn.Module, rows: Tensor) -> list[Kind]:
    """How each value can reach a later stage, from a run on `rows`."""
    values: dict[fx.Node, Any] = {trace.input: rows}
    kinds: dict[fx.Node, Kind] = {trace.input: "rows"}
    from_input = {trace.input}
    for node in trace.steps:
        value = values[node] = _run(node, values, module)
        if from_input.intersection(node.all_input_nodes):
            from_input.add(node)
        if node in from_input and isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == len(rows):
            kinds[node] = "rows"
        else:
            constant = all(kinds[used] == "recompute" for used in node.all_input_nodes)  # from parameters and sizes only
            kinds[node] = "recompute" if _is_pure(node) and (constant or _is_plain(value)) else "neither"
    return list(kinds.values())


def _is_pure(node: fx.Node) -> bool:
    """Not a module, which may have a state, nor an in-place method."""
    return node.op != "call_module" and not (node.op == "call_method" and str(node.target).endswith("_"))


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)


def _share_memory(carry: Carry, overwrites: Sequence[bool]) -> bool:
    """Whether a tensor that is overwritten shares its memory with another."""
    memory = [tensor.untyped_storage()._cdata for tensor in carry]
    return any(writes and memory.count(own) > 1 for own, writes in zip(memory, overwrites, strict=True))


def _compare(found: Any, expected: Tensor) -> None:
    if not is_close(logits_of(found), expected[:1]):
        raise UntraceableError("the stages give another result for a single row than the module for several")


def _last_uses(steps: Sequence[fx.Node], *, kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each step the values that it is the last to use."""
    last = {used: node for node in steps for used in (node, *node.all_input_nodes)}
    forget: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        if used not in kept:
            forget.setdefault(node, []).append(used)
    return forget


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, lambda node: found.append(node))
    return found


def _run(node: fx.Node, values: Mapping[fx.Node, Any], module: nn.Module) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    inside = str(target).removeprefix(_ROOT).removeprefix(".")
    match node.op:
        case "get_attr":
            return operator.attrgetter(inside)(module)
        case "call_module":
            return module.get_submodule(inside)(*args, **kwargs)
        case "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        case _:
            return target(*args, **kwargs)


class _OneInput(nn.Module):
    """A module with one input, which keeps the defaults of its other arguments, and one output, the logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, x: Any) -> Any:
        output = self.module(x)
        return output if isinstance(output, fx.Proxy) else named_logits(output)


class _Tracer(fx.Tracer):
    """Traces the modules around the places and records where these finish."""

    proxy_buffer_attributes = True

    def __init__(self, places: Sequence[Place], through: Sequence[nn.Module]) -> None:
        super().__init__()
        self.places = places
        self.calls: Counter[int] = Counter()
        self.through = {id(part) for part in through}
        self.reached: dict[int, tuple[fx.Node, fx.Node]] = {}
        self.contexts = _contexts()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self.through

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        number = self.calls[id(m)]
        self.calls[id(m)] += 1
        for exit, place in enumerate(self.places):
            if m is place.module and (number == place.call or number >= place.calls):
                if not isinstance(output, fx.Proxy) or exit in self.reached:
                    raise UntraceableError("the module of an exit does not return a tensor, or runs more often")
                self.reached[exit] = (next(iter(reversed(self.graph.nodes))), output.node)
        return output

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self.contexts:
            raise UntraceableError("forward switches gradients or autocast on or off")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not any(a is own for own in (*self.root.parameters(), *self.root.buffers())):
            raise UntraceableError("forward creates a tensor")
        return super().create_arg(a)


def _contexts() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@contextmanager
def unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Undo changes of plain attributes inside; a forward that makes some has a state, and is refused."""
    before = [dict(part.__dict__) for part in modules]
    try:
        yield
    finally:
        changed = _restore(modules, before)
    if changed:
        raise UntraceableError(f"forward sets {', '.join(changed)}")


def where(error: Exception) -> str:
    """The line of a module's own code at which tracing stopped, with a colon; empty if there is none."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: `{frames[-1].line}`: " if frames else ""


def _restore(modules: Sequence[nn.Module], before: Sequence[dict[str, Any]]) -> list[str]:
    """Undo changes of plain attributes; returns their names."""
    changed = []
    for module, old in zip(modules, before, strict=True):
        now = module.__dict__
        names = [name for name in now.keys() | old.keys() if now.get(name) is not old.get(name)]
        changed += sorted(f"{type(module).__name__}.{name}" for name in names)
        for name in names:
            now.pop(name, None)
        now.update({name: old[name] for name in names if name in old})
    return changed
