"""One run of a module with hooks: the calls of its submodules in order, their outputs, and the FLOPs up to each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anytime.checks import LABELS, Inputs, check_inputs, tensors_of
from anytime.errors import AnytimeError, AttachWarning, InputError, OptionError, ShapeError

_SAME_COST = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
}
"""Operations that torch's registry of FLOPs lacks, with those of the same cost."""
_LSTM = torch.ops.aten.mkldnn_rnn_layer
"""The CPU's LSTM, one layer in one direction, which the registry lacks as well."""
_CHANNELS_FIRST = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d),
)
_CHANNELS_LAST = nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase
"""Layers that say which dimension of a sequence, `(batch, channels, length)` or `(batch, tokens, width)`, is which."""


class Place(NamedTuple):
    """Where an exit is: after a call of a submodule.

    Attributes:
        module: The submodule.
        call: How often it ran before in the same forward; 0 for most.
        calls: How often it runs in all; 1 for most.
    """

    module: nn.Module
    call: int = 0
    calls: int = 1


@dataclass(frozen=True)
class Visit:
    """One call of a submodule.

    Attributes:
        module: The submodule.
        output: Its output; of a tuple that starts with a tensor, that tensor.
        version: The version of the output at that time, which increases when it is overwritten in place.
        kept: A copy of the output, if requested.
        flops: FLOPs of the whole run up to the end of the call.
    """

    module: nn.Module
    output: Any
    version: int
    kept: Tensor | None
    flops: int

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the output, if it is a tensor."""
        return tuple(self.output.shape) if isinstance(self.output, Tensor) else None

    @property
    def output_then(self) -> Tensor:
        """The output as it was at the end of the call, if a copy was requested."""
        assert self.kept is not None
        return self.kept

    @property
    def overwritten(self) -> bool:
        """Whether a later layer changed the output in place."""
        return isinstance(self.output, Tensor) and self.output._version != self.version


@dataclass(frozen=True)
class Probe:
    """The calls of a run in the order in which they finished, the module's output, and the FLOPs of the run."""

    visits: tuple[Visit, ...]
    output: Any
    flops: int

    def of(self, module: nn.Module) -> list[Visit]:
        """The calls of one submodule."""
        return [visit for visit in self.visits if visit.module is module]

    def channels_first(self, visit: Visit) -> bool:
        """Whether the output of a call is `(batch, channels, length)`, by the last layer up to its end that shows it."""
        up_to = self.visits[: next(index for index, other in enumerate(self.visits) if other is visit) + 1]
        known = (each for each in reversed(up_to) if isinstance(each.module, _CHANNELS_FIRST + _CHANNELS_LAST))
        last = next(known, None)
        return last is not None and isinstance(last.module, _CHANNELS_FIRST) and last.shape == visit.shape

    def number(self, visit: Visit) -> int:
        """How often the submodule of a call ran before it."""
        return next(index for index, other in enumerate(self.of(visit.module)) if other is visit)


def probe(module: nn.Module, rows: Inputs, *, keep: tuple[nn.Module, ...] = ()) -> Probe:
    """Run `module` on `rows` in eval mode without changing it; the outputs of the submodules in `keep` are copied."""
    visits: list[Visit] = []

    def note(submodule: nn.Module, args: Any, output: Any) -> None:
        output = first_tensor(output)
        is_tensor = isinstance(output, Tensor)
        copy = output.clone() if is_tensor and any(submodule is wanted for wanted in keep) else None
        visits.append(Visit(submodule, output, output._version if is_tensor else 0, copy, spent.flops))

    inner = [submodule for submodule in module.modules() if submodule is not module]
    with evaluating(module), hooked(inner, note), torch.no_grad(), FlopCounter() as spent:
        output = logits_of(_try(module, rows))
    return Probe(tuple(visits), output, spent.flops)


@torch.no_grad()
def run_once(module: nn.Module, x: Inputs) -> None:
    """Run a module in eval mode without changing it."""
    with evaluating(module):
        call(module, x)


def logits_of(output: Any) -> Tensor:
    """The logits in the output of a module: the output itself, or its `logits`, as in Hugging Face's models."""
    logits = named_logits(output)
    if isinstance(logits, Tensor):
        return logits
    several = isinstance(logits, list | tuple) and len(logits) > 1 and all(isinstance(each, Tensor) for each in logits)
    exits = "; if these are the logits of its exits, use anytime.models.from_outputs(module, example=x)" if several else ""
    raise ShapeError(
        f"the module returns a {type(output).__name__}",
        expected="a tensor of logits, (batch, classes), or a dict or an object with such a tensor as `logits`",
        fix=f"wrap the module in one whose forward returns the logits{exits}",
    )


