"""The logits of all exits over a data set, and the accuracy of each exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Rule
from anytime.data.augment import normalise
from anytime.data.base import ImageData
from anytime.models.attach.probe import evaluating
from anytime.models.base import MultiExit
from anytime.train.gpu.graph import Replayed


class ExitEvaluation:
    """A network and the images it is measured on, kept on the device for repeated use.

    The network runs in float32, in evaluation mode and without augmentation.

    Args:
        model: The network, on the device where it is to run.
        data: The images.
        batch: Images per batch.
        graph: Whether to capture a batch as a CUDA graph.
    """

    data: Any

    def __init__(self, model: MultiExit, data: ImageData, *, batch: int = 500, graph: bool = False) -> None:
        self.model = model
        device = next(model.parameters()).device
        self.data = data.to(device)
        self._rows = torch.zeros(min(batch, len(data)), dtype=torch.int64, device=device)
        self._out = torch.zeros(model.num_exits, len(self._rows), data.classes, device=device)
        self._mean, self._std = (torch.tensor(values, device=device) for values in (data.mean, data.std))
        self._run = Replayed(self._forward) if graph else self._forward

    @torch.no_grad()
    def logits(self) -> Tensor:
        """`(exits, N, classes)`, float32, on the CPU."""
        size, count = len(self._rows), len(self.data)
        blocks = []
        with measuring(self.model):
            for start in range(0, count, size):
                # The last batch is filled with copies of the last row, so that all batches have one shape.
                self._rows.copy_(torch.arange(start, start + size).clamp(max=count - 1))
                self._run()
                blocks.append(self._out[:, : count - start].to("cpu", copy=True))
        return torch.cat(blocks, 1)

    def accuracy(self, rule: Rule[Any] | None = None) -> tuple[float, ...]:
        """The accuracy of a rule, `Latest` by default, at each exit."""
        return exit_accuracy(self.logits(), self.data.labels.cpu(), rule)

    def _forward(self) -> None:
        images = normalise(self.data.images[self._rows], self._mean, self._std)
        for exit, logits in enumerate(self.model.exits(images)):
            self._out[exit] = logits


def exit_accuracy(logits: Tensor, labels: Tensor, rule: Rule[Any] | None = None) -> tuple[float, ...]:
    """The accuracy of a rule, `Latest` by default, at each exit.

    >>> exit_accuracy(torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([0, 1]))
    (0.5, 1.0)
    """
    answers = logits.argmax(-1) if rule is None else rule.combine(logits).labels
    return tuple((answers == labels).double().mean(-1).tolist())


@contextmanager
def measuring(model: MultiExit) -> Iterator[None]:
    """Evaluation mode, and float32 without TF32 in convolutions and matrix products, within the block."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        with evaluating(model):
            yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
