"""The metrics of `anytime.metrics.Metrics` as a torchmetrics metric: synchronised between processes, logged by Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

import torch
from torch import Tensor

from anytime.checks import check_count, check_flag
from anytime.combine import Rule
from anytime.combine.named import DEFAULT_RULES
from anytime.errors import MissingExtraError
from anytime.metrics import Metrics, RuleMetrics

try:
    from torchmetrics import Metric
except ImportError as error:
    raise MissingExtraError(
        "torchmetrics is not installed", expected="the extra torchmetrics", fix="pip install 'anytime-nn[torchmetrics]'"
    ) from error


class AnytimeMetric(Metric):
    """The metrics of each rule over batches, reduced over all processes by one sum.

    `compute` returns a flat dict of scalars, such as `product/accuracy/exit_3`, for `log_dict` and `MetricCollection`;
    `by_rule` returns the dataclasses of `anytime.evaluate`.

    Args:
        exits: The number of exits.
        rules: As for `anytime.metrics.Metrics`.
        costs: Cumulative cost up to each exit; 1, 2, 3, … by default.
        strict: Count drops above a threshold rather than at or above it.
        labelled: Whether batches have labels.
        options: Of `torchmetrics.Metric`.

    Example:
        >>> metric = AnytimeMetric(exits=3, rules=["product"])
        >>> metric.update(torch.randn(3, 8, 10), torch.arange(8))
        >>> metric.compute()["product/accuracy/exit_3"].shape
        torch.Size([])
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    sums: Tensor
    faults: Tensor

    def __init__(
        self,
        exits: int,
        rules: Sequence[str | Rule[Any]] | Mapping[str, Any] | str | Rule[Any] = DEFAULT_RULES,
        *,
        costs: Sequence[float] | None = None,
        strict: bool = False,
        labelled: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.exits = check_count(exits, "exits", low=2, fix="pass the number of exits of the model, such as exits=4")
        self.labelled = check_flag(labelled, "labelled")
        self._like = Metrics(rules, costs=costs, strict=strict)
        zeros = self._like.prepared(exits, labelled=labelled)
        self.add_state("sums", zeros.pack(), dist_reduce_fx="sum")
        self.add_state("faults", zeros.faults, dist_reduce_fx="min")
        # Of metrics whose states are equal after the first batch, a MetricCollection updates only one. Equal sums say nothing
        # about later batches, since rules and settings may differ: so no two metrics have all states in common.
        self.add_state("identity", torch.tensor([*uuid4().bytes]), dist_reduce_fx="min")

    def update(self, logits: Any, labels: Any = None) -> None:
        """Add a batch, as `Metrics.update` does: `(exits, batch, classes)` or a list, and `(batch,)`."""
        batch = self._like.prepared(self.exits, labelled=self.labelled)
        batch.update(logits, labels)
        self.sums = self.sums + batch.pack().to(self.sums.device)
        self.faults = torch.minimum(self.faults, batch.faults.to(self.faults.device))

    def set_dtype(self, dst_type: Any) -> Self:
        """Return the metric as it is: sums and counts keep the type that they need."""
        return self

    def compute(self) -> dict[str, Tensor]:
        """The metrics over all processes as scalars, `rule/metric/exit_1`."""
        found = self._found().items()
        return {
            f"{rule}/{name}": torch.tensor(value, device=self.sums.device)
            for rule, metrics in found
            for name, value in metrics.scalars().items()
        }

    def by_rule(self) -> dict[str, RuleMetrics]:
        """The metrics over all processes, as `Metrics.compute` returns them."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync, should_unsync=self._should_unsync):
            return self._found()

    def _found(self) -> dict[str, RuleMetrics]:
        metrics = self._like.prepared(self.exits, labelled=self.labelled)
        metrics.unpack(self.sums, self.faults)
        return metrics.compute()
