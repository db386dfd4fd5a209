"""A training run from its settings to a folder with everything: settings, log, results.

| file | content |
| --- | --- |
| `config.yaml` | all settings; enough to resume or to repeat the run |
| `split.json` | which training rows were held out |
| `log.csv` | one line per epoch |
| `checkpoint/` | the state to resume from |
| `model/` | the network, for `anytime.models.load` |
| `data.json` | normalisation of the images or length of the texts, and the class names, for `anytime predict` |
| `vocab.txt` | the tokens of texts |
| `val.npz`, `test.npz` | logits and labels, for `anytime evaluate` |
| `oos.npz` | logits of the out-of-scope queries of CLINC150, which have no label |
| `summary.json` | accuracy of each exit, time, and whether the expected accuracy was reached |
| `manifest.json` | checksums of all of these except the folders, which have their own; written last |

A process that trains holds a lock on the folder. A finished run is not trained again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.artifacts import bundle_kind, seal, verify_bundle, write_bytes, write_json, write_text
from anytime.data.text import TokenData, save_tokenizer
from anytime.errors import AnytimeError, FormatError, MissingFileError, OptionError
from anytime.models import save
from anytime.models.base import MultiExit
from anytime.outputs import check_new_folder, exists, lock_run
from anytime.reading import parsing, read_json
from anytime.train.data.logits import exit_accuracy
from anytime.train.data.named import Rows, Sets, measure, open_sets
from anytime.train.distributed import Ranks, check_distributed, is_rank_zero, launch
from anytime.train.log import EpochLog
from anytime.train.loop import Outcome, fit
from anytime.train.objectives.plan import learnt_rule
from anytime.train.options import FitOptions
from anytime.train.settings import RunConfig, Source, read_settings, resolve
from anytime.train.start import MINILM, start_network
from anytime.train.step import usable_device

_CONFIG, _ENVIRONMENT, _SPLIT, _LOG, _SUMMARY = "config.yaml", "environment.json", "split.json", "log.csv", "summary.json"
_DATA = "data.json"
_SEALED = (
    *(_CONFIG, _ENVIRONMENT, _SPLIT, _LOG, "curve.svg", _DATA, "vocab.txt"),
    *("val.npz", "test.npz", "oos.npz", _SUMMARY),
)
OnEpoch = Callable[[EpochLog], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        folder: The folder of the run.
        step: Steps done.
        steps: Steps in total.
        stopped: Why it ended early, or None.
        summary: The content of `summary.json`; None for an unfinished run.
    """

    folder: Path
    step: int
    steps: int
    stopped: str | None
    summary: dict[str, Any] | None


def begin(config: RunConfig, folder: str | Path) -> RunConfig:
    """Create the folder of a new run; one that is not empty is refused. Returns the settings as they are stored."""
    folder, config = Path(folder), _settled(config)
    if is_rank_zero():
        _check_new(folder)
        with lock_run(folder):
            _check_new(folder)  # again: another process may have started a run meanwhile
            config.save(folder / _CONFIG)
    return config


@contextmanager
def claim(config: RunConfig, folder: str | Path, *, resume: bool) -> Iterator[RunConfig]:
    """Hold the folder of a run, a new one unless `resume`, until the run ends; gives the run's settings."""
    folder = Path(folder)
    if not is_rank_zero():
        yield _settled(config)
        return
    if not resume:
        _check_new(folder)
    with lock_run(folder):
        try:
            yield config if resume else begin(config, folder)
        except AnytimeError:
            # A new run that failed before its first epoch leaves an empty folder.
            if not resume and not any((folder / name).exists() for name in (_LOG, "checkpoint", _SUMMARY)):
                for name in (_CONFIG, _ENVIRONMENT, _SPLIT):
                    (folder / name).unlink(missing_ok=True)
            raise


def is_finished(folder: str | Path) -> bool:
    """Whether the run in a folder is finished."""
    return exists(Path(folder) / _SUMMARY)


def stored_config(folder: str | Path, changes: Source | None = None) -> RunConfig:
    """The settings of the run in a folder, with `changes`, such as another device."""
    path = Path(folder) / _CONFIG
    if not path.is_file():
        raise MissingFileError(
            f"there is no run in {folder}",
            expected=f"a folder with {_CONFIG}",
            fix="give --out the folder of the run to resume",
            path=folder,
        )
    stored = read_settings(path)
    return _settled(resolve(stored) if changes is None else resolve(stored, changes))


def train(config: RunConfig, folder: str | Path, *, on_epoch: OnEpoch = lambda line: None) -> RunResult:
    """Train by `config`, from the checkpoint in `folder` if there is one, and write all files of the run there.

    Args:
        config: The settings.
        folder: The folder of the run.
        on_epoch: Called after each epoch, on rank 0.
    """
    folder = Path(folder)
    with lock_run(folder) if is_rank_zero() else nullcontext():
        if is_finished(folder):
            if is_rank_zero():
                _check_finished(folder)
            return _read_result(folder)
        usable_device(config.hardware.device)
        if config.processes == 1:
            return _train(config, folder, on_epoch=on_epoch)
        check_distributed(config.recipe, config.hardware, config.processes)
        device, hook = config.hardware.device, {"on_epoch": on_epoch}
        result: RunResult = launch(config.processes, _train, config, folder, device=device, on_rank_zero=hook)
        return result


