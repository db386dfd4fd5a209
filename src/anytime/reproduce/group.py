"""The metrics of runs that differ in their seed alone, averaged, as plots and as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Caching, Latest, Product, Rule
from anytime.evaluation import evaluate
from anytime.metrics import RuleMetrics, drop
from anytime.reproduce import paper
from anytime.reproduce.finding import Measured, each_over_seeds, over_seeds
from anytime.reproduce.needs import REPRODUCED, Need
from anytime.reproduce.plots import Plot, line, looks, over_exits
from anytime.reproduce.runs import Run, Runs, check_alike

RULES: dict[str, Rule[Any]] = {"latest": Latest(), "caching": Caching(), "product": Product()}
PLAIN = tuple(RULES)


Value = Sequence[float] | Mapping[str, float] | float | None


@dataclass(frozen=True)
class Metric:
    """A metric as studies read and draw it.

    Attributes:
        name: Its name in `anytime evaluate --json`.
        read: The value in the metrics of a rule: one per exit, one per threshold, or a single number; None if not measured.
        axis: Title of the y axis.
        x_title: Title of the x axis: the exit, or the threshold.
        factor: 100 for fractions, which are shown in percent.
        zero: Whether the y axis begins at zero.
    """

    name: str
    read: Callable[[RuleMetrics], Value]
    axis: str = "% of inputs"
    x_title: str = "exit"
    factor: float = 1.0
    zero: bool = False


ACCURACY = Metric("accuracy", lambda rule: rule.accuracy, "accuracy, %", factor=100)
LABEL_PROBABILITY = Metric("label_probability", lambda rule: rule.label_probability, "%", factor=100)
LABEL_DROPS = Metric("label_drop_percent", lambda rule: rule.label_drop_percent, x_title="drops by at least")
FINAL_DROPS = Metric("final_drop_percent", lambda rule: rule.final_drop_percent, x_title="drops by at least")
ENTROPY = Metric("entropy", lambda rule: rule.entropy, "nats", zero=True)
ENTROPY_RISES = Metric("entropy_rise_percent", lambda rule: rule.entropy_rise_percent, x_title="rises by at least, nats")
SET_SIZE = Metric("set_size", lambda rule: rule.set_size, "classes", zero=True)
SET_COVERAGE = Metric("set_coverage", lambda rule: rule.set_coverage, "%", factor=100)
SET_SIZE_RISES = Metric("set_size_rise_percent", lambda rule: rule.set_size_rise_percent, x_title="grows by at least, classes")
ECE = Metric("ece", lambda rule: rule.ece, "ECE", zero=True)
NLL = Metric("nll", lambda rule: rule.nll, "NLL")
BRIER = Metric("brier", lambda rule: rule.brier, "Brier score")
CONFIDENCE = Metric("confidence", lambda rule: rule.confidence, "mean confidence, %", factor=100, zero=True)
MEAN_LABEL_DROP = Metric("mean_label_drop", lambda rule: rule.mean_label_drop, "mean drop")
MONOTONE = Metric("correct_monotone_percent", lambda rule: rule.correct_monotone_percent)
NEVER_CORRECT = Metric("never_correct_percent", lambda rule: rule.never_correct_percent)
EVER_CORRECT = Metric("ever_correct_percent", lambda rule: rule.ever_correct_percent)
OVERTHINKING = Metric("overthinking_percent", lambda rule: rule.overthinking_percent)
HINDSIGHT = Metric(
    "hindsight_improvability_percent", lambda rule: rule.hindsight_improvability_percent, "% of wrong inputs", zero=True
)
COLLAPSED = Metric("collapsed_percent", lambda rule: rule.collapsed_percent)
SUPPORT_SIZE = Metric("support_size", lambda rule: rule.support_size, "classes")
ORACLE_ACCURACY = Metric("oracle_accuracy", lambda rule: rule.oracle_accuracy, "accuracy, %", factor=100)
LEARNED = Metric("learned", lambda rule: rule.learned, zero=True)
FORGOT = Metric("forgot", lambda rule: rule.forgot, zero=True)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one network on one data set, and their metrics.

    Attributes:
        runs: One per seed.
        metrics: Per rule, the metrics of each seed.
        kept: Whether they were measured on the test rows whose logits were kept, not on all of them.
    """

    runs: tuple[Run, ...]
    metrics: Mapping[str, Sequence[RuleMetrics]]
    kept: bool = False

    @classmethod
    def published(cls, runs: Sequence[Run], rules: Sequence[str] = PLAIN) -> Group:
        """The metrics on all test rows, as stored with the runs."""
        found = [run.metrics(rules) for run in runs]
        sizes = {run.name: {"exits": run.exits(), "classes": run.classes(), "test rows": run.rows()} for run in runs}
        check_alike(sizes)
        return cls(tuple(runs), {rule: [each[rule] for each in found] for rule in rules})

    @classmethod
    def measured(cls, runs: Sequence[Run], *rules: Mapping[str, Rule[Any]]) -> Group:
        """The metrics of other rules, on the rows whose logits were kept.

        Args:
            runs: One per seed.
            rules: By name; the same for all runs, or one mapping per run.
        """
        kept = [run.logits() for run in runs]
        check_alike(
            {run.name: {"exits": len(rows[0]), "classes": rows[0].shape[2]} for run, rows in zip(runs, kept, strict=True)}
        )
        every = rules * len(runs) if len(rules) == 1 else rules
        found = [evaluate(*rows, rules=dict(each), sets=None).rules for rows, each in zip(kept, every, strict=True)]
        return cls(tuple(runs), {rule: [each[rule] for each in found] for rule in every[0]}, kept=True)

    @property
    def data(self) -> str:
        """The data set."""
        return self.runs[0].data

    @property
    def title(self) -> str:
        """The network and the data set, for people."""
        return f"{paper.NETWORKS[self.runs[0].network]}, {title_of(self.data)}"

    @property
    def rows(self) -> str:
        """Which rows the numbers belong to."""
        return rows_in_words(self.runs, kept=self.kept)

    def merge(self, other: Group) -> Group:
        """The rules of both."""
        return replace(self, runs=(*self.runs, *other.runs), metrics={**self.metrics, **other.metrics})

    def per_seed(self, rule: str, metric: Metric) -> list[list[float]]:
        """A metric of one rule for each seed: the value per exit or threshold, or the single one."""
        found = []
        for place, metrics in enumerate(self.metrics[rule]):
            value = metric.read(metrics)
            if value is None:
                raise self.runs[place].lacks(f"{metric.name} for {rule} in test-metrics.json")
            many = list(value.values()) if isinstance(value, Mapping) else value
            found.append([metric.factor * each for each in (many if isinstance(many, Sequence) else [many])])
        return found

    def curve(self, rule: str, metric: Metric) -> list[Measured]:
        """A metric of one rule at each exit or threshold, over seeds."""
        return each_over_seeds(self.per_seed(rule, metric))

    def curves(self, metric: Metric) -> dict[str, list[Measured]]:
        """A metric of every rule."""
        return {rule: self.curve(rule, metric) for rule in self.metrics}

    def at(self, rule: str, metric: Metric, limit: float) -> Measured:
        """A metric with thresholds, at one of them."""
        return self.curve(rule, metric)[self.limits(metric).index(limit)]

    def all_at(self, metric: Metric, limit: float) -> dict[str, float]:
        """The mean of `at`, of every rule."""
        return {rule: self.at(rule, metric, limit).mean for rule in self.metrics}

    def over_exits(self, rule: str, metric: Metric) -> Measured:
        """The mean over the exits."""
        return over_seeds([sum(values) / len(values) for values in self.per_seed(rule, metric)])

    def all_over_exits(self, metric: Metric) -> dict[str, float]:
        """The mean of `over_exits`, of every rule."""
        return {rule: self.over_exits(rule, metric).mean for rule in self.metrics}

    def limits(self, metric: Metric) -> tuple[float, ...]:
        """The thresholds of a metric."""
        found = metric.read(next(iter(self.metrics.values()))[0])
        return tuple(float(limit) for limit in found) if isinstance(found, Mapping) else ()

    def plot(self, title: str, metric: Metric, *, known: Mapping[str, Sequence[float | None]] | None = None) -> Plot:
        """A metric over the exits or thresholds, one line per rule, with the paper's values as crosses."""
        thresholds = metric.x_title != "exit"
        x = self.limits(metric) if thresholds else None
        lines = [
            line(rule, self.curve(rule, metric), look, x=x, paper=(known or {}).get(rule, ()))
            for rule, look in looks(tuple(self.metrics)).items()
        ]
        if thresholds:
            return Plot(title, metric.x_title, metric.axis, tuple(lines), kind="symlog")
        return over_exits(title, metric.axis, lines, zero=metric.zero)

    def numbers(self, *metrics: Metric) -> dict[str, Any]:
        """Some metrics of every rule and seed, for programs."""
        return {
            rule: {metric.name: [metric.read(each) for each in seeds] for metric in metrics}
            for rule, seeds in self.metrics.items()
        }


