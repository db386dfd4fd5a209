"""Everything measured about one rule, gathered block by block.

Every metric is a function of sums over inputs. A `Summary` holds those sums, two of them can be merged, and `metrics`
turns them into `RuleMetrics`. This evaluates a file larger than memory in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anytime.errors import OptionError
from anytime.metrics import calibration, monotonicity, properties
from anytime.metrics.rule_metrics import Consistency, DiminishingReturns, ReliabilityBins, RuleMetrics
from anytime.metrics.trajectories import Trajectories


class Summary:
    """Sums over the inputs seen so far.

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
        """Add the trajectories of some inputs."""
        device = seen.answer.device
        costs = self.costs.to(device, non_blocking=True)
        self._add("rows", torch.full((), seen.answer.shape[1], device=device))
        self._add("entropy", _over_inputs(seen.entropy))
        self._add("confidence", _over_inputs(seen.confidence))
        self._add("support", _over_inputs(seen.support))
        self._add("collapsed", _over_inputs(seen.fell_back))
        self._add("agree", _over_inputs(seen.answer == seen.answer[-1]))
        self._reach("final_drop", monotonicity.drop(seen.final), monotonicity.DROPS)
        self._reach("entropy_rise", monotonicity.rise(seen.entropy), monotonicity.ENTROPY_RISES)
        if self.labelled:
            self._add_labelled(seen)
        quality = seen.label_probability if self.labelled else seen.final
        self._add("quality", _over_inputs(quality))
        concordance, moves = properties.concordance(quality, costs)
        self._add("concordance", concordance.double().sum())  # 0 for inputs that do not move
        self._add("moves", moves.sum())
        self._add("concave", properties.is_concave(quality, costs).sum())

    def add_sets(self, size: Tensor, covered: Tensor | None = None) -> None:
        """Add the sizes of prediction sets and whether they contain the label, each `(exits, batch)`."""
        self._add("set_rows", torch.full((), size.shape[1], device=size.device))
        self._add("set_size", _over_inputs(size))
        self._reach("set_size_rise", monotonicity.rise(size), monotonicity.SIZE_RISES)
        if covered is not None:
            self._add("set_covered", _over_inputs(covered))

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
        if any(value.device.type != "cpu" for value in self.sums.values()):
            return self.cpu().metrics()
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

    def cpu(self) -> Summary:
        """A copy with the sums on the CPU."""
        copy = Summary(self.costs, labelled=self.labelled, strict=self.strict)
        copy.sums = {name: value.cpu() for name, value in self.sums.items()}
        return copy

    def _add_labelled(self, seen: Trajectories) -> None:
        assert seen.label is not None
        assert seen.correct is not None
        quality, correct = seen.label_probability, seen.correct
        self._add("correct", _over_inputs(correct))
        drops = monotonicity.drop(quality)
        self._reach("label_drop", drops, monotonicity.DROPS)
        self._add("label_drop_sum", drops.double().sum())
        self._add("monotone", monotonicity.is_monotone(correct).sum())
        self._add("ever", correct.any(0).sum())
        self._add("improvable", _over_inputs(monotonicity.improvable(correct)))
        self._add("learned", _over_inputs(monotonicity.learned(correct)))
        self._add("forgot", _over_inputs(monotonicity.forgot(correct)))
        self._add("nll", _over_inputs(calibration.nll(seen.label)))
        self._add("brier", _over_inputs(calibration.brier(seen.square, quality)))
        self._add("inside", _over_inputs(seen.label > -torch.inf))
        self._add("reliability", calibration.histogram(seen.confidence, correct, calibration.ECE_BINS))
        self._add("deferral", calibration.histogram(seen.confidence, correct, calibration.ORACLE_BINS))

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
            "oracle_accuracy": tuple(calibration.oracle_accuracy(sums["deferral"]).tolist()),
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

    def _reach(self, name: str, values: Tensor, thresholds: tuple[float, ...]) -> None:
        self._add(name, monotonicity.reach(values, thresholds, strict=self.strict))

    def _mean(self, name: str, rows: float) -> tuple[float, ...]:
        return tuple((self.sums[name] / rows).tolist())

    def _percents(self, name: str, thresholds: tuple[float, ...], rows: float) -> dict[str, float]:
        counts = self.sums[name].tolist()
        return {str(limit): 100 * count / rows for limit, count in zip(thresholds, counts, strict=True)}


def _over_inputs(values: Tensor) -> Tensor:
    return values.double().sum(1)


def _reliability(table: Tensor) -> tuple[ReliabilityBins, ...]:
    count, confidence, right = table.unbind(-1)
    held = count.clamp(min=1)
    columns = (confidence / held, right / held, count)
    return tuple(ReliabilityBins(*(tuple(column[exit].tolist()) for column in columns)) for exit in range(table.shape[0]))
