"""Every figure has a name, and every name a function."""

from __future__ import annotations

import pytest

from anytime.errors import MissingRunError, OptionError
from anytime.reproduce import find, names, paper
from anytime.reproduce.runs import Runs

NAMES = [
    "marginal-and-conditional",
    "trajectories",
    "accuracy",
    "label-drops",
    "uncertainty",
    "calibration-gap",
    "final-answer-drops",
    "correctness",
    "ablation",
    "sigmoid",
    "collaboration",
    "static-threshold",
    "adaptive-threshold",
    "finetune",
    "text",
    "overthinking",
    "learn-and-forget",
    "zero-time-waste",
    "spiral",
    "regression",
    "entropy-rise",
    "set-size-rise",
    "clip",
    "calibrated-baselines",
    "budgeted-batch",
    "dvit",
    "l2w",
    "frontier",
    "out-of-scope",
    "deviations",
    "tiny-imagenet",
]


def test_the_catalogue_has_every_name_in_order() -> None:
    assert list(names()) == NAMES


def test_a_study_names_the_missing_run() -> None:
    with pytest.raises(MissingRunError, match="no run of l2w"):
        find("l2w").run(Runs())


def test_an_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(OptionError, match="label-drop") as caught:
        find("label-drop")
    assert "label-drops" in caught.value.fix


@pytest.mark.parametrize("values", paper.ACCURACY.values())
def test_the_papers_accuracies_are_percentages_of_seven_exits(values: tuple[float, ...]) -> None:
    assert len(values) == 7
    assert all(50 < value < 100 for value in values)


@pytest.mark.parametrize("values", paper.LABEL_DROPS.values())
def test_the_papers_drops_decrease_with_the_threshold(values: tuple[float, ...]) -> None:
    assert len(values) == len(paper.DROPS)
    assert list(values) == sorted(values, reverse=True)


def test_the_papers_table_is_as_printed() -> None:
    printed = ["91.8", "3.6", "96.2", "4.6", "97.8", "5.5", "70.8", "12.6", "87.2", "16.4", "90.8", "18.6"]
    assert [f"{value:g}" for pair in paper.CORRECTNESS.values() for value in pair] == printed