def _train(config: RunConfig, folder: Path, ranks: Ranks | None = None, *, on_epoch: OnEpoch = lambda line: None) -> RunResult:
    if ranks is not None:
        config = replace(config, hardware=replace(config.hardware, device=str(ranks.device)))
    sets = open_sets(config)
    model = start_network(
        config.model,
        config.recipe,
        classes=sets.train.classes,
        init=config.init,
        options=_options(config),
        tokens=None if sets.tokenizer is None else len(sets.tokenizer),
    )
    _check_expected(config, model.num_exits)
    if ranks is not None:  # each rank has its own dropout
        torch.manual_seed(config.recipe.seed + ranks.rank)
    rank_zero = ranks is None or ranks.rank == 0
    if rank_zero and sets.split is not None:
        write_text(folder / _SPLIT, sets.split.to_json() + "\n")
    options = FitOptions(
        folder=folder,
        resume=True,
        checkpoint_every=config.checkpoint_every,
        evaluate_every=config.evaluate_every,
        seconds=None if config.minutes is None else 60 * config.minutes,
        on_epoch=on_epoch,
    )
    outcome = fit(model, sets.train, config.recipe, val=sets.val, hardware=config.hardware, options=options, ranks=ranks)
    summary = _finish(model, sets, config, outcome, folder) if rank_zero and outcome.finished else None
    return RunResult(folder, outcome.step, outcome.steps, outcome.stopped, summary)


def _finish(model: MultiExit, sets: Sets, config: RunConfig, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Write logits, the description of the data, the network, the summary and, last, the manifest."""
    summary: dict[str, Any] = {
        "data": config.data,
        "model": config.model,
        "seed": config.recipe.seed,
        "epochs": config.recipe.epochs,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 1),
        "images_per_second": round(outcome.images_per_second),
    }
    measured: dict[str, Rows | None] = {"val": sets.val, "test": sets.test}
    for name, data in measured.items():
        if data is not None:
            logits = _write_logits(folder / f"{name}.npz", model, data, config)
            accuracy = exit_accuracy(logits, data.labels.cpu(), learnt_rule(config.recipe))
            summary[f"{name}_accuracy"] = [round(value, 5) for value in accuracy]
    for name, data in sets.others.items():
        _write_logits(folder / f"{name}.npz", model, data, config, labelled=False)
    if config.expected is not None:
        summary["expected_accuracy"] = list(config.expected.accuracy)
        summary["tolerance"] = config.expected.tolerance
        summary["missed_exits"] = list(config.expected.missed(summary["test_accuracy"]))
    write_json(folder / _DATA, _description(sets, folder))
    save(model.cpu(), folder / "model")
    write_json(folder / _SUMMARY, summary)
    _seal(folder)
    return summary


def _write_logits(path: Path, model: MultiExit, data: Rows, config: RunConfig, *, labelled: bool = True) -> Tensor:
    """Write a file that `anytime evaluate` reads; returns the logits as written."""
    logits = measure(model, data, graph=config.hardware.graph).logits().half()
    arrays: dict[str, Any] = {"logits": logits.numpy(), "indices": data.rows.cpu().numpy()}
    if labelled:
        arrays["labels"] = data.labels.cpu().numpy()
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    write_bytes(path, stored.getvalue())
    return logits.float()


def _description(sets: Sets, folder: Path) -> dict[str, Any]:
    """What the network's inputs are; the tokens of texts are written to a file of their own."""
    data = sets.train
    names: dict[str, Any] = {"name": data.name, "class_names": list(data.class_names)}
    if not isinstance(data, TokenData):
        return {**names, "mean": list(data.mean), "std": list(data.std)}
    assert sets.tokenizer is not None
    return {**names, "mean": [], "std": [], **save_tokenizer(folder, sets.tokenizer, length=data.length)}


def _read_result(folder: Path) -> RunResult:
    """The result of a finished run."""
    path, fix = folder / _SUMMARY, f"remove {_SUMMARY} and resume: the end of the run is repeated from the checkpoint"
    summary = read_json(path, expected="the summary of a training run", fix=fix)
    with parsing(path, expected="steps, test_accuracy and so on, as a training run writes them", fix=fix, kind=FormatError):
        steps, numbers = summary["steps"], [*summary["test_accuracy"]]
        if "missed_exits" in summary:
            numbers += [*summary["missed_exits"], *summary["expected_accuracy"], summary["tolerance"]]
        if type(steps) is not int or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("steps, an accuracy or an expected accuracy is not a number")
    return RunResult(folder, steps, steps, None, summary)


def _check_new(folder: Path) -> None:
    choose = "choose another folder with --out"
    check_new_folder(folder, fix=f"resume it with --resume --out {folder}, or {choose}" if exists(folder / _CONFIG) else choose)


def _check_finished(folder: Path) -> None:
    """Compare a finished run with its manifest; a run that was killed just before writing it gets one now."""
    if bundle_kind(folder) is None:
        _seal(folder)
    verify_bundle(folder)


def _seal(folder: Path) -> None:
    seal(folder, [name for name in _SEALED if (folder / name).is_file()], kind="run")


def _check_expected(config: RunConfig, exits: int) -> None:
    """Before training, not after it."""
    if config.expected is not None and len(config.expected.accuracy) != exits:
        raise OptionError(
            f"expected has {len(config.expected.accuracy)} accuracies for a network with {exits} exits",
            expected="one accuracy per exit",
            fix="give one per exit, or remove expected with --set expected=null",
        )


def _options(config: RunConfig) -> dict[str, Any]:
    """The network's options with tuples in place of YAML's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.options.items()}


def _settled(config: RunConfig) -> RunConfig:
    """Absolute paths, so that a run can be resumed from anywhere; the plain step with several processes."""
    several = config.processes > 1
    hardware = replace(config.hardware, graph=False, streams=False) if several else config.hardware
    root, init = (path if path in (None, MINILM) else str(Path(path).resolve()) for path in (config.root, config.init))
    return replace(config, root=root, init=init, hardware=hardware)
