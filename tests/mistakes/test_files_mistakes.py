"""Mistakes with evaluations of many files: each is explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anytime
from anytime.cli import run
from anytime.errors import (
    AnytimeError,
    DtypeError,
    FileError,
    FormatError,
    IntegrityError,
    LabelError,
    MissingFileError,
    NonFiniteError,
    OptionError,
    OverlapError,
    OverwriteError,
    ScaleError,
    ShapeError,
)

RANDOM = np.random.default_rng(0)
LABELS = np.arange(60) % 5
LOGITS = (3 * RANDOM.normal(size=(3, 60, 5))).astype("f4")
NAN = np.where(np.arange(60)[:, None] == 50, np.nan, LOGITS).astype("f4")


def save(folder: Path, name: str, logits: Any, labels: Any = LABELS) -> Path:
    np.savez(folder / name, **{"logits": logits, **({} if labels is None else {"labels": labels})})
    return folder / name


def table(folder: Path, name: str, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), folder / name)
    return folder / name


def broken(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(b"nothing" * 9)
    return folder / name


def both(folder: Path, *arguments: Any) -> list[Path]:
    return [save(folder, "a.npz", LOGITS), save(folder, "b.npz", *arguments)]


def linked(folder: Path) -> list[Path]:
    (folder / "b.npz").symlink_to(save(folder, "a.npz", LOGITS))
    return [folder / "a.npz", folder / "b.npz"]


def with_labels_apart(folder: Path) -> Path:
    np.save(folder / "logits.npy", LOGITS)
    np.save(folder / "labels.npy", LABELS)
    return folder


def saved_model(folder: Path) -> Path:
    anytime.save(anytime.create_model("mlp-toy", classes=5), folder)
    return folder


def foreign(folder: Path) -> Path:
    work = folder / "work"
    work.mkdir()
    (work / "notes.txt").write_text("mine")
    return work


LISTS = [[[1.0, 2.0], [0.0, -1.0]]] * 3
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
CALLS: dict[str, tuple[Callable[[Path], object], type[AnytimeError], str]] = {
    "a folder without logits": (lambda f: anytime.evaluate(f), MissingFileError, "has no logits"),
    "a glob that matches nothing": (lambda f: anytime.evaluate(f"{f}/*.npz"), MissingFileError, "no file matches"),
    "a file that is not there": (
        lambda f: anytime.evaluate([save(f, "a.npz", LOGITS), f / "b.npz"]),
        MissingFileError,
        "no file",
    ),
    "labels that are not there": (
        lambda f: anytime.evaluate(save(f, "a.npz", LOGITS), f / "labels.npy"),
        MissingFileError,
        "no file",
    ),
    "logits of pixels without class_dim": (
        lambda f: anytime.evaluate(save(f, "a.npz", LOGITS[..., None])),
        ShapeError,
        "class_dim=2",
    ),
    "a saved model": (
        lambda f: anytime.evaluate(saved_model(f)),
        MissingFileError,
        "collect_logits",
    ),
    "a folder among the files of a glob": (
        lambda f: anytime.evaluate([f"{foreign(f).parent}/*"]),
        FormatError,
        "work is a folder",
    ),
    "labels in the folder of logits": (
        lambda f: anytime.evaluate(with_labels_apart(f)),
        ShapeError,
        "labels=",
    ),
    "files of different models": (lambda f: anytime.evaluate(both(f, LOGITS[:2])), ShapeError, "2 exits and 5 classes"),
    "files of different classes": (lambda f: anytime.evaluate(both(f, LOGITS[:, :, :4], LABELS % 4)), ShapeError, "4 classes"),
    "labels in one file only": (lambda f: anytime.evaluate(both(f, LOGITS + 1, None)), LabelError, "b.npz has no labels"),
    "the same file twice": (lambda f: anytime.evaluate([save(f, "a.npz", LOGITS)] * 2), OverlapError, "listed twice"),
    "a link to another of the files": (lambda f: anytime.evaluate(linked(f)), OverlapError, "are one file"),
    "a copy of a file": (lambda f: anytime.evaluate(both(f, LOGITS)), OverlapError, "begins with the same rows as a.npz"),
    "files without rows": (
        lambda f: anytime.evaluate([save(f, "a.npz", LOGITS[:, :0], LABELS[:0]), save(f, "b.npz", LOGITS[:, :0], LABELS[:0])]),
        ShapeError,
        "none of the 2 files has a row",
    ),
    "a file that is damaged": (lambda f: anytime.evaluate([broken(f, "a.npz")]), IntegrityError, "a.npz"),
    "a damaged file among others": (
        lambda f: anytime.evaluate([save(f, "a.npz", LOGITS), broken(f, "b.npz")]),
        IntegrityError,
        "b.npz",
    ),
    "NaN in one of the files": (lambda f: anytime.evaluate(both(f, NAN)), NonFiniteError, "row 50"),
    "probabilities in one of the files": (lambda f: anytime.evaluate(both(f, PROBABILITIES)), ScaleError, "probabilities"),
    "labels beyond the classes": (lambda f: anytime.evaluate(both(f, LOGITS + 1, LABELS + 1)), LabelError, "b.npz"),
    "labels that are fewer": (lambda f: anytime.evaluate(both(f, LOGITS + 1, LABELS[:7])), LabelError, "7 labels"),
    "labels that are numbers with points": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1, LABELS + 0.5)),
        DtypeError,
        "integers",
    ),
    "a tensor of labels for files": (lambda f: anytime.evaluate(both(f, LOGITS + 1), LABELS), LabelError, "one for each"),
    "one file of labels for two": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1), save(f, "labels.npz", LOGITS)),
        LabelError,
        "1 files with labels for 2",
    ),
    "an unknown kind among the files": (
        lambda f: anytime.evaluate([save(f, "a.npz", LOGITS), broken(f, "b.pt")]),
        FormatError,
        "never opened",
    ),
    "logits of pixels in several files": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1), class_dim=2),
        OptionError,
        "one file",
    ),
    "no processes": (lambda f: anytime.evaluate(both(f, LOGITS + 1), processes=0), OptionError, "processes"),
    "processes for a tensor": (lambda f: anytime.evaluate(LOGITS, LABELS, processes=2), OptionError, "not read from files"),
    "a folder for sums of a tensor": (lambda f: anytime.evaluate(LOGITS, LABELS, work=f), OptionError, "not read from files"),
    "a rule that is a function with a folder for sums": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1), rules={"mine": anytime.Product().combine}, work=f / "work"),
        OptionError,
        "omit work",
    ),
    "a rule that only this process knows": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1), rules={"mine": lambda x: anytime.Product().combine(x)}, processes=2),
        OptionError,
        "processes=1",
    ),
    "a folder for sums that holds something else": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1), work=foreign(f)),
        OverwriteError,
        "notes.txt",
    ),
    "a file as the folder for sums": (
        lambda f: anytime.evaluate(both(f, LOGITS + 1), work=f / "a.npz"),
        OverwriteError,
        "is a file",
    ),
    "a table without logits": (lambda f: anytime.evaluate(table(f, "a.parquet", x=[1, 2])), FormatError, "column 'logits'"),
    "a table of flat lists": (
        lambda f: anytime.evaluate(table(f, "a.parquet", logits=[[1.0, 2.0]] * 3)),
        ShapeError,
        "(exits, classes)",
    ),
    "a table without the second exit": (
        lambda f: anytime.evaluate(table(f, "a.parquet", exit_1=[[1.0]], exit_3=[[1.0]])),
        FormatError,
        "exit_1, exit_2",
    ),
    "a table with rows of different lengths": (
        lambda f: anytime.evaluate(table(f, "a.parquet", logits=[*LISTS, [[1.0], [2.0]]])),
        ShapeError,
        "lengths",
    ),
    "a table with a missing row": (
        lambda f: anytime.evaluate(table(f, "a.parquet", logits=[*LISTS, None])),
        FormatError,
        "nulls",
    ),
    "a table of texts": (lambda f: anytime.evaluate(table(f, "a.parquet", logits=["a", "b"])), AnytimeError, "logits"),
    "a table with labels elsewhere": (
        lambda f: anytime.evaluate(table(f, "a.parquet", logits=LISTS), save(f, "labels.npz", LOGITS)),
        OptionError,
        "column 'labels'",
    ),
    "a damaged table": (lambda f: anytime.evaluate(broken(f, "a.parquet")), IntegrityError, "a.parquet"),
    "a damaged Arrow file": (lambda f: anytime.evaluate(broken(f, "a.arrow")), IntegrityError, "a.arrow"),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_with_many_files_is_explained(mistake: str, tmp_path: Path) -> None:
    call, kind, hint = CALLS[mistake]
    with pytest.raises(kind) as raised:
        call(tmp_path)
    assert hint in str(raised.value)
    assert raised.value.expected
    assert raised.value.fix
    work = tmp_path / "work"
    assert not work.exists() or [path.name for path in work.iterdir()] == ["notes.txt"], "nothing half-written"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--calibration", "a.npz"], "omit --calibration"),
        (["--processes", "0"], "processes"),
        (["--class-dim", "2"], "one file"),
    ],
)
def test_a_command_line_with_many_files_is_explained(options: list[str], hint: str, tmp_path: Path, capsys: Any) -> None:
    both(tmp_path, LOGITS + 1)
    options = [str(tmp_path / option) if option.endswith(".npz") else option for option in options]
    assert run(["evaluate", str(tmp_path), *options, "--out", str(tmp_path / "report")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert hint in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_every_error_is_about_a_file_or_an_input() -> None:
    assert {kind for _, kind, _ in CALLS.values()} >= {MissingFileError, IntegrityError, FormatError, OverlapError}
    assert issubclass(IntegrityError, FileError)
