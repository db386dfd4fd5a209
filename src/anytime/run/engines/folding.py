"""Fewer steps for the same function: batch norms are folded into the layers before them, and convolutions fused with ReLUs.

In eval mode a batch norm is a scale and a shift per channel, which the convolution or linear layer before it can do itself.
Layer order is recorded during a forward pass on an example, by tensor identity, so it does not depend on how a network is
written. Every change is checked: one that changes the logits is reverted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from anytime.checks import Inputs, map_inputs, tensors_of
from anytime.errors import OptionError
from anytime.models.base import Carry, StagedModel
from anytime.models.given import names_of
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.running import device_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TOLERANCE = 1e-4
"""How far logits may differ, relative to the largest logit of an exit."""

Change = Callable[[nn.Module], None]


class FoldedEngine(EagerEngine):
    """Runs a float32 copy of a staged model with folded batch norms and channels-last images; the model itself is unchanged.

    A model in half precision computes in float32 here: more exactly, within the rounding of its own type.

    Args:
        model: A staged torch module.
        example: Inputs to find and check the folding with.
    """

    name = "folded"
    TOLERANCE = TOLERANCE
    """How far its logits may differ from the model's, relative to the largest logit of an exit."""

    def __init__(self, model: StagedModel, example: Inputs) -> None:
        copy = folded_copy(model, example).to(device_of(model))
        if any(tensor.ndim == 4 for tensor in tensors_of(example)):
            copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert isinstance(copy, StagedModel)
        super().__init__(copy)

    def _prepared(self, x: Tensor) -> Tensor:
        moved = x.to(self.device, torch.float32) if x.is_floating_point() else x.to(self.device)
        return moved.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else moved


class ConvReLU(nn.Module):
    """A convolution and its ReLU, in one call where cuDNN has one."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        if convolution.bias is None:
            convolution.bias = nn.Parameter(convolution.weight.new_zeros(convolution.out_channels), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        own = self.convolution
        if x.is_cuda:
            assert not isinstance(own.padding, str)
            return torch.cudnn_convolution_relu(x, own.weight, own.bias, own.stride, own.padding, own.dilation, own.groups)
        return F.relu(own(x))


def folded_copy(model: StagedModel, example: Inputs, *, with_relu: bool = False) -> nn.Module:
    """A copy in eval mode, on the CPU, with batch norms folded into the layers before them where the logits stay the same.

    Args:
        model: A staged torch module; it is unchanged.
        example: Inputs to record and check with.
        with_relu: Whether to fuse convolutions with the ReLUs after them as well.
    """
    folded, example = eval_copy(model), map_inputs(on_cpu, example)
    _apply(folded, example, _folds(folded, example))
    if with_relu:
        _apply(folded, example, _fusions(folded, example))
    return folded


def eval_copy(model: StagedModel) -> nn.Module:
    """A copy in eval mode, on the CPU and in float32."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="a torch module whose stages can be run one by one",
            fix="use engine='eager', which runs any model with exits",
        )
    try:
        return deepcopy(model).eval().requires_grad_(False).cpu().float()
    except Exception as error:
        raise OptionError(
            f"a {type(model).__name__} cannot be copied: {error}",
            expected="a model that copy.deepcopy can copy",
            fix="use engine='eager', which runs the model itself",
        ) from error


def on_cpu(example: Tensor) -> Tensor:
    """Inputs for a model made by `eval_copy`."""
    wanted = torch.float32 if example.is_floating_point() else example.dtype
    if example.is_cpu and example.dtype == wanted and not example.requires_grad:
        return example  # the common case: each call on a tensor costs a request some microseconds
    return example.detach().to("cpu", wanted)


