"""Training and evaluation on images that do not fit on the device: they are decoded batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anytime.data.augment import Draws, normalise
from anytime.data.base import StreamedImages
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.data.logits import ExitEvaluation, measuring
from anytime.train.data.rows import RowsStep


class StreamedStep(RowsStep):
    """A `RowsStep` that copies the decoded images into a buffer before each step; the data set crops them itself."""

    def __init__(self, model: MultiExit, data: Any, *rest: Any) -> None:
        super().__init__(model, data, *rest)
        if self.config.objective == "l2w":
            raise OptionError(
                f"objective is 'l2w' with {data.name}, which is decoded while training",
                expected="images that fit on the device: L2W reads each batch twice",
                fix="use another objective",
            )
        self._pixels = torch.zeros(len(self.rows), *data.shape, dtype=torch.uint8, device=self.rows.device)
        self._stream: Iterator[Tensor] | None = None

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self._epoch, self._stream = epoch, None

    def __call__(self, index: int, lr: float) -> None:
        if self._stream is None:
            self._stream = self._open(index)
        self._pixels.copy_(next(self._stream))
        super().__call__(index, lr)

    def pixels(self, rows: Tensor, draws: Draws) -> Tensor:
        return self._pixels

    def _open(self, index: int) -> Iterator[Tensor]:
        """The images of this rank in the batches from `index` to the end of the epoch."""
        batch = self.config.batch
        coming = self.order[index * batch : self.steps_per_epoch * batch].view(-1, batch)[:, self.rank_rows]
        data: Any = self.data
        draws = (self.config.seed, self._epoch) if self.config.augment else None
        stream: Iterator[Tensor] = data.batches(coming.reshape(-1), coming.shape[1], draws=draws)
        return stream


class StreamedEvaluation(ExitEvaluation):
    """An `ExitEvaluation` over a stream, without random crops."""

    def __init__(self, model: MultiExit, data: StreamedImages, *, batch: int = 128) -> None:
        self.model, self.batch, self.data = model, batch, data

    @torch.no_grad()
    def logits(self) -> Tensor:
        """`(exits, N, classes)`, float32, on the CPU."""
        device = next(self.model.parameters()).device
        blocks = []
        with measuring(self.model):
            for pixels in self.data.batches(torch.arange(len(self.data)), self.batch):
                images = normalise(pixels.to(device), self.data.mean, self.data.std)
                blocks.append(torch.stack(tuple(self.model.exits(images))).cpu())
        return torch.cat(blocks, 1)
