"""Loaders for `collect_logits`: what can be iterated, and a fingerprint of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import Inputs, tensors_of
from anytime.errors import OptionError


def digest(inputs: Inputs, labels: Tensor | None) -> str:
    """A fingerprint of a batch: other inputs, labels, names or another order give another text."""
    found = hashlib.blake2b(digest_size=16)
    names = sorted(inputs) if isinstance(inputs, Mapping) else ()
    for tensor in (*tensors_of(inputs, names), *(() if labels is None else (labels,))):
        values = tensor.detach().cpu().contiguous()
        found.update(f"{names}{values.dtype}{tuple(values.shape)}".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def check_loader(loader: Any) -> Iterable[Any]:
    """Refuse what cannot be iterated batch by batch."""
    if isinstance(loader, Tensor | np.ndarray | str | Mapping) or not isinstance(loader, Iterable):
        raise OptionError(
            f"the loader is a {type(loader).__name__}",
            expected="a DataLoader, or any iterable of batches",
            fix="pass a list of batches: [(x, y)] for one batch that fits the model",
        )
    return loader
