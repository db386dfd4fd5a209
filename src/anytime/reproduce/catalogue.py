"""Every figure and table of the paper by name, and the function that measures it.

A study is a function of `anytime.reproduce.studies`, imported when it is called. It gets a `Draft`, which has the runs and
collects what the study finds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from anytime.errors import OptionError
from anytime.reproduce import needs
from anytime.reproduce.finding import Claim, Comparison, Finding, Measured
from anytime.reproduce.needs import Need

if TYPE_CHECKING:
    from anytime.reproduce.group import Group, Metric
    from anytime.reproduce.plots import ClassMap, Plot
    from anytime.reproduce.runs import Run, Runs

Scale = Literal["smoke", "small", "full"]


@dataclass
class Draft:
    """What a study starts from, and what it has found so far.

    Attributes:
        study: The study itself.
        runs: The available runs.
        scale: How much work to do.
        images: Folder with CIFAR images, for what logits do not show; None if there is none.
        used: The runs that were used.
        plots, comparisons, claims, numbers, table: See `Finding`.
    """

    study: Study
    runs: Runs
    scale: Scale
    images: Path | None = None
    used: list[Run] = field(default_factory=list)
    plots: list[Plot | ClassMap] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    table: list[tuple[str, ...]] = field(default_factory=list)
    _rows: list[str] = field(default_factory=list)

    def add(self, group: Group, *metrics: Metric, name: str | None = None) -> None:
        """Note that a group was used, and store its metrics under a name, by default that of its data set."""
        self.used += group.runs
        self._rows.append(f"{group.title.replace(', ', ' on ')}: {group.rows}")
        self.numbers[name or group.data] = group.numbers(*metrics)

    def claim(self, what: str, holds: bool, detail: str) -> None:
        """Add a claim with the numbers behind it."""
        self.claims.append(Claim(what, holds, detail))

    def compare(
        self,
        names: Sequence[str],
        ours: Sequence[Measured],
        theirs: Sequence[float | None],
        *,
        tolerance: float | Callable[[float], float] | None,
        unit: str = "",
        bounds: Mapping[int, float] | None = None,
    ) -> None:
        """Compare a curve with the paper's, where the paper's is known.

        Networks with another number of exits are not compared: their exits do not correspond to the paper's.

        Args:
            names: Of the points.
            ours: Our values.
            theirs: The paper's; None where not known.
            tolerance: Largest difference, or a function of the paper's value that gives it.
            unit: See `Comparison`.
            bounds: Upper bounds on some of our values, by position.
        """
        if len(ours) != len(theirs):
            return
        for place, (name, us, them) in enumerate(zip(names, ours, theirs, strict=True)):
            if them is not None:
                allowed = tolerance(them) if callable(tolerance) else tolerance
                self.comparisons.append(Comparison(name, them, us, allowed, (bounds or {}).get(place), unit=unit))

    def compare_exits(
        self,
        what: str,
        ours: Sequence[Measured],
        theirs: Sequence[float | None],
        *,
        tolerance: float,
        unit: str = "",
        from_second: bool = False,
    ) -> None:
        """Compare a curve over exits; only `from_second` where the first exit repeats that of another rule."""
        known = [None, *theirs[1:]] if from_second else theirs
        names = [f"{what}, exit {exit}" for exit in range(1, len(theirs) + 1)]
        self.compare(names, ours, known, tolerance=tolerance, unit=unit)

    def finding(self, *, note: str, rows: str | None = None, headings: tuple[str, ...] = ()) -> Finding:
        """The finding.

        Args:
            note: What to know about the numbers.
            rows: Which inputs were measured, unless `add` was called for every group.
            headings: Of the table.
        """
        return Finding(
            self.study.name,
            self.study.shows,
            self.study.figure,
            self.scale,
            runs=tuple(dict.fromkeys(run.name for run in self.used)),
            rows="; ".join(self._rows) if rows is None else rows,
            note=note,
            plots=tuple(self.plots),
            comparisons=tuple(self.comparisons),
            claims=tuple(self.claims),
            numbers=self.numbers,
            headings=headings,
            table=tuple(self.table),
        )


@dataclass(frozen=True)
class Study:
    """One figure or table.

    Attributes:
        name: On the command line.
        shows: What it shows.
        figure: The paper's figure or table.
        needs: The runs it needs.
        module: The module of `anytime.reproduce.studies` with its function, which has the study's name.
    """

    name: str
    shows: str
    figure: str
    needs: tuple[Need, ...]
    module: str

    def run(self, runs: Runs, *, scale: Scale = "full", images: str | Path | None = None) -> Finding:
        """Measure.

        Args:
            runs: The available runs.
            scale: `smoke` takes seconds, `small` minutes, `full` has the paper's size.
            images: Folder with CIFAR, which completes some figures.
        """
        measure = getattr(import_module(f"anytime.reproduce.studies.{self.module}"), self.name.replace("-", "_"))
        found = cast(Finding, measure(Draft(self, runs, scale, None if images is None else Path(images))))
        return found if scale == "full" else found.without_tolerances()


CIFAR_100, REPRODUCED, REPRODUCED_100 = (needs.MSDNET_100,), (needs.REPRODUCED,), (needs.REPRODUCED_100,)
CATALOGUE: tuple[Study, ...] = (
    Study("marginal-and-conditional", "better on average, worse for many inputs", "Figure 1", REPRODUCED_100, "inputs"),
    Study("trajectories", "ten inputs under the product", "Figure 2", REPRODUCED_100, "inputs"),
    Study("accuracy", "accuracy at each exit, with standard deviations", "Figure 3, B.11", REPRODUCED, "accuracy"),
    Study("label-drops", "drops of the true class's probability", "Figure 4", REPRODUCED, "drops"),
    Study(
        "uncertainty",
        "entropy and size of prediction sets",
        "Figure 5",
        (needs.MSDNET_100, needs.REPRODUCED_100),
        "uncertainty",
    ),
    Study("calibration-gap", "calibration error at each exit", "Figure 6", REPRODUCED_100, "uncertainty"),
    Study("final-answer-drops", "drops of the final answer's probability", "B.1.1", REPRODUCED, "drops"),
    Study("correctness", "monotone and never correct inputs", "Table 1, B.1.2", REPRODUCED, "correctness"),
    Study("ablation", "activations × product or mixture", "B.2", CIFAR_100, "activations"),
    Study("sigmoid", "a sigmoid in place of the ReLU", "B.2", CIFAR_100, "activations"),
    Study("collaboration", "confidence as a guide to errors, and deferral to an oracle", "B.3", CIFAR_100, "collaboration"),
    Study("static-threshold", "a threshold above zero", "B.3.1", CIFAR_100, "thresholds"),
    Study("adaptive-threshold", "a threshold that depends on confidence", "B.3.1", CIFAR_100, "thresholds"),
    Study("finetune", "training with the product", "B.3.2", (needs.FINETUNED,), "finetune"),
    Study("text", "text classification, from 2 classes to 150", "B.4", (needs.TEXT,), "text"),
    Study("overthinking", "correct at some exit, wrong at the last", "B.5", REPRODUCED, "correctness"),
    Study(
        "learn-and-forget",
        "correct for the first time, and wrong again for the first time",
        "B.5",
        REPRODUCED_100,
        "correctness",
    ),
    Study("zero-time-waste", "the product on ZTW's heads", "B.5", (needs.ZTW,), "accuracy"),
    Study("spiral", "the support of an ensemble shrinks", "B.6", (), "ensembles"),
    Study("regression", "intervals of an ensemble shrink", "B.6", (), "ensembles"),
    Study("entropy-rise", "rises of the entropy", "B.7", REPRODUCED, "drops"),
    Study("set-size-rise", "rises of the prediction set's size", "B.7", (needs.MSDNET,), "drops"),
    Study("clip", "between Heaviside and ReLU", "B.8", (needs.MSDNET,), "activations"),
    Study("calibrated-baselines", "calibrated exits, with caching", "B.9", (needs.SEEDS_100,), "calibrated_baselines"),
    Study("budgeted-batch", "a mean cost for a batch", "B.10", (needs.MSDNET,), "budgeted_batch"),
    Study("dvit", "the product on vision transformers", "B.11", (needs.DVIT,), "accuracy"),
    Study("l2w", "the product on networks with learned sample weights", "B.11", (needs.L2W,), "accuracy"),
    Study("frontier", "accuracy, drops and calibration of every rule", "our own", (needs.MSDNET,), "frontier"),
    Study("out-of-scope", "queries that belong to no class", "our own", (needs.OUT_OF_SCOPE,), "out_of_scope"),
    Study("deviations", "where the released code differs from the paper", "our own", CIFAR_100, "deviations"),
    Study(
        "tiny-imagenet",
        "200 classes, and drops over the number of classes",
        "our own",
        (needs.TINY, needs.REPRODUCED),
        "tiny_imagenet",
    ),
)


def find(name: str) -> Study:
    """The study of that name.

    >>> find("label-drops").figure
    'Figure 4'
    """
    for study in CATALOGUE:
        if study.name == name:
            return study
    close = difflib.get_close_matches(name, names(), n=1)
    raise OptionError(
        f"unknown study {name!r}",
        expected="a name that `anytime reproduce list` shows, or all",
        fix=f"did you mean {close[0]!r}?" if close else "run `anytime reproduce list` to see the names",
    )


def names() -> Sequence[str]:
    """All names, in the paper's order."""
    return [study.name for study in CATALOGUE]
