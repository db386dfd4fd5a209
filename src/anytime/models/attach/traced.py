"""A module cut into stages by tracing (torch.fx): values that later stages need are carried along, nothing runs twice.

Only the modules around an exit are traced; all others are called as they are, hooks and all. What tracing cannot follow
rightly is refused with `UntraceableError`: branches on values, tensors made on the way, `no_grad` or autocast inside,
attributes that are set. Branches on `self.training` are followed, as there is a trace for each combination of modes.
A `Trace` runs as a generator that keeps its values; `Cuts` of it run one stage at a time from tensors alone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, fx, nn

from anytime.models.attach.probe import logits_of
from anytime.models.base import Carry

_ROOT = "module"
_PLAIN = (int, str, torch.dtype, torch.device, torch.layout, type(None))  # with bool and torch.Size

Kind = Literal["rows", "again", "neither"]
"""How a value crosses a cut: a tensor with the batch first is carried, others are worked out again, or cannot cross."""


class UntraceableError(Exception):
    """Tracing would not give what the module computes; the text says why."""


class Trace:
    """The steps of a module, and after which of them each exit's features are there.

    Args:
        module: What to trace, in the modes that it is in.
        places: The submodules at whose ends to stop, in the order in which they end.
    """

    def __init__(self, module: nn.Module, places: Sequence[nn.Module]) -> None:
        through = traced_through(module, places)
        tracer = _Tracer(places, through)
        wrapped = _OneInput(module)
        before = [dict(part.__dict__) for part in through]
        try:
            graph = tracer.trace(wrapped)
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
        finally:
            changed = _put_back(through, before)
        if changed:
            raise UntraceableError(f"forward sets {', '.join(changed)}")
        if sorted(tracer.reached) != list(range(len(places))):
            raise UntraceableError("some exits were not reached while tracing")
        self.input, *self.steps, self.output = graph.nodes
        self.reached = [tracer.reached[exit] for exit in range(len(places))]
        self.stops: dict[fx.Node, list[fx.Node]] = {}
        for last, value in self.reached:
            self.stops.setdefault(last, []).append(value)
        self.forget = _last_uses(self.steps, self.stops, kept=self.output.all_input_nodes)

    def run(self, module: nn.Module, x: Tensor) -> Iterator[Any]:
        """Yield what each exit reads and at last what the module gives; each step is run when it is needed, and once."""
        values: dict[fx.Node, Any] = {self.input: x}
        for node in _follow(self.steps, values, self.forget, module):
            for reached in self.stops.get(node, ()):
                yield values[reached]
        yield fx.map_arg(self.output.args[0], values.__getitem__)

    def does_as(self, other: Trace) -> bool:
        """Whether both do the same in the same order, but for constants such as whether dropout is on."""
        return self._outline() == other._outline()

    def _outline(self) -> list[Any]:
        number = {node: place for place, node in enumerate((self.input, *self.steps))}
        steps = [(node.op, node.target, [number[used] for used in node.all_input_nodes]) for node in self.steps]
        ends = [(number[last], number[value]) for last, value in self.reached]
        return [steps, ends, [number[used] for used in self.output.all_input_nodes]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self  # it holds names, no tensors


@dataclass(frozen=True)
class _Stage:
    """What lies between two cuts.

    Attributes:
        given: The values that are carried over the cut before.
        steps: What is run, first of all what is worked out again.
        reads: What the exit reads: a step, or what the module gives, made of steps.
        left: The values that are carried over the cut after it.
        forget: Which values are done with after each step.
        overwrites: For each of `given` whether a step writes over it.
    """

    given: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]
    reads: Any
    left: tuple[fx.Node, ...]
    forget: Mapping[fx.Node, list[fx.Node]]
    overwrites: tuple[bool, ...]

    def run(self, module: nn.Module, carry: Carry) -> tuple[Carry, Any]:
        values: dict[fx.Node, Any] = dict(zip(self.given, carry, strict=True))
        for _ in _follow(self.steps, values, self.forget, module):
            pass
        return tuple(values[node] for node in self.left), fx.map_arg(self.reads, values.__getitem__)


class Cuts:
    """A trace as functions of tensors, one a stage.

    Args:
        trace: What to cut at its exits.
        kinds: How each step's value crosses a cut.

    Raises:
        UntraceableError: A value that cannot cross a cut has to.
    """

    def __init__(self, trace: Trace, kinds: Sequence[Kind]) -> None:
        self.trace, self.kinds = trace, tuple(kinds)
        self.stages = self._cut()

    @classmethod
    @torch.no_grad()
    def found(cls, trace: Trace, module: nn.Module, rows: Tensor) -> Self:
        """Cut a trace after a run of three rows, and see in a run of one that the stages give the same.

        Args:
            trace: Of `module`, in the modes that it is in.
            module: What was traced.
            rows: At least one input.
        """
        kinds, wanted = _look(trace, module, rows[[0, -1, 0]])
        cuts = cls(trace, kinds)
        carry: Carry = (rows[:1].clone(),)
        for exit, stage in enumerate(cuts.stages):
            if any(tensor.shape[0] != 1 for tensor in carry):
                raise UntraceableError(f"a value needed after exit {exit} has not the batch first")
            before = [tensor._version for tensor in carry]
            left, given = stage.run(module, carry)
            overwrites = tuple(tensor._version != version for tensor, version in zip(carry, before, strict=True))
            if _share_memory(carry, overwrites):
                raise UntraceableError(f"values needed after exit {exit} share memory that is written over")
            cuts.stages[exit] = replace(stage, overwrites=overwrites)
            _compare(given, wanted[exit])
            carry = left
        return cuts

    def of(self, other: Trace) -> Self:
        """The same cuts in a trace for other modes; there any value may be written over."""
        if not self.trace.does_as(other):
            raise UntraceableError("in these modes the module does other things than in eval mode")
        return type(self)(other, self.kinds)

    def run(self, module: nn.Module, exit: int, carry: Carry) -> tuple[Carry, Any]:
        """Run a stage; gives what the next one needs, and what the exit reads. The given tensors stay as they are."""
        stage = self.stages[exit]
        kept = tuple(t.clone() if writes else t for t, writes in zip(carry, stage.overwrites, strict=True))
        return stage.run(module, kept)

    def _cut(self) -> list[_Stage]:
        """From the last stage to the first: what one is given, the one before has to leave."""
        trace = self.trace
        order = {node: place for place, node in enumerate((trace.input, *trace.steps))}
        ends = [0, *(order[last] for last, _ in trace.reached), len(trace.steps)]
        reads = [*(value for _, value in trace.reached), trace.output.args[0]]
        needed = [*([value] for _, value in trace.reached), trace.output.all_input_nodes]
        stages: list[_Stage] = []
        left: tuple[fx.Node, ...] = ()
        for exit in reversed(range(len(reads))):
            own = trace.steps[ends[exit] : ends[exit + 1]]
            given, again = self._go_back(own, {*left, *needed[exit]}, exit)
            steps = (*sorted(again, key=order.__getitem__), *own)
            carried = tuple(sorted(given, key=order.__getitem__)) if exit else (trace.input,)
            forget = _last_uses(steps, {}, kept={*left, *needed[exit]})
            stages.insert(0, _Stage(carried, steps, reads[exit], left, forget, (True,) * len(carried)))
            left = carried
        return stages

    def _go_back(self, own: list[fx.Node], results: set[fx.Node], exit: int) -> tuple[set[fx.Node], set[fx.Node]]:
        """What a stage with its own steps and results must be given, and what it must work out again."""
        kinds = dict(zip((self.trace.input, *self.trace.steps), self.kinds, strict=True))
        given, again, inside = set(), set(), set(own)
        open_ = [*results, *(used for node in own for used in node.all_input_nodes)]
        while open_:
            node = open_.pop()
            if node in inside or node in again:
                continue
            if kinds[node] == "neither":
                raise UntraceableError(f"{node.name} is needed after exit {exit} and is no tensor with the batch first")
            if kinds[node] == "rows":
                given.add(node)
            else:
                again.add(node)
                open_ += node.all_input_nodes
        return given, again


def _look(trace: Trace, module: nn.Module, rows: Tensor) -> tuple[list[Kind], list[Any]]:
    """How each value of a run can cross a cut, and what the exits read."""
    values: dict[fx.Node, Any] = {trace.input: rows}
    kinds: dict[fx.Node, Kind] = {trace.input: "rows"}
    from_input = {trace.input}
    reads = []
    for node in _follow(trace.steps, values, trace.forget, module):
        if from_input.intersection(node.all_input_nodes):
            from_input.add(node)
        if node in from_input and _has_rows(values[node], rows.shape[0]):
            kinds[node] = "rows"
        else:
            alike = all(kinds[used] == "again" for used in node.all_input_nodes)  # it comes from parameters and sizes alone
            kinds[node] = "again" if _is_pure(node) and (alike or _is_plain(values[node])) else "neither"
        reads += [values[reached].clone() for reached in trace.stops.get(node, ())]
    reads.append(fx.map_arg(trace.output.args[0], values.__getitem__))
    return list(kinds.values()), reads


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows


def _is_pure(node: fx.Node) -> bool:
    """Not a module, which may hold a state, nor a method that writes."""
    return node.op != "call_module" and not (node.op == "call_method" and str(node.target).endswith("_"))


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)


def _share_memory(carry: Carry, overwrites: Sequence[bool]) -> bool:
    """Whether a tensor that is written over lies where another one does."""
    memory = [tensor.untyped_storage()._cdata for tensor in carry]
    return any(writes and memory.count(own) > 1 for own, writes in zip(memory, overwrites, strict=True))


def _compare(given: Any, wanted: Any) -> None:
    one, several = logits_of(given), logits_of(wanted)
    if not one.is_meta and not torch.allclose(one, several[:1], rtol=1e-3, atol=1e-5, equal_nan=True):
        raise UntraceableError("the stages give something else for a row alone than the module for several")


def _follow(
    steps: Sequence[fx.Node], values: dict[fx.Node, Any], forget: Mapping[fx.Node, list[fx.Node]], module: nn.Module
) -> Iterator[fx.Node]:
    """Run one step after the other; yields each when its value is there, and forgets what it was the last to use."""
    for node in steps:
        values[node] = _run(node, values, module)
        yield node
        for done in forget.get(node, ()):
            del values[done]


def _last_uses(
    steps: Sequence[fx.Node], stops: Mapping[fx.Node, list[fx.Node]], *, kept: Collection[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """After each step: the values that it was the last to use, but for those that are kept."""
    last: dict[fx.Node, fx.Node] = {}
    for node in steps:
        for used in (node, *node.all_input_nodes, *stops.get(node, ())):
            last[used] = node
    forget: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        if node not in kept:
            forget.setdefault(user, []).append(node)
    return forget


def traced_through(module: nn.Module, places: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that hold a place, `module` among them: those whose forward is traced."""
    wanted = {id(place) for place in places}
    return [part for part in module.modules() if any(id(inner) in wanted for inner in part.modules() if inner is not part)]


