"""Hugging Face's Trainer with models that have exits.

`Trainer.predict` joins the batches of every output along its first dimension. For logits with the exits first it joins exits in
place of rows, so these helpers put the batch first on the way into the Trainer and the exits first on the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_labels, check_logits_shape, stack_exits
from anytime.combine import Rule
from anytime.combine.named import DEFAULT_RULES
from anytime.errors import DtypeError, LabelError, OptionError, ShapeError
from anytime.evaluation import CollectedLogits, collect_logits
from anytime.metrics import Metrics
from anytime.models.attach.probe import evaluating
from anytime.models.base import ExitModel
from anytime.train import joint_cross_entropy


class TrainerModel(nn.Module):
    """A model with exits as a Trainer expects one: a dict of inputs in, the loss and the logits out.

    Train it, predict with it, and use `model` afterwards. Its logits have the batch first, `(batch, exits, classes)`. The names
    of its inputs are not in the signature of its forward, so `TrainingArguments` needs `remove_unused_columns=False`.

    Args:
        model: A model with exits, as `anytime.attach_exits` returns it.
        loss: From the logits `(exits, batch, classes)` and the labels to the loss of each exit.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> model = TrainerModel(MLP(MLPConfig(classes=4, exits=3)))
        >>> output = model(x=torch.randn(5, 2), labels=torch.arange(5) % 4)
        >>> output["loss"].shape, output["logits"].shape
        (torch.Size([]), torch.Size([5, 3, 4]))
    """

    accepts_loss_kwargs = False  # a Trainer would pass numbers beside the inputs

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = joint_cross_entropy) -> None:
        super().__init__()
        if not isinstance(model, ExitModel):
            raise OptionError(
                f"the model is a {type(model).__name__} without exits",
                expected="a model with exits",
                fix="add some with anytime.attach_exits, or wrap its outputs in anytime.models.from_outputs",
            )
        self.model, self.loss = model, loss

    def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """`logits`, and with labels the `loss`, the sum over the exits."""
        if not inputs:
            raise OptionError(
                "a batch has no inputs, only labels",
                expected="the inputs of the model by name",
                fix="pass remove_unused_columns=False to TrainingArguments, and a data set of dicts",
            )
        names = getattr(self.model, "input_names", ())
        given: Inputs = inputs if names or len(inputs) != 1 else next(iter(inputs.values()))
        logits = torch.stack(list(self.model.exits(given)))
        found = {"logits": logits.transpose(0, 1)}
        return found if labels is None else {"loss": self.loss(logits, labels).sum(), **found}


def batch_first(logits: Any, labels: Any = None) -> Tensor:
    """For `Trainer(preprocess_logits_for_metrics=...)`: the logits of a batch as `(batch, exits, classes)`.

    It is for models whose output has the exits first, `(exits, batch, classes)` or a tuple with `(batch, classes)` per exit; a
    `TrainerModel` does not need it.

    >>> batch_first(torch.zeros(3, 5, 4)).shape
    torch.Size([5, 3, 4])
    """
    return check_logits_shape(stack_exits(logits)).transpose(0, 1)


def exits_first(predictions: Any) -> CollectedLogits:
    """The logits and labels in what `Trainer.predict` returns, or in what it passes to `compute_metrics`.

    Args:
        predictions: With `predictions` of shape `(rows, exits, classes)`, by `TrainerModel` or `batch_first`, or a tuple with
            `(rows, classes)` per exit; and `label_ids`.
    """
    if not (hasattr(predictions, "predictions") and hasattr(predictions, "label_ids")):
        raise DtypeError(
            f"the predictions are a {type(predictions).__name__}",
            expected="what Trainer.predict returns, with predictions and label_ids",
            fix="pass it as it is: exits_first(trainer.predict(dataset))",
        )
    given, labels = predictions.predictions, predictions.label_ids
    if isinstance(given, tuple):
        logits = stack_exits(given)
    else:
        logits = torch.as_tensor(np.asarray(given))
        if logits.ndim != 3:
            raise _scrambled(logits, "rank 3")
        logits = logits.transpose(0, 1)
    if labels is None:
        return CollectedLogits(logits.contiguous(), None)
    if len(labels) != logits.shape[1]:
        raise _scrambled(logits.transpose(0, 1), f"{len(labels)} rows, one per label")
    known = check_labels(np.asarray(labels), batch=logits.shape[1], classes=logits.shape[2])
    return CollectedLogits(logits.contiguous(), known)


def compute_metrics(
    rules: Sequence[str | Rule[Any]] | Mapping[str, Any] = DEFAULT_RULES, *, costs: Sequence[float] | None = None
) -> Callable[[Any], dict[str, float]]:
    """For `Trainer(compute_metrics=...)`: the metrics of each rule as numbers named `product/accuracy/exit_3`.

    Args:
        rules: As for `anytime.metrics.Metrics`.
        costs: Cumulative cost up to each exit; 1, 2, 3, … by default.

    Example:
        >>> from types import SimpleNamespace
        >>> rows = SimpleNamespace(predictions=torch.randn(6, 3, 5).numpy(), label_ids=torch.arange(6).numpy() % 5)
        >>> "product/accuracy/exit_3" in compute_metrics()(rows)
        True
    """
    metrics = Metrics(rules, costs=costs)

    def compute(predictions: Any) -> dict[str, float]:
        found = exits_first(predictions)
        metrics.reset()
        metrics.update(found.logits, found.labels)
        each = metrics.compute().items()
        return {f"{rule}/{name}": value for rule, numbers in each for name, value in numbers.scalars().items()}

    return compute


def collect_with_trainer(trainer: Any, dataset: Any = None, out: str | Path | None = None, **options: Any) -> CollectedLogits:
    """Collect logits with the loader, the collator, the device and the precision of a Trainer, in one process.

    Unlike `Trainer.predict` it keeps nothing but logits and labels, in blocks on disk if `out` is given, and can be continued
    after a kill; see `anytime.collect_logits`.

    Args:
        trainer: A Trainer whose model is a `TrainerModel`, or returns the logits of all exits.
        dataset: The data; by default the Trainer's evaluation data.
        out: The file.
        options: Further arguments of `anytime.collect_logits`.
    """
    if not hasattr(trainer, "get_test_dataloader"):
        raise DtypeError(
            f"the trainer is a {type(trainer).__name__}",
            expected="a transformers.Trainer",
            fix="pass Trainer(TrainerModel(model), ...), or use anytime.collect_logits(model, loader)",
        )
    if trainer.args.world_size > 1:
        raise OptionError(
            f"the Trainer runs in {trainer.args.world_size} processes",
            expected="one process",
            fix="start the program without a launcher, or use exits_first(trainer.predict(dataset))",
        )
    loader = trainer.get_eval_dataloader() if dataset is None else trainer.get_test_dataloader(dataset)
    model, device = trainer.model, trainer.args.device

    def run(**inputs: Tensor) -> Any:
        with trainer.accelerator.autocast():
            output = model(**{name: tensor.to(device) for name, tensor in inputs.items()})
        if isinstance(model, TrainerModel):
            return list(output["logits"].transpose(0, 1))
        return output[0] if isinstance(output, tuple) and len(output) == 1 else output

    with evaluating(model):
        return collect_logits(run, _Renamed(loader, _label_name(trainer)), out, **options)


class _Renamed(Iterable[Any]):
    """Batches of a Trainer's loader with their labels under the name `labels`."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield {"labels" if name == self._name else name: value for name, value in batch.items()}


def _label_name(trainer: Any) -> str:
    names: list[str] = trainer.label_names or ["labels"]
    if len(names) > 1:
        raise LabelError(
            f"the Trainer has {len(names)} labels: {', '.join(names)}",
            expected="one label per input",
            fix="pass label_names=['labels'] to TrainingArguments",
        )
    return names[0]


def _scrambled(logits: Tensor, expected: str) -> ShapeError:
    return ShapeError(
        f"the predictions have shape {tuple(logits.shape)}",
        expected=f"(rows, exits, classes), {expected}: a Trainer joins exits in place of rows if the exits come first",
        fix="pass preprocess_logits_for_metrics=batch_first to the Trainer, or wrap the model in TrainerModel",
    )
