"""One watched run of a module: which submodules run, in which order, what they give, and how much was spent by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from anytime.errors import ShapeError


@dataclass(frozen=True)
class Visit:
    """The end of one call of a submodule.

    Attributes:
        module: Which one.
        output: What it gave.
        version: Of the output at that time; a higher one later means that it was overwritten in place.
        kept: A copy of the output, if it was asked for.
        flops: Spent by the whole run up to here.
    """

    module: nn.Module
    output: Any
    version: int
    kept: Tensor | None
    flops: int

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the output, batch and all, if it is a tensor."""
        return tuple(self.output.shape) if isinstance(self.output, Tensor) else None

    @property
    def overwritten(self) -> bool:
        """Whether a later layer changed the output in place."""
        return isinstance(self.output, Tensor) and self.output._version != self.version


@dataclass(frozen=True)
class Probe:
    """All visits of a run in the order of their ends, the module's output, and the FLOPs of the whole."""

    visits: tuple[Visit, ...]
    output: Any
    flops: int

    def of(self, module: nn.Module) -> list[Visit]:
        """The visits of one submodule."""
        return [visit for visit in self.visits if visit.module is module]


def probe(module: nn.Module, rows: Tensor, *, keep: tuple[nn.Module, ...] = ()) -> Probe:
    """Run `module` on `rows` in eval mode, and leave it as it was.

    Args:
        module: Any module.
        rows: A small batch.
        keep: Submodules whose outputs are copied.
    """
    visits: list[Visit] = []

    def note(submodule: nn.Module, args: Any, output: Any) -> None:
        is_tensor = isinstance(output, Tensor)
        copy = output.clone() if is_tensor and any(submodule is wanted for wanted in keep) else None
        visits.append(Visit(submodule, output, output._version if is_tensor else 0, copy, spent.flops))

    inner = [submodule for submodule in module.modules() if submodule is not module]
    with evaluating(module), hooked(inner, note), torch.no_grad(), _Spent() as spent:
        output = logits_of(module(rows))
    return Probe(tuple(visits), output, spent.flops)


def logits_of(output: Any) -> Tensor:
    """The logits in what a module gave: itself if it is a tensor, or its `logits`, as Hugging Face's models have it."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    raise ShapeError(
        f"the module gives a {type(output).__name__}",
        expected="a tensor of logits, (batch, classes), or an object with one as its `logits`",
        fix="wrap the module in one whose forward returns the logits",
    )


class _Spent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up FLOPs by torch's own registry. Its FlopCounterMode gives the same, and imports for seconds when first used."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for the time being; afterwards every submodule has its own mode back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def hooked(modules: list[nn.Module], hook: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call `hook` at the end of every call of these modules, for the time being."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
