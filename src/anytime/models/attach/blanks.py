"""Which tensors depend on a blank one, that is, on a value that a stage was not given.

NaN in a blank tensor is lost where it is compared: `x.mean() > 0` is then false, as it may be for the example by chance. So
while stages are searched for, dependence is also followed from operation to operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from anytime.models.attach.traced import UntraceableError

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero)
_SHAPES_ONLY = (
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
)
"""Operations that read the shape and the type of a tensor, and no values."""


class Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, follows what is computed from blank tensors; Python may not read such a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blank: Any = WeakIdKeyDictionary()

    def mark(self, tensors: Iterable[Any]) -> None:
        """These tensors are blank, or depend on a blank one."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._blank[tensor] = True

    def check(self, tensors: Iterable[Any], what: str) -> None:
        """Refuse tensors that depend on a blank one."""
        if any(isinstance(tensor, Tensor) and tensor in self._blank for tensor in tensors):
            raise UntraceableError(f"{what} depends on a value that is not passed on")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        depends = any(isinstance(tensor, Tensor) and tensor in self._blank for tensor in given)
        if depends and func._overloadpacket in _READS:
            self.check(given, "what forward runs")
        output = func(*args, **(kwargs or {}))
        if depends and func._overloadpacket not in _SHAPES_ONLY:
            self.mark(pytree.tree_leaves(output))
        return output
