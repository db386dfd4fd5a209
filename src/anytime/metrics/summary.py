"""Everything measured about one rule, gathered block by block.

Every metric is a function of sums over inputs. A `Summary` holds those sums, two of them can be merged, and `metrics`
turns them into `RuleMetrics`. This evaluates a file larger than memory in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from anytime.errors import OptionError
from anytime.metrics import calibration, monotonicity, properties
from anytime.metrics.rule_metrics import Consistency, DiminishingReturns, ReliabilityBins, RuleMetrics
from anytime.metrics.trajectories import Trajectories

_Key = TypeVar("_Key")


class Summary:
    """Sums over the inputs seen so far, of one rule, or of several whose trajectories are joined.

    Args:
        costs: Cumulative cost of each exit, `(exits,)`.
        labelled: Whether there are labels.
        strict: Count drops and rises that exceed a threshold (the released code) rather than reach it (the paper).
    """

    def __init__(self, costs: Tensor, *, labelled: bool = True, strict: bool = False) -> None:
        self.costs = costs.double()
        self.labelled = labelled
        self.strict = strict
        self.sums: dict[str, Tensor] = {}

    def add(self, seen: Trajectories) -> None:
        """Add the trajectories of some inputs, without waiting for a GPU."""
        quality = seen.label_probability if self.labelled else seen.final
        costs = self.costs.to(quality.device, non_blocking=True)
        concordance, moves = properties.concordance(quality, costs)
        self._add("rows", _count(seen.answer))
        self._reach("final_drop", monotonicity.drop(seen.final), monotonicity.DROPS)
        self._reach("entropy_rise", monotonicity.rise(seen.entropy), monotonicity.ENTROPY_RISES)
        self._add_sums(
            entropy=seen.entropy,
            confidence=seen.confidence,
            support=seen.support,
            collapsed=seen.fell_back,
            agree=seen.answer == seen.answer[-1],
            quality=quality,
            concordance=concordance,  # 0 for inputs that do not move
            moves=moves,
            concave=properties.is_concave(quality, costs),
            **(self._labelled(seen) if self.labelled else {}),
        )

    def add_sets(self, size: Tensor, covered: Tensor | None = None) -> None:
        """Add the sizes of prediction sets and whether they contain the label, each `(exits, batch)`."""
        self._add("set_rows", _count(size))
        self._reach("set_size_rise", monotonicity.rise(size), monotonicity.SIZE_RISES)
        self._add_sums(set_size=size, **({} if covered is None else {"set_covered": covered}))

    def add_classes(self, seen: Trajectories, labels: Tensor, classes: int) -> None:
        """Add what the mean intersection over union counts per class: `labels` are those of the trajectories, `(batch,)`."""
        assert seen.correct is not None
        self._add("labelled_as", torch.bincount(labels, minlength=classes))
        answers = list(zip(seen.answer, seen.correct, strict=True))
        self._add("answered_as", torch.stack([torch.bincount(answer, minlength=classes) for answer, _ in answers]))
        self._add("correct_as", torch.stack([torch.bincount(answer[ok], minlength=classes) for answer, ok in answers]))

    def merge(self, other: Summary) -> None:
        """Add everything that another summary of the same rule has seen."""
        here, there = (f"costs={each.costs.tolist()}, labelled={each.labelled}, strict={each.strict}" for each in (self, other))
        if here != there:
            raise OptionError(
                f"metrics with {there}", expected=f"metrics with {here}", fix="create both with the same arguments"
            )
        for name, value in other.sums.items():
            self._add(name, value)

    def metrics(self) -> RuleMetrics:
        """The metrics over all inputs added so far."""
        return metrics_of({"": self})[""]

    def _metrics(self) -> RuleMetrics:
        """The metrics from sums on the CPU that `metrics_of` prepared."""
        rows = float(self.sums["rows"]) if "rows" in self.sums else 0.0
        if rows == 0:
            raise OptionError("a summary of no inputs", expected="at least one input", fix="call add() first")
        return RuleMetrics(
            **(self._labelled_metrics(rows) if self.labelled else {}),
            **self._properties(rows),
            final_drop_percent=self._percents("final_drop", monotonicity.DROPS, rows),
            agreement=self._mean("agree", rows),
            confidence=self._mean("confidence", rows),
            entropy=self._mean("entropy", rows),
            entropy_rise_percent=self._percents("entropy_rise", monotonicity.ENTROPY_RISES, rows),
            collapsed_percent=self._mean("collapsed", rows / 100),
            support_size=self._mean("support", rows),
            **self._class_metrics(),
            **self._set_metrics(),
        )

    def _labelled(self, seen: Trajectories) -> dict[str, Tensor]:
        """Add the counts that need labels; returns the quantities to sum over inputs."""
        assert seen.label is not None
        assert seen.correct is not None
        quality, correct = seen.label_probability, seen.correct
        drops, improvable = monotonicity.drop(quality), monotonicity.improvable(correct)
        self._reach("label_drop", drops, monotonicity.DROPS)
        self._add("reliability", calibration.histogram(seen.confidence, correct, calibration.ECE_BINS))
        self._add("deferral", calibration.histogram(seen.confidence, correct, calibration.ORACLE_BINS))
        return {
            "correct": correct,
            "label_drop_sum": drops,
            "monotone": monotonicity.is_monotone(correct),
            "ever": correct.any(0),
            "improvable": improvable,
            "learned": monotonicity.first(correct),
            "forgot": monotonicity.first(improvable),
            "nll": calibration.nll(seen.label),
            "brier": calibration.brier(seen.square, quality),
            "inside": seen.label > -torch.inf,
        }

    def _labelled_metrics(self, rows: float) -> dict[str, Any]:
        sums = self.sums
        correct, ever = sums["correct"], float(sums["ever"])
        wrong = rows - correct
        return {
            "accuracy": tuple((correct / rows).tolist()),
            "label_probability": self._mean("quality", rows),
            "label_drop_percent": self._percents("label_drop", monotonicity.DROPS, rows),
            "mean_label_drop": float(sums["label_drop_sum"]) / rows,
            "correct_monotone_percent": 100 * float(sums["monotone"]) / rows,
            "never_correct_percent": 100 * (rows - ever) / rows,
            "ever_correct_percent": 100 * ever / rows,
            "overthinking_percent": 100 * (ever - float(correct[-1])) / rows,
            "hindsight_improvability_percent": tuple((100 * sums["improvable"] / wrong.clamp(min=1)).tolist()),
            "learned": tuple(sums["learned"].long().tolist()),
            "forgot": tuple(sums["forgot"].long().tolist()),
            "ece": tuple(calibration.ece(sums["reliability"]).tolist()),
            "nll": self._mean("nll", rows),
            "brier": self._mean("brier", rows),
            "oracle_accuracy": tuple(sums["oracle_accuracy"].tolist()),
            "support_coverage": self._mean("inside", rows),
            "reliability": _reliability(sums["reliability"]),
        }

    def _properties(self, rows: float) -> dict[str, Any]:
        """Consistency and diminishing returns of the label's probability, or of the final answer's without labels."""
        sums = self.sums
        quality = sums["quality"] / rows
        correlation, exponent = properties.error_against_cost(quality, self.costs)
        return {
            "consistency": Consistency(
                correlation,
                exponent,
                concordance=float(sums["concordance"]) / float(sums["moves"]) if sums["moves"] else None,
            ),
            "diminishing_returns": DiminishingReturns(
                gains=tuple(properties.gains(quality, self.costs).tolist()),
                concavity_gap=float(properties.concavity_gap(quality[:, None], self.costs)),
                concave_percent=100 * float(sums["concave"]) / rows,
            ),
        }

    def _class_metrics(self) -> dict[str, Any]:
        if "labelled_as" not in self.sums:
            return {}
        both = self.sums["correct_as"]
        return {"mean_iou": tuple(calibration.mean_iou(both, self.sums["answered_as"], self.sums["labelled_as"]).tolist())}

    def _set_metrics(self) -> dict[str, Any]:
        rows = float(self.sums["set_rows"]) if "set_rows" in self.sums else 0.0
        if rows == 0:
            return {}
        return {
            "set_size": self._mean("set_size", rows),
            "set_coverage": self._mean("set_covered", rows) if "set_covered" in self.sums else None,
            "set_size_rise_percent": self._percents("set_size_rise", monotonicity.SIZE_RISES, rows),
        }

    def _add(self, name: str, value: Tensor) -> None:
        value, held = value.double(), self.sums.get(name)
        self.sums[name] = value if held is None else held + value.to(held.device)

    def _add_sums(self, **quantities: Tensor) -> None:
        """Add sums over inputs; quantities of the same shape and type take the operations of one."""
        alike: dict[Any, dict[str, Tensor]] = {}
        for name, value in quantities.items():
            alike.setdefault((value.shape, value.dtype), {})[name] = value
        for some in alike.values():
            for name, value in zip(some, torch.stack(list(some.values())).double().sum(-1), strict=True):
                self._add(name, value)

    def _reach(self, name: str, values: Tensor, thresholds: tuple[float, ...]) -> None:
        self._add(name, monotonicity.reach(values, thresholds, strict=self.strict))

    def _mean(self, name: str, rows: float) -> tuple[float, ...]:
        return tuple((self.sums[name] / rows).tolist())

    def _percents(self, name: str, thresholds: tuple[float, ...], rows: float) -> dict[str, float]:
        counts = self.sums[name].tolist()
        return {str(limit): 100 * count / rows for limit, count in zip(thresholds, counts, strict=True)}


def together(seen: Mapping[_Key, Trajectories]) -> list[list[_Key]]:
    """The rules whose trajectories to join: on a GPU, where an operation takes long to start, all with numbers of one type."""
    groups: dict[Any, list[_Key]] = {}
    for name, each in seen.items():
        values = each.entropy
        groups.setdefault(name if is_read_at_once(values) else (values.dtype, values.device), []).append(name)
    return list(groups.values())


def joined(rules: Sequence[Any]) -> Any:
    """Trajectories, or tensors `(exits, batch)`, of the same inputs under several rules as one, `(exits, rules, batch)`."""
    first = rules[0]
    if len(rules) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.stack(list(rules), 1)
    return type(first)(**{field.name: joined([getattr(each, field.name) for each in rules]) for field in fields(first)})


@contextmanager
def joint(rules: Sequence[Summary]) -> Iterator[Summary]:
    """A summary to which to add what is joined of these rules; its sums are then added to theirs."""
    whole = Summary(rules[0].costs, labelled=rules[0].labelled, strict=rules[0].strict)
    yield whole
    for name, value in whole.sums.items():
        parts = [value] if len(rules) == 1 else value.unbind(min(value.ndim - 1, 1))
        for rule, part in zip(rules, parts, strict=True):
            rule._add(name, part)


def pack(values: Iterable[Tensor]) -> Tensor:
    """Tensors on one device as one float64 vector."""
    return torch.cat([value.double().reshape(-1) for value in values])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors of a vector from `pack`, with the shapes of `like`."""
    parts = torch.split(packed, [value.numel() for value in like])
    return (part.view(value.shape) for part, value in zip(parts, like, strict=True))


