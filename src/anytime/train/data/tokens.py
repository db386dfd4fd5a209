"""Training and evaluation on texts, as rows of word pieces: batches of similar length, cut to one of a few widths.

Rows are filled up to one length only where they lie; a batch is read up to the width that its longest row needs. On a GPU
each width is a CUDA graph of its own. Encoders drop at random, so each step begins from random numbers of its own, drawn from
the seed, the epoch and the place of the step alone: a run can go on from any step here too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.data.batches import plan_batches
from anytime.data.text import TokenData
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.logits import Evaluation, measuring
from anytime.train.gpu.graph import Replayed
from anytime.train.objectives.losses import Objective
from anytime.train.step import TrainStep

# Each is at most a half longer than the one before, so that little is padding, and few are needed.
_WIDTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def batch_widths(length: int) -> tuple[int, ...]:
    """The widths of batches of rows that are at most `length` pieces long.

    >>> batch_widths(40)
    (8, 12, 16, 24, 32, 40)
    """
    return (*(width for width in _WIDTHS if width < length), length)


class TokenStep(TrainStep):
    """A `TrainStep` whose batches are rows of word pieces.

    Args:
        model: The caller's network, in float32; it is moved to the machine's device and changed by `publish` alone.
        data: Training rows; they are moved to the device whole.
        objective: What is minimised.
        config: The recipe.
        machine: Where it runs.
    """

    data: Any

    def __init__(self, model: MultiExit, data: TokenData, objective: Objective, config: TrainConfig, machine: Hardware) -> None:
        _check(config, machine)
        unscaled: Any = _Unscaled(**{field.name: getattr(data, field.name) for field in fields(TokenData)})
        super().__init__(model, unscaled, objective, config, machine)
        self._lengths = data.lengths.cpu()
        self.width = data.length

    def minimise(self, objective: Objective) -> None:
        """Minimise this from the next step on."""
        super().minimise(objective)
        self._graphs: dict[int, Replayed] = {}

    def begin(self, epoch: int) -> None:
        """Plan the batches of an epoch, and draw what each step's random numbers begin from."""
        super().begin(epoch)
        order, draws = (np.random.SeedSequence([self.config.seed, epoch, purpose]) for purpose in (1, 2))
        generator = torch.Generator().manual_seed(int(order.generate_state(1, np.uint64)[0]))
        plan = plan_batches(self._lengths, self.config.batch, widths=batch_widths(self.data.length), generator=generator)
        rows = torch.cat([batch.rows for batch in plan])
        self.order[: len(rows)] = rows.to(self.order.device)
        self._widths = [batch.length for batch in plan]
        self._seeds: list[int] = draws.generate_state(len(plan), np.uint64).tolist()

    def __call__(self, index: int, lr: float) -> None:
        """Train on batch `index` of this epoch with rate `lr`; the losses are added to `losses`."""
        self.width = self._widths[index]
        if self.machine.graph:
            # A graph has the width it was captured with, and reads the seed anew in each replay.
            self._run = self._graphs.setdefault(self.width, Replayed(self.run))
        torch.manual_seed(self._seeds[index])
        super().__call__(index, lr)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Word pieces and labels of the rows of this step."""
        return self.data.ids[:, : self.width][self.rows], self.data.labels[self.rows]


class TokenEvaluation(Evaluation):
    """An `Evaluation` on texts: batches go from short to long, logits come in the order of the data.

    Args:
        model: On the device where it is to run.
        data: The rows. Their classes may be others than the network's, as those of out-of-scope queries are.
        batch: How many at a time.
    """

    data: Any

    def __init__(self, model: MultiExit, data: TokenData, *, batch: int = 256) -> None:
        self.model = model
        self.data = data.to(next(model.parameters()).device)
        self._plan = plan_batches(data.lengths, batch, widths=batch_widths(data.length))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """`(exits, N, classes)`, float32, on the host."""
        with measuring(self.model):
            pieces = [self._through(rows.to(self.data.ids.device), length).cpu() for rows, length in self._plan]
        places = torch.cat([rows for rows, _ in self._plan]).argsort()
        return torch.cat(pieces, 1)[:, places]

    def _through(self, rows: Tensor, length: int) -> Tensor:
        return torch.stack(tuple(self.model.exits(self.data.ids[:, :length][rows])))


@dataclass(frozen=True, eq=False)
class _Unscaled(TokenData):
    """Rows as a `TrainStep` takes its data; word pieces have nothing to be normalised by."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def _check(config: TrainConfig, machine: Hardware) -> None:
    if config.objective == "l2w":
        raise OptionError(
            "l2w came with texts", expected="images, for which its weights were published", fix="use another objective"
        )
    if machine.compile:
        raise OptionError(
            "compile came with texts", expected="the plain step: each width would be compiled anew", fix="leave compile off"
        )
