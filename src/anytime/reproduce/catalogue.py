"""Every figure and table of the paper by the name of what it shows, and the module that measures it.

A module of `anytime.reproduce.studies` has one function, `study(context)`, and is loaded when it is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from anytime.errors import OptionError
from anytime.reproduce import needs
from anytime.reproduce.needs import Need

if TYPE_CHECKING:
    from anytime.reproduce.finding import Finding
    from anytime.reproduce.runs import Runs

Scale = Literal["smoke", "small", "full"]


@dataclass(frozen=True)
class Context:
    """What a study is given.

    Attributes:
        study: The study itself.
        runs: The runs at hand.
        scale: How much work may be done.
        images: Folder with the images of CIFAR, for what cannot be had from logits; None where there is none.
    """

    study: Study
    runs: Runs
    scale: Scale
    images: Path | None = None

    def finding(self, **parts: Any) -> Finding:
        """A finding of this study at this scale, from what was found."""
        from anytime.reproduce.finding import Finding

        return Finding(self.study.name, self.study.shows, self.study.figure, self.scale, **parts)


@dataclass(frozen=True)
class Study:
    """One figure or table.

    Attributes:
        name: Of the study, on the command line.
        shows: What it shows, in a few words.
        figure: The paper's figure or table.
        needs: The runs it needs.
        module: In `anytime.reproduce.studies`.
    """

    name: str
    shows: str
    figure: str
    needs: tuple[Need, ...]
    module: str

    def run(self, runs: Runs, *, scale: Scale = "full", images: str | Path | None = None) -> Finding:
        """Measure.

        Args:
            runs: The runs at hand.
            scale: `smoke` for seconds, `small` for minutes, `full` for the paper's size.
            images: Folder with CIFAR, which some figures can be completed from.
        """
        module = import_module(f"anytime.reproduce.studies.{self.module}")
        folder = None if images is None else Path(images)
        found = cast("Finding", module.study(Context(self, runs, scale, folder)))
        return found if scale == "full" else found.unasked()


CATALOGUE: tuple[Study, ...] = (
    Study(
        "marginal-and-conditional",
        "better on average, worse for many an input",
        "Figure 1",
        (needs.MSDNET_100,),
        "marginal",
    ),
    Study("trajectories", "ten inputs under the product", "Figure 2", (needs.MSDNET_100,), "trajectories"),
    Study("accuracy", "accuracy at each exit, with deviations", "Figure 3, B.11", (needs.MSDNET,), "accuracy"),
    Study("label-drops", "falls of the true class's probability", "Figure 4", (needs.MSDNET,), "label_drops"),
    Study("uncertainty", "entropy and size of prediction sets", "Figure 5", (needs.MSDNET_100,), "uncertainty"),
    Study("calibration-gap", "calibration error at each exit", "Figure 6", (needs.MSDNET_100,), "calibration_gap"),
    Study("final-answer-drops", "falls of the final answer's probability", "B.1.1", (needs.MSDNET,), "final_drops"),
    Study("correctness", "monotone and never correct inputs", "Table 1, B.1.2", (needs.MSDNET,), "correctness"),
    Study("ablation", "activations × product or mixture", "B.2", (needs.MSDNET_100,), "ablation"),
    Study("sigmoid", "a sigmoid in place of the ReLU", "B.2", (needs.MSDNET_100,), "sigmoid"),
    Study("collaboration", "with an oracle's help, sound and as released", "B.3", (needs.MSDNET_100,), "collaboration"),
    Study("static-threshold", "a threshold above zero", "B.3.1", (needs.MSDNET_100,), "static_threshold"),
    Study("adaptive-threshold", "a threshold that follows confidence", "B.3.1", (needs.MSDNET_100,), "adaptive_threshold"),
    Study("finetune", "training with the product", "B.3.2", (needs.FINETUNED,), "finetune"),
    Study("text", "texts, from 2 classes to 150", "B.4", (needs.TEXT,), "text"),
    Study("overthinking", "right at some exit, wrong at the last", "B.5", (needs.MSDNET,), "overthinking"),
    Study("learn-and-forget", "first right, and first wrong again", "B.5", (needs.MSDNET_100,), "learn_and_forget"),
    Study("zero-time-waste", "the product on ZTW's heads", "B.5", (needs.ZTW,), "zero_time_waste"),
    Study("spiral", "the support of an ensemble shrinks", "B.6", (), "spiral"),
    Study("regression", "intervals of an ensemble shrink", "B.6", (), "regression"),
    Study("entropy-rise", "rises of entropy", "B.7", (needs.MSDNET,), "entropy_rise"),
    Study("set-size-rise", "rises of the prediction set's size", "B.7", (needs.MSDNET,), "set_size_rise"),
    Study("clip", "between Heaviside and ReLU", "B.8", (needs.MSDNET,), "clip"),
    Study("calibrated-baselines", "calibrated exits, with caching", "B.9", (needs.SEEDS_100,), "calibrated_baselines"),
    Study("budgeted-batch", "a mean cost for a batch", "B.10", (needs.MSDNET,), "budgeted_batch"),
    Study("dvit", "the product on vision transformers", "B.11", (needs.DVIT,), "dvit"),
    Study("l2w", "the product on networks with learned sample weights", "B.11", (needs.L2W,), "l2w"),
    Study("out-of-scope", "queries that belong to no class", "our own", (needs.OUT_OF_SCOPE,), "out_of_scope"),
    Study("deviations", "what the released code does otherwise", "our own", (needs.MSDNET_100,), "deviations"),
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
        f"there is no study {name!r}",
        expected="a name that `anytime reproduce list` shows, or all",
        fix=f"did you mean {close[0]!r}?" if close else "see `anytime reproduce list`",
    )


def names() -> Sequence[str]:
    """All names, in the paper's order."""
    return [study.name for study in CATALOGUE]
