"""Training and evaluation on images that do not fit on the device: they come batch by batch from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Rule
from anytime.data.augment import Draws, normalise
from anytime.data.base import StreamedImages
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.data.logits import Evaluation, exit_accuracy, measuring
from anytime.train.step import TrainStep


class StreamedStep(TrainStep):
    """A `TrainStep` whose images are copied into a buffer before each step; random crops are the data set's own."""

    share = slice(None)

    def __init__(self, model: MultiExit, data: Any, *rest: Any) -> None:
        super().__init__(model, data, *rest)
        if self.config.objective == "l2w":
            raise OptionError(
                "l2w came with images that are decoded as they are needed",
                expected="images that fit on the device, of which it reads each batch twice",
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

    def images(self, rows: Tensor, draws: Draws) -> Tensor:
        images = normalise(self._pixels, self._mean, self._std, dtype=self._dtype)
        return images.contiguous(memory_format=torch.channels_last) if self.machine.channels_last else images

    def _open(self, index: int) -> Iterator[Tensor]:
        """The images of this process in the batches from `index` to the end of the epoch."""
        batch = self.config.batch
        coming = self.order[index * batch : self.steps_per_epoch * batch].view(-1, batch)[:, self.share]
        data: Any = self.data
        draws = (self.config.seed, self._epoch) if self.config.augment else None
        stream: Iterator[Tensor] = data.batches(coming.reshape(-1), coming.shape[1], draws=draws)
        return stream


class StreamedEvaluation(Evaluation):
    """An `Evaluation` over a stream, without random crops."""

    def __init__(self, model: MultiExit, data: StreamedImages, *, batch: int = 128) -> None:
        self.model, self.batch = model, batch
        self.stream = data

    @torch.no_grad()
    def logits(self) -> Tensor:
        """`(exits, N, classes)`, float32, on the host."""
        device = next(self.model.parameters()).device
        pieces = []
        with measuring(self.model):
            for pixels in self.stream.batches(torch.arange(len(self.stream)), self.batch):
                images = normalise(pixels.to(device), self.stream.mean, self.stream.std)
                pieces.append(torch.stack(tuple(self.model.exits(images))).cpu())
        return torch.cat(pieces, 1)

    def accuracy(self, rule: Rule[Any] | None = None) -> tuple[float, ...]:
        """The share of images that a rule, `Latest` by default, is right on at each exit."""
        return exit_accuracy(self.logits(), self.stream.labels.cpu(), rule)