def difference(logits: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference between logits, or values of a carry, relative to the largest logit of an exit (at least 1)."""
    pairs = [(one.double(), other.double()) for one, other in zip(logits, wanted, strict=True)]  # a carry may hold booleans
    ratios = [(one - other).abs().max().item() / max(1.0, other.abs().max().item()) for one, other in pairs]
    return max(float("inf") if ratio != ratio else ratio for ratio in ratios)


@torch.no_grad()
def logits_of_stages(model: StagedModel, x: Inputs) -> list[Tensor]:
    """The logits of all exits, stage by stage."""
    carry: Carry = tensors_of(x, names_of(model))
    found = []
    for exit in range(model.num_exits):
        carry, logits = model.stage(exit, carry)
        found.append(logits)
    return found


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Set whether matrix products and convolutions on a GPU may use TF32, whatever torch is set to outside."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, allowed
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=allowed):
            yield
    finally:
        matmul.allow_tf32 = before


class _Call(NamedTuple):
    """One call of a layer. Versions show whether a tensor was overwritten in between."""

    name: str
    module: nn.Module
    given: Tensor
    given_version: int
    output: Tensor
    output_version: int


def _folds(model: nn.Module, example: Inputs) -> list[Change]:
    return [
        _replace(first.name, second.name, _fold)
        for first, second in _consecutive_calls(model, example)
        if isinstance(second.module, _NORMS)
        and second.module.running_mean is not None
        and (isinstance(first.module, _CONVOLUTIONS) or (isinstance(first.module, nn.Linear) and first.output.ndim == 2))
    ]


def _fusions(model: nn.Module, example: Inputs) -> list[Change]:
    return [
        _replace(first.name, second.name, lambda convolution, _: ConvReLU(convolution))
        for first, second in _consecutive_calls(model, example)
        if isinstance(second.module, nn.ReLU)
        and type(first.module) is nn.Conv2d
        and first.module.padding_mode == "zeros"
        and not isinstance(first.module.padding, str)
    ]


def _fold(layer: nn.Module, norm: nn.Module) -> nn.Module:
    fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    return fuse(layer, norm).requires_grad_(False)  # type: ignore[type-var, arg-type]


def _replace(layer: str, follower: str, join: Callable[[Any, Any], nn.Module]) -> Change:
    """Replace a layer by its union with the one that follows it, and that one by the identity."""

    def change(model: nn.Module) -> None:
        model.set_submodule(layer, join(model.get_submodule(layer), model.get_submodule(follower)).eval())
        model.set_submodule(follower, nn.Identity().eval())

    return change


def _apply(model: nn.Module, example: Inputs, changes: Sequence[Change]) -> None:
    """Make all changes; if that changes the logits, one by one, without those that do."""
    assert isinstance(model, StagedModel)
    wanted = logits_of_stages(model, example)

    def keeps_logits(changes: Sequence[Change]) -> bool:
        before = dict(model.named_modules())
        for change in changes:
            change(model)
        if difference(logits_of_stages(model, example), wanted) <= TOLERANCE:
            return True
        for name, module in before.items():
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        return False

    if not keeps_logits(changes):
        for change in changes:
            keeps_logits([change])


def _consecutive_calls(model: nn.Module, example: Inputs) -> Iterator[tuple[_Call, _Call]]:
    """Pairs of calls in which the second takes exactly the output of the first."""
    makers: dict[int, _Call] = {}
    for second in _calls(model, example):
        first = makers.get(id(second.given))
        if first is not None and first.output_version == second.given_version:
            yield first, second
        makers[id(second.output)] = second


@torch.inference_mode(False)  # whose tensors do not say whether they were changed
@torch.no_grad()
def _calls(model: nn.Module, example: Inputs) -> list[_Call]:
    """The calls of layers in a forward pass, in order, except for layers that are called twice.

    They keep their tensors alive, so that no two of these have the same id.
    """
    calls: list[_Call] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (*_CONVOLUTIONS, *_NORMS, nn.Linear, nn.ReLU, ConvReLU)):
            versions: list[int] = []
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, named, seen=versions: seen.append(_first(args, named)._version), with_kwargs=True
                )
            )
            handles.append(
                module.register_forward_hook(
                    lambda module, args, named, output, name=name, seen=versions: calls.append(
                        _Call(name, module, _first(args, named), seen.pop(), output, output._version)
                    ),
                    with_kwargs=True,
                )
            )
    try:
        assert isinstance(model, StagedModel)
        logits_of_stages(model, map_inputs(torch.clone, example))
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(call.name for call in calls)
    return [call for call in calls if times[call.name] == 1]


def _first(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The input of a layer, by position or by name."""
    found: Tensor = (*args, *named.values())[0]
    return found
