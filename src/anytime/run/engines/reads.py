"""Values that forward reads while it is traced for ONNX: the file would have the branch of the example for all inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS: tuple[Any, ...] = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.item, Tensor.tolist, Tensor.numpy)
_SIZES = ("aten::size", "prim::shape", "aten::dim", "aten::numel")
"""What these return stays dynamic in a trace, or was fixed by the example's shape, which is checked."""


class ValueReadError(Exception):
    """Forward reads a value that depends on its inputs."""


class RefuseReads(TorchFunctionMode):
    """Inside, tracing raises a `ValueReadError` where Python reads a value that depends on the inputs.

    Args:
        inputs: The number of input tensors; those after them in the graph are weights.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS and torch._C._get_tracing_state() and self._depends_on_inputs(args[0]):
            raise ValueReadError("what forward runs, or a constant in it, depends on values of the inputs")
        return func(*args, **(kwargs or {}))

    def _depends_on_inputs(self, tensor: Tensor) -> bool:
        """Whether a value in the graph of the trace is computed from an input, and not from sizes alone."""
        in_trace: Any = torch._C
        open_, seen = [in_trace._get_value_trace(tensor)], set()
        while open_:
            value = open_.pop()
            if value.unique() in seen:
                continue
            seen.add(value.unique())
            node = value.node()
            if node.kind() == "prim::Param":
                first = [output.unique() for output in node.outputs()][: self.inputs]
                if value.unique() in first:
                    return True
            elif node.kind() not in _SIZES:
                open_ += node.inputs()
        return False
