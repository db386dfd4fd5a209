"""Common mistakes with dense predictions and with what is shown: each error says what it got, what was expected and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.cli import run
from anytime.errors import (
    AnytimeError,
    DtypeError,
    LabelError,
    NonFiniteError,
    OptionError,
    OverwriteError,
    ScaleError,
    ShapeError,
)
from anytime.metrics import Metrics, RuleMetrics

GENERATOR = torch.Generator().manual_seed(0)
PIXELS = 3 * torch.randn(3, 4, 5, 6, 7, generator=GENERATOR)  # (exits, batch, classes, height, width)
LABELS = torch.randint(0, 5, (4, 6, 7), generator=GENERATOR)
UNLABELLED = LABELS.clone()
UNLABELLED[1, 2, 3] = 255
BAD = PIXELS.clone()
BAD[1, 2, 3, 4, 5] = math.nan
RULE = anytime.Product()


def step(logits: torch.Tensor) -> object:
    state, _ = RULE.step(RULE.start(3), PIXELS[0], class_dim=1)
    return RULE.step(state, logits)


def evaluated() -> anytime.evaluation.Evaluation:
    return anytime.evaluate(PIXELS[..., 0, 0], LABELS[..., 0, 0], sets=None)


class Segmenter:
    num_exits = 3

    def exits(self, x: torch.Tensor) -> object:
        return iter(PIXELS)


def runner(**options: object) -> object:
    with anytime.Runner(Segmenter(), "product", **options) as made:  # type: ignore[arg-type]
        return made.predict(torch.zeros(4, 3))


CALLS: dict[str, tuple[Callable[[], object], type[AnytimeError], str]] = {
    "pixels without class_dim": (lambda: RULE(PIXELS), ShapeError, "class_dim=2"),
    "pixels evaluated without class_dim": (lambda: anytime.evaluate(PIXELS, LABELS), ShapeError, "class_dim=2"),
    "pixels in a loop": (lambda: Metrics().update(PIXELS, LABELS), ShapeError, "class_dim=2"),
    "a list of pixels in a loop": (lambda: Metrics().update(list(PIXELS), LABELS), ShapeError, "class_dim=2"),
    "labels of other pixels in a loop": (lambda: Metrics(class_dim=2).update(PIXELS, LABELS[:, 1:]), ShapeError, "(4, 6, 7)"),
    "ignored labels without class_dim in a loop": (lambda: Metrics(ignore_index=255), OptionError, "class_dim"),
    "the batch as classes": (lambda: RULE(PIXELS, class_dim=1), OptionError, "dimension of the batch"),
    "the exits as classes": (lambda: RULE(PIXELS, class_dim=-5), OptionError, "dimension of the exits"),
    "a dimension that is not there": (lambda: RULE(PIXELS, class_dim=5), OptionError, "at most 4"),
    "a name of a dimension": (lambda: RULE(PIXELS, class_dim="classes"), OptionError, "whole number"),
    "logits without exits": (lambda: RULE(PIXELS[0, 0, 0], class_dim=1), ShapeError, "at least 3 dimensions"),
    "NaN at a pixel": (lambda: RULE(BAD, class_dim=2), NonFiniteError, "exit 2, input 2, position (4, 5), class 3"),
    "NaN at a pixel of a step": (lambda: step(BAD[1]), NonFiniteError, "input 2, position (4, 5)"),
    "probabilities of pixels": (lambda: RULE(PIXELS.softmax(2), class_dim=2), ScaleError, "probabilities=True"),
    "a step of other images": (lambda: step(PIXELS[1][:2]), ShapeError, "same inputs"),
    "a step of all exits": (lambda: RULE.step(RULE.start(3), PIXELS[0]), ShapeError, "class_dim=1"),
    "255 as a class": (lambda: anytime.evaluate(PIXELS, UNLABELLED, class_dim=2), LabelError, "input 1, position (2, 3)"),
    "the fix for 255": (lambda: anytime.evaluate(PIXELS, UNLABELLED, class_dim=2), LabelError, "ignore_index=255"),
    "all pixels ignored": (
        lambda: anytime.evaluate(PIXELS, LABELS * 0, class_dim=2, ignore_index=0),
        LabelError,
        "at least one position",
    ),
    "one label per image": (lambda: anytime.evaluate(PIXELS, LABELS[:, 0, 0], class_dim=2), ShapeError, "(4, 6, 7)"),
    "labels of other images": (lambda: anytime.evaluate(PIXELS, LABELS[:2], class_dim=2), ShapeError, "(4, 6, 7)"),
    "an ignored label without class_dim": (
        lambda: anytime.evaluate(PIXELS[..., 0, 0], LABELS[:, 0, 0], ignore_index=255),
        OptionError,
        "class_dim",
    ),
    "an ignored label without labels": (
        lambda: anytime.evaluate(PIXELS, class_dim=2, ignore_index=255),
        OptionError,
        "no labels",
    ),
    "half a label to ignore": (
        lambda: anytime.evaluate(PIXELS, LABELS, class_dim=2, ignore_index=0.5),
        OptionError,
        "ignore_index=255",
    ),
    "a fit on pixels without class_dim": (lambda: anytime.fit_temperature(PIXELS, LABELS), ShapeError, "class_dim"),
    "a fit with one label per image": (
        lambda: anytime.fit_product(PIXELS, LABELS[:, 0, 0], class_dim=2),
        ShapeError,
        "one class index per position",
    ),
    "a runner of pixels without class_dim": (runner, ShapeError, "Runner(model, class_dim=1)"),
    "a runner of pixels with another engine": (lambda: runner(class_dim=1, engine="folded"), OptionError, "eager"),
    "a runner of pixels with a policy": (
        lambda: runner(class_dim=1, policy=anytime.policy.Confidence(0.9)),
        OptionError,
        "omit the policy",
    ),
    "a runner with the batch as classes": (lambda: runner(class_dim=0), OptionError, "class_dim=1"),
    "a runner with a dimension that is not there": (lambda: runner(class_dim=5), OptionError, "pass class_dim=1 for (batch,"),
    "pixels to collect": (lambda: anytime.collect_logits(Segmenter(), [torch.zeros(4, 3)]), ShapeError, "Metrics(class_dim=2)"),
    "a report of metrics": (
        lambda: anytime.write_report(evaluated().rules["product"], "report"),
        DtypeError,
        "evaluate the logits first",  # type: ignore[arg-type]
    ),
    "a report without a folder": (lambda: anytime.write_report(evaluated(), None), OptionError, "'report'"),  # type: ignore[arg-type]
    "a table of an unknown rule": (lambda: evaluated().table("prodct"), OptionError, "did you mean 'product'"),
    "a plot of an unknown chart": (lambda: evaluated().plot("acuracy"), OptionError, "did you mean 'accuracy'"),
    "a figure as axes": (lambda: evaluated().plot(ax="axes"), DtypeError, "subplots"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_is_explained(mistake: str, explained: Any) -> None:
    explained(*CALLS[mistake])


def test_a_report_never_replaces_a_folder_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OverwriteError):
        anytime.write_report(evaluated(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ([], "--class-dim 2 or class_dim=2"),
        (["--class-dim", "1"], "dimension of the batch"),
        (["--class-dim", "2"], "ignore_index=255"),
        (["--ignore-index", "255"], "without class_dim"),
        (["--class-dim", "2", "--calibration", "FILE"], "omit --calibration"),
    ],
)
def test_a_command_line_is_explained(options: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "pixels.npz")
    np.savez(file, logits=PIXELS.numpy(), labels=UNLABELLED.numpy())
    assert run(["evaluate", file, *(file if option == "FILE" else option for option in options)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert hint in printed.err
    assert "fix:" in printed.err


def test_metrics_of_other_predictions_have_no_iou() -> None:
    metrics = evaluated().rules["product"]
    assert "mean_iou" not in metrics.to_json()
    assert RuleMetrics.from_json(metrics.to_json()) == metrics
