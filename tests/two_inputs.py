"""A small model of texts that takes token ids and a mask, by stages or by a generator only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anytime.models import Carry, MultiExit

VOCABULARY, CLASSES, EXITS = 20, 6, 3


class TwoInputs(MultiExit):
    """The mean over real tokens only, of deeper and deeper features."""

    num_exits = EXITS
    input_names = ("input_ids", "attention_mask")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXITS))
        self.heads = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(EXITS))

    def carry_size(self, exit: int) -> int:
        return 2

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        return {1: "length"}, {1: "length"}

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        self._check_carry(exit, carry)
        x, mask = carry
        x = self.words(x) if exit == 0 else x
        x = torch.tanh(self.layers[exit](x))
        weights = mask.to(x.dtype)[..., None]
        logits = self.heads[exit]((x * weights).sum(1) / weights.sum(1))
        return ((x, mask) if exit + 1 < EXITS else ()), 4 * logits


class OnlyExits:
    """The same as a generator that takes a dict."""

    num_exits, classes = EXITS, CLASSES

    def __init__(self) -> None:
        self.model = TwoInputs().eval()
        self.seen: list[Any] = []

    def exits(self, x: Any) -> Iterator[Tensor]:
        self.seen.append(x)
        yield from self.model.exits({name: x[name] for name in self.model.input_names})


def texts(rows: int = 4, length: int = 7, *, seed: int = 1) -> dict[str, Tensor]:
    """Token ids, and masks of different lengths; the order of the names is not the model's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)).long()
    return {"attention_mask": mask, "input_ids": ids}