def metrics_of(summaries: Mapping[_Key, Summary]) -> dict[_Key, RuleMetrics]:
    """The metrics of each rule. Sums on a GPU are copied together, as each copy would wait for it, and only what is needed."""
    known = {name: copy(summary) for name, summary in summaries.items()}
    for summary in known.values():
        summary.sums = dict(summary.sums)
        if (table := summary.sums.pop("deferral", None)) is not None:
            summary.sums["oracle_accuracy"] = calibration.oracle_accuracy(table)
    sums = [value for summary in known.values() for value in summary.sums.values()]
    if any(value.device.type != "cpu" for value in sums):
        values = unpack(pack(sums).cpu(), sums)
        for summary in known.values():
            summary.sums = dict(zip(summary.sums, values, strict=False))
    return {name: summary._metrics() for name, summary in known.items()}


def is_read_at_once(values: Tensor) -> bool:
    """Whether reading a value does not wait for queued work, as it does on a GPU."""
    return values.device.type == "cpu"


def _count(values: Tensor) -> Tensor:
    """The number of inputs, for each of several rules."""
    return torch.full(values.shape[1:-1], values.shape[-1], dtype=torch.float64, device=values.device)


def _reliability(table: Tensor) -> tuple[ReliabilityBins, ...]:
    count, confidence, right = table.unbind(-1)
    held = count.clamp(min=1)
    columns = (confidence / held, right / held, count)
    return tuple(ReliabilityBins(*(tuple(column[exit].tolist()) for column in columns)) for exit in range(table.shape[0]))
