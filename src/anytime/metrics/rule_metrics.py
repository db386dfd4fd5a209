"""The metrics of one rule, as `Summary.metrics` computes them and `anytime evaluate --json` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from anytime.display.brief import brief_repr
from anytime.errors import OptionError

PerExit = tuple[float, ...]
"""One value per exit."""
ByThreshold = Mapping[str, float]
"""Percent of inputs by threshold; the keys are those of the JSON document, such as "0.1"."""


@dataclass(frozen=True)
class ReliabilityBins:
    """The reliability diagram of one exit: mean confidence, accuracy and number of inputs per bin of confidence."""

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    count: tuple[float, ...]


@dataclass(frozen=True)
class Consistency:
    """How the label's probability follows the cost, see `anytime.metrics.properties`; None where it does not change.

    Without labels it is the final answer's probability, here and in `DiminishingReturns`.
    """

    correlation: float | None
    exponent: float | None
    concordance: float | None


@dataclass(frozen=True)
class DiminishingReturns:
    """Whether the gains come early, see `anytime.metrics.properties`; `gains` has one value per exit but the first."""

    gains: tuple[float, ...]
    concavity_gap: float
    concave_percent: float


@dataclass(frozen=True, kw_only=True)
class RuleMetrics:
    """The metrics of one rule. docs/metrics.md defines each.

    Metrics that need labels or prediction sets are None where there are none; `mean_iou` is of dense predictions only, and not
    in the JSON document of others. The order of the fields is that of the document.
    """

    accuracy: PerExit | None = None
    label_probability: PerExit | None = None
    label_drop_percent: ByThreshold | None = None
    mean_label_drop: float | None = None
    correct_monotone_percent: float | None = None
    never_correct_percent: float | None = None
    ever_correct_percent: float | None = None
    overthinking_percent: float | None = None
    hindsight_improvability_percent: PerExit | None = None
    learned: tuple[int, ...] | None = None
    forgot: tuple[int, ...] | None = None
    ece: PerExit | None = None
    nll: PerExit | None = None
    brier: PerExit | None = None
    oracle_accuracy: PerExit | None = None
    support_coverage: PerExit | None = None
    reliability: tuple[ReliabilityBins, ...] | None = None
    mean_iou: PerExit | None = None
    consistency: Consistency | None = None
    diminishing_returns: DiminishingReturns | None = None
    final_drop_percent: ByThreshold
    agreement: PerExit
    confidence: PerExit
    entropy: PerExit
    entropy_rise_percent: ByThreshold
    collapsed_percent: PerExit
    support_size: PerExit
    set_size: PerExit | None = None
    set_coverage: PerExit | None = None
    set_size_rise_percent: ByThreshold | None = None

    def __repr__(self) -> str:
        return brief_repr(self, "accuracy", "ece", "nll", "correct_monotone_percent", "entropy", "agreement")

    def to_json(self) -> dict[str, Any]:
        """A plain document of dicts and lists."""
        document: dict[str, Any] = _lists(asdict(self))
        if self.mean_iou is None:
            del document["mean_iou"]
        return document

    def scalars(self) -> dict[str, float]:
        """The metrics as a flat dict of numbers, for a logger: `accuracy/exit_2`, `label_drop_percent/0.1`, `mean_label_drop`.

        Metrics that are None and the bins of the reliability diagrams are left out.
        """
        found: dict[str, float] = {}
        for name, value in self.to_json().items():
            if isinstance(value, dict):
                found |= {f"{name}/{part}": each for part, each in value.items() if isinstance(each, int | float)}
            elif isinstance(value, list) and name != "reliability":
                found |= {f"{name}/exit_{exit}": each for exit, each in enumerate(value, 1)}
            elif isinstance(value, int | float):
                found[name] = value
        return found

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RuleMetrics:
        """The metrics in a document that `to_json` made; names that are not metrics are ignored."""
        known = {field.name: _tuples(document[field.name]) for field in fields(cls) if field.name in document}
        try:
            for name, kind in (("consistency", Consistency), ("diminishing_returns", DiminishingReturns)):
                if known.get(name) is not None:
                    known[name] = kind(**known[name])
            if known.get("reliability") is not None:
                known["reliability"] = tuple(ReliabilityBins(**bins) for bins in known["reliability"])
            return cls(**known)
        except TypeError as error:
            raise OptionError(
                f"metrics of a rule that cannot be read ({error})",
                expected="an entry of 'rules' in a document of anytime evaluate --json",
                fix="write the document again with anytime evaluate --json",
            ) from error


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _lists(each) for name, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