def backbones(runs: Runs) -> list[Group]:
    """MSDNet on each data set, and IMTA on the same data if there is a run of it."""
    found = [(found, runs.find("imta", data)) for data, found in runs.by_data(REPRODUCED).items()]
    return [Group.published(part) for pair in found for part in pair if part]


def published(runs: Runs, need: Need) -> list[Group]:
    """The published metrics of a network, one group per data set."""
    return [Group.published(found) for found in runs.by_data(need).values()]


def ten_rows(probability: Tensor) -> Tensor:
    """The rows at the 5th, 15th, … 95th percentile of the drop of `probability`, `(exits, rows)`."""
    order = drop(probability).argsort(stable=True)
    places = ((torch.arange(10) + 0.5) / 10 * len(order)).long()
    return order[places]


TEN = (
    "The paper draws ten inputs at random; ten are so few that chance decides what they show, so ours are at the 5th, 15th, … "
    "95th percentile of the drop under the backbone."
)
TEN_AGAIN = "The ten inputs are chosen as in the study marginal-and-conditional; faint lines are the backbone's."


def title_of(data: str) -> str:
    """The name of a data set, for people."""
    return paper.DATA.get(data, data)


def seeds_in_words(runs: Sequence[Run]) -> str:
    """`5 seeds`."""
    seeds = len({run.name for run in runs})
    return f"{seeds} seed{'s' if seeds > 1 else ''}"


def rows_in_words(runs: Sequence[Run], *, kept: bool = False) -> str:
    """Which rows numbers belong to: all test rows, or those whose logits were kept."""
    if kept:
        return f"the {runs[0].logits()[0].shape[1]:,} test rows whose logits were kept, {seeds_in_words(runs)}"
    return f"{runs[0].rows():,} test rows, {seeds_in_words(runs)}"
