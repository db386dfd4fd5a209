"""Training and evaluation on texts as rows of tokens: batches of similar length, cut to one of a few widths.

Rows are stored padded to one length; a batch is read up to the width of its longest row. On a GPU each width has its own CUDA
graph. Encoders use dropout, so each step starts from a random seed of its own, derived from the seed, the epoch and the index
of the step: a run can continue from any step here too.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.data.batches import plan_batches
from anytime.data.text import TokenData
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.logits import ExitEvaluation, measuring
from anytime.train.data.rows import RowsStep
from anytime.train.gpu.graph import Replayed
from anytime.train.objectives.losses import Objective
from anytime.train.step import seed_of

# Each is at most 50 % wider than the one before: little padding with few widths.
_WIDTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def batch_widths(length: int) -> tuple[int, ...]:
    """The widths of batches of rows with at most `length` tokens.

    >>> batch_widths(40)
    (8, 12, 16, 24, 32, 40)
    """
    return (*(width for width in _WIDTHS if width < length), length)


class TokenStep(RowsStep):
    """A `RowsStep` on rows of tokens."""

    data: Any

    def __init__(
        self,
        model: MultiExit,
        data: TokenData,
        objective: Objective,
        config: TrainConfig,
        hardware: Hardware,
        *rest: Any,
    ) -> None:
        _check(config, hardware)
        super().__init__(model, data, objective, config, hardware, *rest)  # type: ignore[arg-type]
        self._lengths = data.lengths.cpu()
        self.width = data.length

    def identity(self) -> dict[str, Any]:
        # Another vocabulary or another length gives other rows for the same texts.
        ids = zlib.crc32(self.data.ids.cpu().numpy().tobytes())
        return {**super().identity(), "length": self.data.length, "ids_crc32": ids}

    def minimise(self, objective: Objective) -> None:
        """Minimise `objective` from the next step on."""
        super().minimise(objective)
        self._graphs: dict[int, Replayed] = {}

    def begin(self, epoch: int) -> None:
        """Plan the batches of an epoch, and draw a random seed for each step."""
        super().begin(epoch)
        generator = torch.Generator().manual_seed(seed_of(self.config.seed, epoch, 1))
        plan = plan_batches(self._lengths, self.config.batch, widths=batch_widths(self.data.length), generator=generator)
        rows = torch.cat([batch.rows for batch in plan])
        self.order[: len(rows)] = rows.to(self.order.device)
        self._widths = [batch.length for batch in plan]
        draws = np.random.SeedSequence([self.config.seed, epoch, 2])
        self._seeds: list[int] = draws.generate_state(len(plan), np.uint64).tolist()

    def __call__(self, index: int, lr: float) -> None:
        """Train on batch `index` of this epoch with learning rate `lr`; the losses are added to `losses`."""
        self.width = self._widths[index]
        if self.hardware.graph:
            # A graph has the width of its capture, and reads the seed in each replay.
            self._run = self._graphs.setdefault(self.width, Replayed(self.run))
        torch.manual_seed(self._seeds[index])
        super().__call__(index, lr)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The tokens and labels of this step."""
        return self.data.ids[:, : self.width][self.rows], self.targets(self.data.labels[self.rows], self.data.classes)


class TokenEvaluation(ExitEvaluation):
    """An `ExitEvaluation` on texts: batches go from short to long, the logits have the order of the data.

    Args:
        model: The network, on the device where it is to run.
        data: The rows. Their classes may differ from the network's, as for out-of-scope queries.
        batch: Rows per batch.
    """

    def __init__(self, model: MultiExit, data: TokenData, *, batch: int = 256) -> None:
        self.model = model
        self.data = data.to(next(model.parameters()).device)
        self._plan = plan_batches(data.lengths, batch, widths=batch_widths(data.length))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """`(exits, N, classes)`, float32, on the CPU."""
        with measuring(self.model):
            blocks = [self._forward_rows(rows.to(self.data.ids.device), length).cpu() for rows, length in self._plan]
        order = torch.cat([rows for rows, _ in self._plan]).argsort()
        return torch.cat(blocks, 1)[:, order]

    def _forward_rows(self, rows: Tensor, length: int) -> Tensor:
        return torch.stack(tuple(self.model.exits(self.data.ids[:, :length][rows])))


def _check(config: TrainConfig, hardware: Hardware) -> None:
    if config.objective == "l2w":
        raise OptionError("objective is 'l2w' with texts", expected="images, as published", fix="use another objective")
    if config.strong_augment.used:
        raise OptionError("strong_augment is set with texts", expected="images", fix="remove strong_augment")
    if hardware.compile:
        raise OptionError(
            "compile=true with texts", expected="the plain step: each width would be compiled", fix="set compile=false"
        )
