"""Rules on a GPU in one read of the logits, by Triton kernels, which CUDA builds of torch include."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytime.combine.prediction import Prediction, empty_prediction

if TYPE_CHECKING:
    from anytime.combine.rules import Product

MOST_CLASSES = 1 << 14
"""More do not fit into the registers of a program."""
_TILE, _INTERPRETED_TILE = 128, 1 << 14
"""Logits per program, if a row has fewer."""
_WARP = 512
"""Logits per warp. With more the numbers of a row do not fit into the registers."""


def is_available(device: torch.device) -> bool:
    """Whether kernels run on a device: on a GPU with Triton, or on the CPU in Triton's interpreter, which tests use."""
    return device.type == ("cpu" if is_interpreted() else "cuda") and _has_triton()


def tile(classes: int) -> dict[str, int]:
    """The rows and classes of a program, and its warps."""
    width = power_of_two(classes)
    rows = max(1, (_INTERPRETED_TILE if is_interpreted() else _TILE) // width)
    return {"rows": rows, "width": width, "num_warps": max(1, min(16, rows * width // _WARP))}


def power_of_two(number: int) -> int:
    """The smallest one that is not less, at least 2."""
    return max(2, 1 << (number - 1).bit_length())


def on_device(values: Tensor) -> AbstractContextManager[None]:
    """Inside, kernels are launched on the device of a tensor: a thread's own device may be another one."""
    return torch.cuda.device(values.device) if values.is_cuda else nullcontext()


def combine_product(product: Product, logits: Tensor) -> Prediction | None:
    """The prediction of `product` at every exit, or None if the kernel cannot compute it."""
    exits, count, classes = logits.shape
    traced = logits.requires_grad or torch.compiler.is_compiling()
    if traced or not count or not 2 <= classes <= MOST_CLASSES or not is_available(logits.device):
        return None
    from anytime.combine.encoded import encode
    from anytime.combine.fused import kernel

    real = "float64" if logits.dtype == torch.float64 else "float32"
    known = encode(product.combine, exits, classes, real)
    if known is None:
        return None
    values = logits if logits.stride(-1) == 1 else logits.contiguous()
    numbers, weights = (values.new_tensor(each) for each in (known.evidence, known.weights))
    answer = empty_prediction(exits, count, classes, like=values)
    sizes = tile(classes)
    with on_device(values):
        kernel.combine_product[(-(-count // sizes["rows"]),)](
            values,
            values.stride(0),
            values.stride(1),
            numbers,
            weights,
            answer.log_probs,
            answer.fell_back.view(torch.int8),
            answer.labels,
            count,
            exits,
            classes,
            activation=known.activation,
            num_stages=1,
            enable_fp_fusion=False,  # equal evidence must stay equal, as in torch's separate operations
            **sizes,
        )
    return answer


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
