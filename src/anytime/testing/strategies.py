"""Hypothesis strategies for logits, hostile ones among them. Needs `hypothesis`, which the extra `dev` brings."""

from __future__ import annotations

from typing import Any

import torch

try:
    from hypothesis import strategies as st
except ImportError as error:  # pragma: no cover
    from anytime.errors import MissingExtraError

    raise MissingExtraError(
        "hypothesis is not installed", expected="hypothesis", fix="pip install 'anytime-nn[dev]'"
    ) from error

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KINDS = ("normal", "wide", "huge", "tiny", "ties", "zeros", "negative", "spikes")


@st.composite
def logits(
    draw: st.DrawFn, *, max_exits: int = 8, max_rows: int = 33, max_classes: int = 1000, dtypes: tuple[Any, ...] = FLOATS
) -> torch.Tensor:
    """Finite logits of shape `(exits, rows, classes)`: 1 to 8 exits, 0 to 33 rows, 1 to 1000 classes by default."""
    exits, rows = draw(st.integers(1, max_exits)), draw(st.integers(0, max_rows))
    classes = draw(st.one_of(st.integers(1, min(12, max_classes)), st.integers(1, max_classes)))
    kind, dtype = draw(st.sampled_from(_KINDS)), draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    normal = torch.randn(exits, rows, classes, generator=generator, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    values = {
        "normal": 3 * normal,
        "wide": normal.sign() * (5 * normal).exp(),
        "huge": normal * 1e8,
        "tiny": normal * 1e-40,
        "ties": (2 * normal).round(),
        "zeros": normal.clamp(min=0).floor(),
        "negative": -normal.abs(),
        "spikes": torch.where(normal > 2, normal.sign() * largest, normal),
    }[kind]
    return values.clamp(-largest, largest).to(dtype)
