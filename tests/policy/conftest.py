from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def make_rows(rows: int, seed: int = 0, *, exits: int = 5, classes: int = 6, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of exits that get better, and labels; with ties, rounded so that many confidences are equal."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    ease = 4 * torch.rand(rows, generator=generator)
    skill = torch.linspace(0.4, 1.2, exits)
    logits = torch.randn(exits, rows, classes, generator=generator, dtype=torch.float64)
    logits += (skill[:, None] * ease)[..., None] * torch.nn.functional.one_hot(labels, classes)
    return (logits.round() if ties else logits).log_softmax(-1), labels


@pytest.fixture(scope="session")
def some() -> Callable[..., tuple[Tensor, Tensor]]:
    return make_rows
