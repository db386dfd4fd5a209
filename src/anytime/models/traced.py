"""A module cut into stages by tracing (torch.fx): values that later stages need are carried along, nothing runs twice.

Only the modules around an exit are traced; all others are called as they are, hooks and all. What tracing cannot follow
rightly is refused with `UntraceableError`: branches on values, tensors made on the way, `no_grad` or autocast inside,
attributes that are set. Branches on `self.training` are followed, as there is a trace for each combination of modes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

_ROOT = "module"


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
        self.nodes = list(graph.nodes)
        self.stops: dict[fx.Node, list[fx.Node]] = {}
        for exit in range(len(places)):
            last, value = tracer.reached[exit]
            self.stops.setdefault(last, []).append(value)
        self.forget = self._last_uses()

    def run(self, module: nn.Module, x: Tensor) -> Iterator[Any]:
        """Yield what each exit reads and at last what the module gives; each step is run when it is needed, and once."""
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            if node.op == "output":
                yield fx.map_arg(node.args[0], values.__getitem__)
                return
            values[node] = _run(node, values, module, x)
            for reached in self.stops.get(node, ()):
                yield values[reached]
            for name in self.forget.get(node, ()):
                del values[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self  # it holds names, no tensors

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        last = {node: node for node in self.nodes}
        for node in self.nodes:
            for used in (*node.all_input_nodes, *self.stops.get(node, ())):
                last[used] = node
        forget: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            if user.op != "output":
                forget.setdefault(user, []).append(node)
        return forget


def traced_through(module: nn.Module, places: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that hold a place, `module` among them: those whose forward is traced."""
    wanted = {id(place) for place in places}
    return [part for part in module.modules() if any(id(inner) in wanted for inner in part.modules() if inner is not part)]


def _run(node: fx.Node, values: dict[fx.Node, Any], module: nn.Module, x: Tensor) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    match node.op:
        case "placeholder":
            return x
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
