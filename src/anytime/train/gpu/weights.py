"""The trained parameters of a network as one flat float32 tensor, and as what the network computes with.

An optimiser then is a handful of element-wise operations on flat tensors, whatever the number of parameters. Where
the network computes in bfloat16, its convolutions and linear layers read a bfloat16 copy that is refreshed from the
float32 master in one piece; batch norm reads the master itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from anytime.errors import OptionError

_ROUNDED = (nn.Conv1d, nn.Conv2d, nn.Linear)
# Elements between the beginnings of parameters: tensor cores read 16 bytes at a time, from aligned places.
_ALIGNMENT = 64


class FlatWeights:
    """Takes over the trainable parameters of `network`: they become views of flat tensors.

    Args:
        network: On its device; parameters that do not require a gradient stay where they are.
        rounded: The element type of convolutions and linear layers; float32 leaves them views of the master.
        channels_last: Whether filters lie in memory with their channels innermost.

    Attributes:
        master: All trained parameters, float32, flat.
        gradient: Of the same shape; filled by `collect`.
        parameters: What to differentiate with respect to, in the order of `collect`.
    """

    def __init__(self, network: nn.Module, *, rounded: torch.dtype = torch.float32, channels_last: bool = False) -> None:
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        if not named:
            raise OptionError(
                "no parameter requires a gradient", expected="something to train", fix="unfreeze a part of the network"
            )
        low = _rounded_parameters(network) if rounded != torch.float32 else set()
        for parameter in network.parameters():
            if not parameter.requires_grad and id(parameter) in low:
                parameter.data = parameter.data.to(rounded)
        named.sort(key=lambda pair: id(pair[1]) not in low)  # rounded ones first: one piece of the master
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._shapes = [p.shape for p in self.parameters]
        self._channels_last = channels_last
        self._low = sum(id(p) in low for p in self.parameters)
        self._starts, total = _places(self.parameters)
        self.master = torch.zeros(total, device=self.parameters[0].device)
        self.gradient = torch.zeros_like(self.master)
        self._gradients = self._pieces(self.gradient)
        torch._foreach_copy_(self._pieces(self.master), [self._flat(p.detach()) for p in self.parameters])
        self._copy = self.master[: self._starts[self._low]].to(rounded)
        views = self._pieces(self._copy)[: self._low] + self._pieces(self.master)[self._low :]
        for parameter, view, shape in zip(self.parameters, views, self._shapes, strict=True):
            parameter.data = self._shaped(view, shape)

    def collect(self, gradients: Iterable[Tensor]) -> None:
        """Write gradients, in the order of `parameters`, into `gradient`."""
        flat = [self._flat(gradient) for gradient in gradients]
        for part in (slice(None, self._low), slice(self._low, None)):
            if flat[part]:  # one list a type, else each tensor is copied by a launch of its own
                torch._foreach_copy_(self._gradients[part], flat[part])

    def refresh(self) -> None:
        """Bring the rounded copy up to date with the master."""
        if self._low:
            self._copy.copy_(self.master[: self._copy.numel()])

    def named(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """A flat tensor (the master by default) as views with the parameters' names and shapes."""
        pieces = self._pieces(self.master if flat is None else flat)
        return {name: self._shaped(p, shape) for name, p, shape in zip(self.names, pieces, self._shapes, strict=True)}

    def load(self, flat: Tensor, values: Mapping[str, Tensor]) -> None:
        """Fill a flat tensor from named values, the inverse of `named`."""
        for name, view in self.named(flat).items():
            view.copy_(values[name])

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + shape.numel()] for start, shape in zip(self._starts[:-1], self._shapes, strict=True)]

    def _flat(self, tensor: Tensor) -> Tensor:
        return (tensor.permute(0, 2, 3, 1) if self._channels_last and tensor.ndim == 4 else tensor).reshape(-1)

    def _shaped(self, flat: Tensor, shape: torch.Size) -> Tensor:
        if not (self._channels_last and len(shape) == 4):
            return flat.view(shape)
        count, depth, height, width = shape
        return flat.view(count, height, width, depth).permute(0, 3, 1, 2)


def _places(parameters: list[nn.Parameter]) -> tuple[list[int], int]:
    """Where each parameter begins in a flat tensor, and where they end."""
    starts = [0]
    for parameter in parameters:
        starts.append(starts[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
    return starts, starts[-1]


def _rounded_parameters(network: nn.Module) -> set[int]:
    return {id(p) for module in network.modules() if isinstance(module, _ROUNDED) for p in module.parameters(recurse=False)}