def _run(node: fx.Node, values: dict[fx.Node, Any], module: nn.Module) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    match node.op:
        case "get_attr":
            return operator.attrgetter(_inside(target))(module)
        case "call_module":
            return module.get_submodule(_inside(target))(*args, **kwargs)
        case "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        case _:
            return target(*args, **kwargs)


def _inside(target: str) -> str:
    return target.removeprefix(_ROOT).removeprefix(".")


class _OneInput(nn.Module):
    """A module of one input and one output.

    Further arguments of its forward keep their defaults, which the tracer would replace, and only the logits come out.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, x: Any) -> Any:
        output = self.module(x)
        return output if isinstance(output, fx.Proxy) else getattr(output, "logits", output)


class _Tracer(fx.Tracer):
    """Traces what stands around the places and takes note of where they end."""

    proxy_buffer_attributes = True

    def __init__(self, places: Sequence[nn.Module], through: Sequence[nn.Module]) -> None:
        super().__init__()
        self.places = places
        self.through = {id(part) for part in through}
        self.reached: dict[int, tuple[fx.Node, fx.Node]] = {}
        self.surroundings = _surroundings()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self.through

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        for exit, place in enumerate(self.places):
            if m is place:
                if not isinstance(output, fx.Proxy) or exit in self.reached:
                    raise UntraceableError("an exit's module gives no tensor, or runs twice")
                self.reached[exit] = (next(iter(reversed(self.graph.nodes))), output.node)
        return output

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _surroundings() != self.surroundings:
            raise UntraceableError("forward switches gradients or autocast on or off")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not self._is_own(a):
            raise UntraceableError("forward makes a tensor of its own")
        return super().create_arg(a)

    def _is_own(self, tensor: Tensor) -> bool:
        own = (*self.root.parameters(), *self.root.buffers())
        return any(tensor is known for known in own)


def _surroundings() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _put_back(modules: Sequence[nn.Module], before: Sequence[dict[str, Any]]) -> list[str]:
    """Undo changes of plain attributes; gives their names."""
    changed = []
    for module, old in zip(modules, before, strict=True):
        now = module.__dict__
        names = [name for name in now.keys() | old.keys() if now.get(name) is not old.get(name)]
        changed += sorted(f"{type(module).__name__}.{name}" for name in names)
        for name in names:
            if name in old:
                now[name] = old[name]
            else:
                del now[name]
    return changed