def named_logits(output: Any) -> Any:
    """What a dict or an object has as its logits; anything else as it is."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return getattr(output, "logits", output)


def call(module: Callable[..., Any], x: Inputs) -> Any:
    """Call a module or function: a tuple by position, a dict by name or, if it takes a single argument, as this.

    Language models are told to keep no cache.
    """
    named: dict[str, Any] = dict(x) if isinstance(x, Mapping) else {}
    given: tuple[Any, ...] = () if isinstance(x, Mapping) else tensors_of(x)
    forward = getattr(module, "forward", module)
    if hasattr(getattr(module, "config", None), "use_cache") and "use_cache" in inspect.signature(forward).parameters:
        named = {"use_cache": False, **named}
    elif len(named) > 1 and _takes_one(forward):
        given, named = (named,), {}
    try:
        return module(*given, **named)
    except TypeError as error:
        _check_arguments(forward, given, named, error)
        raise


def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether there is one parameter only: several tensors have to be in it."""
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    return kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _check_arguments(forward: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any], error: TypeError) -> None:
    """Raise a typed error if a call failed because the inputs are not those that a function has parameters for."""
    signature = inspect.signature(forward)
    try:
        signature.bind(*given, **named)
    except TypeError as reason:
        inputs = f"the inputs {', '.join(named)}" if named else f"{len(given)} tensor{'s' * (len(given) > 1)} of inputs"
        raise InputError(
            f"{inputs} for forward{signature}: {reason}",
            expected="a tensor for each argument: a tuple by position, or a dict by name",
            fix="pass what you call the module with; of a batch (x, y), x alone",
        ) from error


def _try(module: nn.Module, rows: Inputs) -> Any:
    """Call a module with an example that it may not take."""
    try:
        return call(module, rows)
    except AnytimeError:
        raise
    except Exception as error:
        kinds = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors_of(rows))
        raise InputError(
            f"the module fails on the example, which is {kinds}: {(str(error).strip().splitlines() or [''])[0]}",
            expected="an example that the module takes",
            fix="pass what you call the module with; images as floats, e.g. example.float() / 255; on the module's device",
        ) from error


def is_close(found: Any, expected: Tensor) -> bool:
    """Whether a tensor equals another within rounding; on the meta device, whether its shape does."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if found.is_meta or not found.is_floating_point():
        return found.is_meta or torch.equal(found, expected)
    found, wanted = found.double(), expected.double()
    rounding = 16 * torch.finfo(expected.dtype).eps ** 0.75  # 1e-4 in float32, 0.4 in bfloat16
    largest = wanted.abs().nan_to_num().amax().item() if wanted.numel() else 0.0
    return torch.allclose(found, wanted, rtol=0, atol=rounding * largest, equal_nan=True)


def first_tensor(output: Any) -> Any:
    """The features in the output of a submodule: of a tuple or list that starts with a tensor, that tensor."""
    return output[0] if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor) else output


def bare_module(module: Any) -> nn.Module:
    """The module inside of `DataParallel` or `torch.compile`; what is not a module of Python code is refused."""
    outer, module = module, inside(module)
    if module is not outer:
        warnings.warn(
            f"the exits are attached to the {type(module).__name__} inside of the {type(outer).__name__}, and run without "
            "that; compile or distribute the model with its exits instead",
            AttachWarning,
            stacklevel=5,  # the caller, outside of the decorators
        )
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise OptionError(
            f"module is a {type(module).__name__}",
            expected="a torch.nn.Module with its Python code",
            fix="pass the module that was scripted or traced; a script has no places for exits"
            if isinstance(module, nn.Module)
            else "pass a torch module",
        )
    if callable(getattr(module, "exits", None)) and hasattr(module, "num_exits"):
        raise OptionError(
            f"module is a {type(module).__name__}, which has {module.num_exits} exits",
            expected="a module without exits",
            fix="attach all exits at once, or to its `backbone`: several models with exits may share one",
        )
    return module


def inside(module: Any) -> Any:
    """The module inside of `DataParallel` or `torch.compile`; any other as it is."""
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(module, "module" if parallel else "_orig_mod", None) if isinstance(module, nn.Module) else None
    return inside(inner) if isinstance(inner, nn.Module) else module


def check_example(example: Any) -> Inputs:
    """Check that an example is a batch with at least one row; labels in a dict, as in the batches of a loader, are left out."""
    given = check_inputs(example, "example")
    if isinstance(given, Mapping):
        given = {name: tensor for name, tensor in given.items() if name not in LABELS} or given
    if isinstance(given, Tensor) and given.ndim < 2:
        raise ShapeError(
            f"the example has shape {tuple(given.shape)}",
            expected="a batch with at least one row",
            fix="add a batch dimension, e.g. example[None]",
        )
    return given


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs by torch's own registry. FlopCounterMode counts the same, but its first use takes seconds of imports.

    The fused kernels of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, which the registry lacks, are off inside.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton, where that is installed

        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self._known = 0, flop_registry

    def __enter__(self) -> Self:
        self._fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(self._fused)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._overloadpacket is _LSTM:
            steps, into, across = args[:3]
            self.flops += 2 * steps.shape[0] * steps.shape[1] * (into.numel() + across.numel())
        count = self._known.get(_SAME_COST.get(func._overloadpacket, func._overloadpacket))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside the context; afterwards every submodule has its own mode again."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    with suppress(NotImplementedError):  # the module of an exported program has a single mode
        module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def hooked(modules: list[nn.Module], hook: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call `hook` after every call of these modules inside the context."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
