"""Training on rows that are on the device as a whole: crop, forward, loss, backward, update.

The same code runs eagerly on a CPU and is captured as a CUDA graph on a GPU. It never reads a value back to the CPU and draws
no random numbers: order and augmentation of an epoch are drawn before it, on the CPU, from the seed and the epoch alone. So
both devices see the same batches, and a run can continue from any step.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from anytime.data.augment import Draws, crop_flip, draw, no_draws, normalise
from anytime.data.base import ImageData
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.strong import StrongDraws
from anytime.train.distributed import Ranks, check_distributed, sync_norms
from anytime.train.gpu.graph import use_streams
from anytime.train.objectives.losses import Objective
from anytime.train.step import TrainStep, freeze, seed_of, usable_device


class RowsStep(TrainStep):
    """A `TrainStep` on images in memory. It trains a copy of the network, and `publish` copies its weights back.

    Args:
        model: The caller's network, in float32. It is moved to the device.
        data: Training images, moved to the device as a whole.
        objective: The loss to minimise.
        config: The recipe.
        hardware: Where and how to compute.
        ranks: The process group, if several processes train together.
    """

    def __init__(
        self,
        model: MultiExit,
        data: ImageData,
        objective: Objective,
        config: TrainConfig,
        hardware: Hardware,
        ranks: Ranks | None = None,
    ) -> None:
        if len(data) < config.batch:
            raise OptionError(
                f"batch is {config.batch} with {len(data)} training rows",
                expected=f"at most {len(data)}",
                fix="lower batch, or hold out fewer rows",
            )
        if config.steps_per_epoch is not None:
            raise OptionError(
                f"steps_per_epoch is {config.steps_per_epoch} with {data.name}, which has {len(data)} rows",
                expected="None: an epoch shows each row once",
                fix="remove steps_per_epoch, and lower epochs for a shorter run",
            )
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        if ranks is not None:
            check_distributed(config, hardware, size)
        device = usable_device(hardware.device)
        model = model.to(device)
        network = copy.deepcopy(model).train()
        freeze(network, config)
        _stop_counting(network)
        if hardware.streams:
            use_streams(network)
        if ranks is not None:
            sync_norms(network, size)
        self._dtype = getattr(torch, hardware.precision)
        super().__init__(model, network, objective, config, hardware, ranks, dtype=self._dtype)
        self.data = data.to(device)
        rows = config.batch // size
        self.rank_rows = slice(rank * rows, (rank + 1) * rows)
        self.rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self.order = torch.zeros(len(data), dtype=torch.int64, device=device)
        self.draws = no_draws(len(data), device=device)
        self.strong = self._strong_draws() if config.strong_augment.used else None
        self._mean, self._std = (torch.tensor(getattr(data, name, ()), device=device) for name in ("mean", "std"))

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches."""
        return len(self.data) // self.config.batch

    @property
    def batch_size(self) -> int:
        return self.config.batch

    def identity(self) -> dict[str, Any]:
        data = self.data
        return {"name": data.name, "images": len(data), "rows_crc32": zlib.crc32(data.rows.cpu().numpy().tobytes())}

    def begin(self, epoch: int) -> None:
        """Draw the order and the augmentation of an epoch."""
        super().begin(epoch)
        generator = torch.Generator().manual_seed(seed_of(self.config.seed, epoch))
        self.order.copy_(torch.randperm(len(self.data), generator=generator))
        if self.config.augment:
            self.draws.copy_(draw(len(self.data), generator=generator))
        if self.strong is not None:
            self.strong.begin(epoch)

    def __call__(self, index: int, lr: float) -> None:
        batch = self.config.batch
        self.rows.copy_(self.order[index * batch : (index + 1) * batch][self.rank_rows])
        if self.strong is not None:
            self.strong.select(index)
        super().__call__(index, lr)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The network's input and the labels of this step."""
        pixels = self.pixels(self.rows, self.draws[self.rows])
        targets = self.targets(self.data.labels[self.rows], self.data.classes)
        if self.strong is None:
            images = normalise(pixels, self._mean, self._std, dtype=self._dtype)
        else:
            images = normalise(self.strong.recolour(pixels, self.rows), self._mean, self._std)
            images, targets = self.strong.mix(self.strong.distort(images, self.rows), targets)
        memory_format = torch.channels_last if self.hardware.channels_last else torch.contiguous_format
        return images.to(self._dtype).contiguous(memory_format=memory_format), targets

    def pixels(self, rows: Tensor, draws: Draws) -> Tensor:
        """The images of `rows` as bytes, cropped and mirrored."""
        return crop_flip(self.data.images, rows, draws)

    def _strong_draws(self) -> StrongDraws:
        if self.config.strong_augment.mixes and len(self.rows) % 2:
            raise OptionError(
                f"batch is {self.config.batch} with mixup or cutmix, which mix pairs of images",
                expected="an even number of images per process",
                fix=f"set batch={self.config.batch + self.config.batch // len(self.rows)}",
            )
        return StrongDraws(
            self.config.strong_augment,
            seed=self.config.seed,
            images=len(self.data),
            steps=self.steps_per_epoch,
            shape=self.data.shape,
            device=self.device,
        )


def _stop_counting(network: nn.Module) -> None:
    """Drop the step counters of batch norms: a moving average does not need them, and each costs a kernel launch."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.momentum is not None:
            module.num_batches_tracked = None
