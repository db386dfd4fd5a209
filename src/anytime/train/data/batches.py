"""Training and evaluation on a caller's own data: labelled batches from a loader, with inputs of any structure.

The caller's model is trained itself, not a copy: modules may refer to each other in ways that a copy would not keep. In
bfloat16 it runs under autocast. Before each batch is fetched, torch's random state is seeded from the seed, the epoch and the
index of the step, so shuffling, random transforms in the same process and dropout are the same in a run that continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anytime.checks import Inputs, check_labels, count_rows, map_inputs
from anytime.combine import Rule
from anytime.data.loaders import as_batches, labelled_batch
from anytime.errors import InputError, OptionError, ShapeError
from anytime.models.attach.probe import evaluating
from anytime.models.given import run_explained
from anytime.models.outputs import on_device_of
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.logits import ExitEvaluation, exit_accuracy, measuring
from anytime.train.distributed import Ranks
from anytime.train.objectives.losses import Objective
from anytime.train.step import TrainStep, freeze, seed_of, usable_device
from anytime.train.stopping import ctrl_c_ignored


class Batches:
    """The batches of a caller's data, epoch by epoch; `len` is the number of steps of an epoch.

    Args:
        data: As for `anytime.data.loaders.as_batches`. A data set is shuffled.
        config: The recipe: the rows per batch of a data set, the steps of an epoch, the seed.
    """

    def __init__(self, data: Any, config: TrainConfig) -> None:
        self._generator = torch.Generator()
        self.source = as_batches(data, batch=config.batch, generator=self._generator)
        self._seed, self._steps = config.seed, config.steps_per_epoch or _length(self.source)

    def __len__(self) -> int:
        return self._steps

    def identity(self) -> dict[str, Any]:
        """What a checkpoint says of these data."""
        rows = getattr(self.source, "dataset", self.source)
        return {"name": type(self.source).__name__, "steps": len(self), "rows": _length_or_none(rows)}

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Inputs, Any]]:
        """The inputs and labels of each step of an epoch, from step `start` on."""
        seed = seed_of(self._seed, number, 1)
        self._generator.manual_seed(seed)
        torch.manual_seed(seed)
        source: Any = self.source
        for part in (source, *(getattr(source, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
            if hasattr(part, "set_epoch"):  # as in DistributedSampler
                part.set_epoch(number)
        batches = self._repeated()
        for index in range(len(self)):
            torch.manual_seed(seed_of(self._seed, number, 2, index))
            batch = next(batches)
            if index >= start:
                yield labelled_batch(batch)

    def _repeated(self) -> Iterator[Any]:
        """The batches, again from the start when they end before the epoch does."""
        while True:
            with ctrl_c_ignored():  # the processes of a DataLoader start here
                batches = iter(self.source)
            empty = True
            for batch in batches:
                yield batch
                empty = False
            if empty:
                raise InputError("the data have no batch", expected="at least one batch", fix="pass data that are not empty")


class BatchStep(TrainStep):
    """A `TrainStep` on batches from a loader.

    Args:
        model: The caller's model, which is trained itself. It is moved to the device and put into train mode; batch norms of
            modules that are frozen already stay in eval mode.
        data: The batches.
        objective: The loss to minimise.
        config: The recipe.
        hardware: Where and how to compute.
        ranks: Must be None.
    """

    def __init__(
        self,
        model: Any,
        data: Batches,
        objective: Objective,
        config: TrainConfig,
        hardware: Hardware,
        ranks: Ranks | None = None,
    ) -> None:
        _check(config, hardware, ranks)
        model.to(usable_device(hardware.device)).train()
        if getattr(model, "statistics", "fixed") == "fixed":  # attached exits have a setting for this
            _hold_frozen_norms(model)
        freeze(model, config)
        super().__init__(model, model, objective, config, hardware)
        self.data = data
        self._kind = next((weights.dtype for weights in model.parameters() if weights.is_floating_point()), None)
        self._stream: Iterator[tuple[Inputs, Any]] | None = None
        self._classes: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data)

    @property
    def batch_size(self) -> int:
        return len(self._batch[1])

    def identity(self) -> dict[str, Any]:
        return self.data.identity()

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self._epoch, self._stream = epoch, None

    def __call__(self, index: int, lr: float) -> None:
        if self._stream is None:
            self._stream = self.data.epoch(self._epoch, start=index)
        inputs, labels = next(self._stream)
        inputs = map_inputs(self._to_device, inputs)
        if self._classes is None:
            self._classes = self._count_classes(inputs)
        labels = check_labels(labels, batch=count_rows(inputs), classes=self._classes)
        self._batch = inputs, self.targets(labels.to(self.device, non_blocking=True), self._classes)
        super().__call__(index, lr)

    def run(self) -> None:
        inputs, labels = self.batch()
        with torch.enable_grad():
            with self._autocast(), _explaining_one_row(len(labels)):
                losses = self._forward(inputs, labels)
            self.descend(losses if self.exit_weights is None else losses * self.exit_weights)

    def batch(self) -> tuple[Inputs, Tensor]:
        return self._batch

    def _to_device(self, tensor: Tensor) -> Tensor:
        kind = self._kind if tensor.is_floating_point() else None
        if self.hardware.channels_last and tensor.ndim == 4:
            return tensor.to(self.device, kind, memory_format=torch.channels_last, non_blocking=True)
        return tensor.to(self.device, kind, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.hardware.precision == "bfloat16")

    @torch.no_grad()
    def _count_classes(self, inputs: Inputs) -> int:
        """The number of classes, from a run on the first batch that also checks what the model yields."""
        exits, rows = self.model.num_exits, count_rows(inputs)
        with evaluating(self.model), self._autocast():
            found = run_explained(lambda given: list(self.model.exits(given)), inputs)
        shapes = [tuple(getattr(logits, "shape", ())) for logits in found]
        first = shapes[0] if shapes else ()
        if len(first) != 2 or first[0] != rows or shapes != [first] * exits:
            raise ShapeError(
                f"the model has num_exits={exits} and yields logits of shapes {shapes} for {rows} inputs",
                expected=f"{exits} times logits of shape ({rows}, classes)",
                fix="check that every exit ends in a linear layer with one output per class",
            )
        return int(first[1])


class BatchEvaluation(ExitEvaluation):
    """An `ExitEvaluation` on labelled batches; the accuracy is counted batch by batch, without keeping logits.

    Args:
        model: The network, on the device where it is to run.
        data: As for `anytime.data.loaders.as_batches`.
        batch: Rows per batch of a data set.
    """

    def __init__(self, model: Any, data: Any, *, batch: int = 256) -> None:
        self.model, self._source = model, as_batches(data, batch=batch)

    def logits(self) -> Tensor:
        """`(exits, N, classes)`, float32, on the CPU."""
        return torch.cat([logits.cpu() for logits, _ in self._blocks()], 1)

    def accuracy(self, rule: Rule[Any] | None = None) -> tuple[float, ...]:
        right, rows = torch.zeros(self.model.num_exits, dtype=torch.float64), 0
        for logits, labels in self._blocks():
            right += len(labels) * torch.tensor(exit_accuracy(logits, labels, rule), dtype=torch.float64)
            rows += len(labels)
        return tuple((right / rows).tolist())

    def _exits(self, inputs: Inputs) -> list[Tensor]:
        return list(self.model.exits(on_device_of(self.model, inputs)))

    @torch.no_grad()
    def _blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = next(self.model.parameters()).device
        empty = True
        with measuring(self.model):
            for batch in self._source:
                inputs, labels = labelled_batch(batch)
                logits = torch.stack(run_explained(self._exits, inputs))
                known = check_labels(labels, batch=logits.shape[1], classes=logits.shape[2])
                yield logits.float(), known.to(device)
                empty = False
        if empty:
            raise InputError("val has no batch", expected="at least one batch", fix="pass val=None to train without validation")


@contextmanager
def _explaining_one_row(rows: int) -> Iterator[None]:
    """Replace the error of a batch norm for a batch of one row, as the last one of a loader may be."""
    try:
        yield
    except ValueError as error:
        if rows > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise ShapeError(
            "a batch has one row, which a batch norm cannot be trained on",
            expected="at least two rows in each batch",
            fix="pass drop_last=True to the DataLoader, or choose another batch size",
        ) from error


def _length(source: Any) -> int:
    length = _length_or_none(source)
    if length is None:
        raise OptionError(
            f"the data are a {type(source).__name__} without a length",
            expected="data whose len() is the number of batches, or steps_per_epoch",
            fix="pass steps_per_epoch=1000, or as many batches as an epoch shall have",
        )
    if length == 0:
        raise InputError("the data have no batch", expected="at least one batch", fix="lower the batch size of the loader")
    return length


def _length_or_none(data: Any) -> int | None:
    with suppress(TypeError):  # a DataLoader has __len__ even if its data set has none
        return len(data) if isinstance(data, Sized) else None
    return None


def _hold_frozen_norms(network: nn.Module) -> None:
    """Put the batch norms of modules that train no parameter into eval mode."""
    for module in network.modules():
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if trains and not any(trains):
            for part in module.modules():
                if isinstance(part, _NormBase):
                    part.eval()


def _check(config: TrainConfig, hardware: Hardware, ranks: Ranks | None) -> None:
    if ranks is not None:
        raise OptionError(
            f"a loader was given with {ranks.size} processes",
            expected="one process, or the library's own data",
            fix="train with one process, or write the loop with DDP and anytime.train.joint_cross_entropy",
        )
    if config.objective == "l2w":
        raise OptionError(
            "objective is 'l2w' with batches from a loader",
            expected="images in memory: L2W reads each batch twice",
            fix="pass an anytime.data.ImageData, or use another objective",
        )
    if config.strong_augment.used:
        raise OptionError(
            "strong_augment is set with batches from a loader",
            expected="images of this library: a loader has its own transforms",
            fix="pass an anytime.data.ImageData, or augment in the loader",
        )
    if config.average_decay:
        raise OptionError(
            f"average_decay is {config.average_decay:g} with batches from a loader",
            expected="0: the model itself is trained, not a copy",
            fix="set average_decay=0, or pass data of anytime.data",
        )
    used = [name for name in ("graph", "streams") if getattr(hardware, name)]
    if used:
        raise OptionError(
            f"{' and '.join(used)} with batches from a loader",
            expected="neither: a captured step reads its batches from the GPU",
            fix="set " + " and ".join(f"{name}=False" for name in used),
        )
