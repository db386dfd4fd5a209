"""Callbacks for Lightning's Trainer: metrics of every validation, and the logits of a run of its loaders.

They work with both of its packages, `lightning` and `pytorch_lightning`: with the one that the program has imported. A
`LightningModule` whose forward returns the logits of all exits also works in `anytime.collect_logits` as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from anytime.checks import check_choice, count_rows, stack_exits
from anytime.combine import Rule
from anytime.combine.named import DEFAULT_RULES, name_rules
from anytime.data.loaders import read_batch
from anytime.errors import MissingExtraError, OptionError, ShapeError
from anytime.evaluation import CollectedLogits, collect_logits
from anytime.integrations.torchmetrics import AnytimeMetric
from anytime.metrics import RuleMetrics

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_METRICS = tuple(field.name for field in fields(RuleMetrics))
LOGGED = ("accuracy", "ece", "label_drop_percent", "mean_label_drop")


def _callback_class() -> Any:
    """The base class of callbacks, of the package that the program uses."""
    for name in (*(name for name in _PACKAGES if name in sys.modules), *_PACKAGES):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise MissingExtraError(
        "Lightning is not installed", expected="the extra lightning", fix="pip install 'anytime-nn[lightning]'"
    )


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = _callback_class()


class LogMetrics(_Callback):
    """Logs the metrics of each rule at the end of every validation and test, over all processes.

    `validation_step` and `test_step` return the logits of all exits, or a dict with `logits`. Labels are the dict's
    `labels`, or else those of the batch, `(x, y)` or a dict. Several loaders count as one. Nothing waits for the GPU before the
    end of the epoch.

    Args:
        rules: As for `anytime.metrics.Metrics`.
        costs: Cumulative cost up to each exit; 1, 2, 3, … by default.
        names: The metrics to log, as `val/product/accuracy/exit_3`; all of them are in `found`.

    Attributes:
        found: The metrics of each rule after the last epoch, as `anytime.evaluate` returns them.
    """

    def __init__(
        self,
        rules: Sequence[str | Rule[Any]] | Mapping[str, Any] | str | Rule[Any] = DEFAULT_RULES,
        *,
        costs: Sequence[float] | None = None,
        names: Sequence[str] = LOGGED,
    ) -> None:
        name_rules(rules)
        if isinstance(names, str):
            raise OptionError(f"names is {names!r}", expected="a list of metrics", fix=f"pass names=[{names!r}]")
        for name in names:
            check_choice(name, "a name", _METRICS)
        self.rules, self.costs, self.names = rules, costs, tuple(names)
        self.found: dict[str, RuleMetrics] = {}
        self._metric: AnytimeMetric | None = None

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Begin with no rows: an interrupted run may have left some."""
        self._metric = None

    on_test_start = on_validation_start

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *more: Any, **options: Any) -> None:
        """Add a batch."""
        logits, labels = read_step(outputs, batch)
        if self._metric is None:
            metric = AnytimeMetric(len(logits), self.rules, costs=self.costs, labelled=labels is not None)
            self._metric = metric.to(logits.device)
        self._metric.update(logits, labels)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """Log the metrics over all batches."""
        self._log("val", module)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *more: Any, **options: Any) -> None:
        """Add a batch."""
        self.on_validation_batch_end(trainer, module, outputs, batch)

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        """Log the metrics over all batches."""
        self._log("test", module)

    def _log(self, prefix: str, module: Any) -> None:
        if self._metric is None:
            return
        self.found = self._metric.by_rule()
        self._metric = None
        for rule, metrics in self.found.items():
            scalars = metrics.scalars().items()
            module.log_dict({f"{prefix}/{rule}/{name}": value for name, value in scalars if name.split("/")[0] in self.names})


class CollectLogits(_Callback):
    """Collects the logits of `trainer.predict`, `validate` or `test`, in memory and in one process.

    The step returns what it does for `LogMetrics`. For more rows than memory holds, `anytime.collect_logits` takes the module.

    Args:
        out: A file to write at the end, as for `anytime.collect_logits`.

    Attributes:
        collected: The logits and labels of the last run.
    """

    def __init__(self, out: str | Path | None = None) -> None:
        self.out = out
        self.collected: CollectedLogits | None = None
        self._batches: list[tuple[Tensor, Tensor | None]] = []

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Begin with no rows."""
        if trainer.world_size > 1:
            raise OptionError(
                f"the Trainer runs in {trainer.world_size} processes",
                expected="one process, which sees all rows in order",
                fix="use Trainer(devices=1) to collect logits; LogMetrics works with several processes",
            )
        self._batches = []

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *more: Any, **options: Any) -> None:
        """Add a batch."""
        logits, labels = read_step(outputs, batch)
        self._batches.append((logits.detach().transpose(0, 1).cpu(), labels))

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        """Join the batches, and write the file."""
        if self._batches:
            self.collected = collect_logits(lambda rows: list(rows.transpose(0, 1)), self._batches, self.out, progress=False)
        self._batches = []

    on_validation_start = on_test_start = on_predict_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end
    on_validation_end = on_test_end = on_predict_end


def read_step(outputs: Any, batch: Any) -> tuple[Tensor, Tensor | None]:
    """The logits `(exits, batch, classes)` and labels in what a step of a LightningModule returned, and in its batch."""
    given = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if given is None:
        raise OptionError(
            f"the step returned {'a dict without logits' if isinstance(outputs, Mapping) else 'nothing'}",
            expected="the logits of all exits, or a dict with them as 'logits'",
            fix="end the step with: return {'logits': logits, 'labels': labels}",
        )
    logits = stack_exits(given)
    if logits.ndim != 3:
        raise ShapeError(
            f"the step returned a tensor of shape {tuple(logits.shape)}"
            + (", which may be the loss" if not logits.ndim else ""),
            expected="the logits of all exits, (exits, batch, classes), or a dict with them as 'logits'",
            fix="end the step with: return {'logits': logits, 'labels': labels}",
        )
    if isinstance(outputs, Mapping) and outputs.get("labels") is not None:
        return logits, outputs["labels"].to(logits.device)
    inputs, labels = read_batch(batch)
    if logits.shape[1] != count_rows(inputs):
        raise ShapeError(
            f"the step returned logits of shape {tuple(logits.shape)} for {count_rows(inputs)} inputs",
            expected="(exits, batch, classes)",
            fix="return logits.transpose(0, 1) if the batch is first, or a dict with the labels of these rows as well",
        )
    return logits, None if labels is None else labels.to(logits.device, non_blocking=True)
