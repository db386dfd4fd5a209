"""Common mistakes in saving and loading models: each error says what was passed, what was expected and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytime
from anytime.cli import run
from anytime.errors import AnytimeError, FormatError, MissingFileError, OptionError, OverwriteError
from anytime.models import Ensemble
from anytime.policy import Confidence

X = torch.zeros(2, 4)


def make_backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))


def attached() -> Any:
    return anytime.attach_exits(make_backbone(), at=["1"], example=X)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders to load from, and places to save to."""
    place = tmp_path_factory.mktemp("saved")
    anytime.save(attached(), place / "attached")
    anytime.save(anytime.create_model("mlp-toy", classes=6), place / "zoo")
    anytime.save(Ensemble([make_backbone(), nn.Linear(4, 6)]), place / "ensemble")
    own_heads = anytime.attach_exits(make_backbone(), at=["1"], example=X, head=lambda shape: nn.Linear(shape[0], 6))
    anytime.save(own_heads, place / "heads")
    (place / "notes").mkdir()
    (place / "notes" / "mine.txt").write_text("mine")
    (place / "file").write_text("mine")
    return {path.name: path for path in place.iterdir()} | {"new": place / "new", "nothing": place / "nothing"}


Places = dict[str, Path]
THREE = torch.randn(3, 30, 6, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 6

SAVING: dict[str, tuple[Callable[[Places], object], type[AnytimeError], str]] = {
    "a function that needs an argument": (
        lambda at: anytime.load(at["attached"], build=lambda width: make_backbone()),  # type: ignore[misc, arg-type]
        OptionError,
        "build needs width",
    ),
    "a class that needs arguments": (
        lambda at: anytime.load(at["attached"], build=nn.Linear),
        OptionError,
        "build needs in_features, out_features",
    ),
    "heads of another width": (
        lambda at: anytime.load(at["heads"], build=make_backbone, head=lambda shape: nn.Linear(3, 6)),
        FormatError,
        "pass build and head as the model was saved with",
    ),
    "a bare module": (lambda at: anytime.save(make_backbone(), at["new"]), OptionError, "attach_exits"),
    "a fitted object": (lambda at: anytime.save(Confidence(0.5), at["new"]), OptionError, "fitted.save"),  # type: ignore[arg-type]
    "a folder of something else": (lambda at: anytime.save(attached(), at["notes"]), OverwriteError, "did not write"),
    "a file as folder": (lambda at: anytime.save(attached(), at["file"]), AnytimeError, "is a file"),
    "no overwriting": (lambda at: anytime.save(attached(), at["zoo"], overwrite=False), OverwriteError, "overwrite=True"),
    "an unknown rule": (lambda at: anytime.save(attached(), at["new"], rule="prodct"), OptionError, "product"),
    "a calibration for other exits": (
        lambda at: anytime.save(attached(), at["new"], calibration=anytime.fit_temperature(*THREE)),
        OptionError,
        "3 exits",
    ),
    "a policy for other exits": (
        lambda at: anytime.save(attached(), at["new"], policy=Confidence((0.5, 0.5, 0.5))),
        OptionError,
        "2 numbers",
    ),
    "a profile that is no profile": (lambda at: anytime.save(attached(), at["new"], profile=7), OptionError, "Profile"),  # type: ignore[arg-type]
    "too few names of classes": (lambda at: anytime.save(attached(), at["new"], class_names=["a"]), OptionError, "6 names"),
    "one text as names": (lambda at: anytime.save(attached(), at["new"], class_names="abcdef"), OptionError, "6 names"),
    "a normalisation of one number": (lambda at: anytime.save(attached(), at["new"], normalisation=0.5), OptionError, "mean"),
    "a deviation of zero": (lambda at: anytime.save(attached(), at["new"], normalisation=([0.5], [0])), OptionError, "mean"),
    "metrics of another kind": (lambda at: anytime.save(attached(), at["new"], metrics=[0.9]), OptionError, "evaluate"),
    "a tokenizer without a length": (
        lambda at: anytime.save(attached(), at["new"], tokenizer="bert"),
        OptionError,
        "WordPiece",
    ),  # type: ignore[arg-type]
    "loading without build": (lambda at: anytime.load(at["attached"]), OptionError, "build=make_model"),
    "loading an instance": (lambda at: anytime.load(at["attached"], build=make_backbone()), OptionError, "function itself"),  # type: ignore[arg-type]
    "a build that returns nothing": (lambda at: anytime.load(at["attached"], build=lambda: None), OptionError, "NoneType"),
    "a build of another network": (
        lambda at: anytime.load(at["attached"], build=lambda: nn.Linear(4, 6)),
        FormatError,
        "names",
    ),
    "a build that is not needed": (lambda at: anytime.load(at["zoo"], build=make_backbone), OptionError, "remove build"),
    "one function for two parts": (lambda at: anytime.load(at["ensemble"], build=[make_backbone]), OptionError, "only 1"),
    "three functions for two parts": (
        lambda at: anytime.load(at["ensemble"], build=[make_backbone, lambda: nn.Linear(4, 6), make_backbone]),
        OptionError,
        "3 functions",
    ),
    "heads without head": (lambda at: anytime.load(at["heads"], build=make_backbone), OptionError, "head=make_head"),
    "a head that is not needed": (
        lambda at: anytime.load(at["attached"], build=make_backbone, head=lambda shape: nn.Linear(shape[0], 6)),
        OptionError,
        "remove head",
    ),
    "no folder": (lambda at: anytime.load(at["nothing"], build=make_backbone), MissingFileError, "no folder"),
    "a folder of no model": (lambda at: anytime.load(at["notes"]), AnytimeError, "manifest"),
    "a runner of no model": (lambda at: anytime.Runner.load(at["notes"]), AnytimeError, "manifest"),
    "a network of a user's own with models.load": (lambda at: anytime.models.load(at["attached"]), FormatError, "anytime.load"),
}


@pytest.mark.parametrize("mistake", SAVING)
def test_a_mistake_in_saving_or_loading_is_explained(mistake: str, places: Places, explained: Any) -> None:
    call, kind, hint = SAVING[mistake]
    explained(lambda: call(places), kind, hint)
    assert not places["new"].exists()


COMMANDS: dict[str, tuple[str, str]] = {
    "no build": ("predict {attached} {file}", "--build"),
    "a build without a function": ("predict {attached} {file} --build models", "package.module:function"),
    "a module that is not there": ("profile {attached} --build nowhere_at_all:make", "nowhere_at_all"),
    "a function that is not there": ("profile {attached} --build json:make_backbone", "json has no make_backbone"),
    "a build for a network of the library": ("profile {zoo} --build json:dumps", "remove"),
    "a folder without logits": ("evaluate {zoo}", "test.npz"),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_on_the_command_line_is_explained(mistake: str, places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    words, hint = COMMANDS[mistake]
    code = run([word.format(**places) for word in words.split()])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert hint in said.err
    assert "expected:" in said.err
    assert "fix:" in said.err
    assert "Traceback" not in said.err
