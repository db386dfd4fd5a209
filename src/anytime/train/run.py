"""A training run from its settings to a folder that has everything: what was asked for, what happened, what came out.

| file | what |
| --- | --- |
| `config.yaml` | all settings; enough to go on, or to do it again |
| `split.json` | which training rows were held out |
| `log.csv` | a line an epoch |
| `checkpoint/` | where to go on from |
| `model/` | the network, for `anytime.models.load` |
| `data.json` | how its images were normalised or its texts cut, and what the classes are called, for `anytime predict` |
| `vocab.txt` | the word pieces of texts |
| `val.npz`, `test.npz` | logits and labels, for `anytime evaluate` |
| `oos.npz` | logits of the out-of-scope queries of CLINC150, which have no label |
| `summary.json` | accuracy of each exit, time, and whether the expected accuracy was reached |
| `manifest.json` | checksums of all of these but the folders, which have their own; written last |

A process that trains holds a lock on the folder. A run that is finished is not trained again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from anytime.artifacts import bundle_kind, seal, verify_bundle, write_bytes, write_json, write_text
from anytime.data.text import TokenData, save_tokenizer
from anytime.errors import AnytimeError, FormatError, MissingFileError, OptionError
from anytime.models import save
from anytime.models.base import MultiExit
from anytime.outputs import check_new_folder, exists, join_run, lock_run
from anytime.reading import parsing, read_json
from anytime.train.config import Hardware
from anytime.train.data.logits import exit_accuracy
from anytime.train.data.named import Rows, Sets, measure, open_sets
from anytime.train.data.stream import StreamedStep
from anytime.train.log import EpochLog
from anytime.train.loop import FitOptions, Outcome, fit, run_loop
from anytime.train.objectives.plan import learnt_rule, phases
from anytime.train.parallel import StreamedTeamStep, TeamStep, launch, leads
from anytime.train.settings import RunConfig, Source, read_settings, resolve
from anytime.train.start import MINILM, start_network
from anytime.train.step import TrainStep, usable_device
from anytime.train.stopping import CTRL_C

_CONFIG, _SPLIT, _DATA, _SUMMARY = "config.yaml", "split.json", "data.json", "summary.json"
_SEALED = (
    *(_CONFIG, "environment.json", _SPLIT, "log.csv", "curve.svg", _DATA, "vocab.txt"),
    *("val.npz", "test.npz", "oos.npz", _SUMMARY),
)
KIND = "run"
OnEpoch = Callable[[EpochLog], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        folder: Where its files are.
        step: Steps done.
        steps: Steps there are.
        stopped: Why it ended before its end, or none.
        summary: What `summary.json` holds; none for a run that has not come to its end.
    """

    folder: Path
    step: int
    steps: int
    stopped: str | None
    summary: dict[str, Any] | None


def begin(config: RunConfig, folder: str | Path) -> RunConfig:
    """Make a folder for a new run; refuses one that holds anything already."""
    folder, config = Path(folder), _settled(config)
    if leads():
        check_new(folder)
        with lock_run(folder):
            check_new(folder)  # another process may have been quicker
            config.save(folder / _CONFIG)
    return config


@contextmanager
def claim(config: RunConfig, folder: str | Path, *, resume: bool) -> Iterator[RunConfig]:
    """Hold the folder of a run, a new one unless it is to go on, until the run ends; gives the run's settings."""
    folder = Path(folder)
    if not leads():
        yield _settled(config)
        return
    if not resume:
        check_new(folder)
    with lock_run(folder):
        try:
            yield config if resume else begin(config, folder)
        except AnytimeError:
            # What failed before it began is in nobody's way; all that is here was written by this run.
            if not resume and not any((folder / name).exists() for name in ("log.csv", "checkpoint", _SUMMARY)):
                for name in (_CONFIG, "environment.json", _SPLIT):
                    (folder / name).unlink(missing_ok=True)
            raise


def check_new(folder: Path) -> None:
    """Refuse a folder that is not new or empty."""
    begun = exists(folder / _CONFIG) or exists(folder / "config.json")
    fix = f"go on with --resume --out {folder}, or choose another folder" if begun else "choose another folder with --out"
    check_new_folder(folder, fix=fix)


def is_finished(folder: str | Path) -> bool:
    """Whether the run in a folder has come to its end."""
    return exists(Path(folder) / _SUMMARY)


def finish(folder: Path, names: Iterable[str] = _SEALED) -> None:
    """Write the manifest of a run that has come to its end, over those of its files that are there."""
    seal(folder, [name for name in names if (folder / name).is_file()], kind=KIND)


def check_finished(folder: Path, names: Iterable[str] = _SEALED) -> None:
    """Compare a finished run with its manifest; one that was killed just before it was written gets it now."""
    if bundle_kind(folder) is None:
        finish(folder, names)
    verify_bundle(folder)


def stored_config(folder: str | Path, changes: Source | None = None) -> RunConfig:
    """The settings of the run in a folder; `changes` may move it to another machine."""
    path = Path(folder) / _CONFIG
    if not path.is_file():
        fix = "give the --out of the run that is to go on"
        raise MissingFileError(f"there is no run in {folder}", expected=f"a folder with {_CONFIG}", fix=fix, path=folder)
    stored = read_settings(path)
    return _settled(resolve(stored) if changes is None else resolve(stored, changes))


def train(config: RunConfig, folder: str | Path, *, on_epoch: OnEpoch = lambda line: None) -> RunResult:
    """Train by `config`, from the checkpoint in `folder` where there is one, and leave all files of the run there.

    Args:
        config: The settings.
        folder: Of the run.
        on_epoch: Called after each epoch; at the top of a module where there are several processes.
    """
    folder = Path(folder)
    with lock_run(folder) if leads() else nullcontext():
        if is_finished(folder):
            if leads():
                check_finished(folder)
            return _ended(folder)
        if config.processes == 1:
            return _train(config, folder, on_epoch)
        usable_device(config.machine.device)
        options: Any = {"device": config.machine.device, "after_ctrl_c": _after_ctrl_c}
        found: RunResult = launch(config.processes, _train, config, folder, on_epoch, **options)
        return found


def _after_ctrl_c(found: RunResult) -> RunResult:
    return replace(found, stopped=found.stopped and CTRL_C)


def _ended(folder: Path) -> RunResult:
    """What a run that came to its end left behind."""
    path, fix = folder / _SUMMARY, f"remove {_SUMMARY} to train the rest again from the checkpoint"
    summary = read_json(path, expected="the summary that a training run writes", fix=fix)
    with parsing(path, expected="steps, test_accuracy and the like, as a training run writes them", fix=fix, kind=FormatError):
        steps, shares = summary["steps"], summary["test_accuracy"]
        if type(steps) is not int or not all(isinstance(share, int | float) for share in shares):
            raise ValueError("its steps or accuracies are not numbers")
        if "missed_exits" in summary:
            missed, expected, tolerance = summary["missed_exits"], summary["expected_accuracy"], summary["tolerance"]
            if not all(isinstance(number, int | float) for number in (*missed, *expected, tolerance)):
                raise ValueError("what was expected of it is not in numbers")
    return RunResult(folder, steps, steps, None, summary)


def _train(config: RunConfig, folder: Path, on_epoch: OnEpoch, team: Any = None) -> RunResult:
    """A run, or this process's part in it."""
    with nullcontext() if team is None else join_run(folder):
        return _train_locked(config, folder, on_epoch, team)


def _train_locked(config: RunConfig, folder: Path, on_epoch: OnEpoch, team: Any) -> RunResult:
    sets, machine = open_sets(config), config.machine
    if team is not None:
        machine = replace(machine, device=str(team.device))
    model = start_network(
        config.model,
        config.recipe,
        classes=sets.train.classes,
        init=config.init,
        options=_options(config),
        pieces=None if sets.tokenizer is None else len(sets.tokenizer),
    )
    _check_expected(config, model.num_exits)
    leads = team is None or team.rank == 0
    if leads and sets.split is not None:
        write_text(folder / _SPLIT, sets.split.to_json() + "\n")
    outcome = _fit(model, sets, config, machine, _habits(config, folder, on_epoch), team)
    summary = _finish(model, sets, config, outcome, folder) if leads and outcome.finished else None
    return RunResult(folder, outcome.step, outcome.steps, outcome.stopped, summary)


def _fit(model: MultiExit, sets: Sets, config: RunConfig, machine: Hardware, options: FitOptions, team: Any) -> Outcome:
    train: Any = sets.train
    val: Any = sets.val
    if team is None and not sets.streamed:
        return fit(model, train, config.recipe, val=val, machine=machine, options=options)
    plan = phases(config.recipe, exits=model.num_exits, steps_per_epoch=max(1, len(train) // config.recipe.batch))
    training = _step(team, sets.streamed)(model, train, plan[0].objective, config.recipe, machine)
    if team is not None and team.rank:
        training.follow(plan)
        return Outcome(0, 0, 0.0, 0.0, None)
    evaluation = None if val is None else measure(training.model, val, graph=machine.graph)
    try:
        return run_loop(training, plan, evaluation, options)
    finally:
        if team is not None:
            training.end()


def _step(team: Any, streamed: bool) -> Callable[..., Any]:
    if team is None:
        return StreamedStep if streamed else TrainStep
    kind: Callable[..., TrainStep] = StreamedTeamStep if streamed else TeamStep
    return lambda *arguments: kind(*arguments, team)


def _habits(config: RunConfig, folder: Path, on_epoch: OnEpoch) -> FitOptions:
    return FitOptions(
        folder=folder,
        resume=True,
        checkpoint_every=config.checkpoint_every,
        evaluate_every=config.evaluate_every,
        seconds=None if config.minutes is None else 60 * config.minutes,
        on_epoch=on_epoch,
    )


def _finish(model: MultiExit, sets: Sets, config: RunConfig, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Write logits, what the data are, the network, the summary and, last of all, the manifest."""
    summary: dict[str, Any] = {
        "data": config.data,
        "model": config.model,
        "seed": config.recipe.seed,
        "epochs": config.recipe.epochs,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 1),
        "images_per_second": round(outcome.images_per_second),
    }
    parts: dict[str, Rows | None] = {"val": sets.val, "test": sets.test}
    for name, data in parts.items():
        if data is not None:
            logits = _write_logits(folder / f"{name}.npz", model, data, config)
            shares = exit_accuracy(logits, data.labels.cpu(), learnt_rule(config.recipe))
            summary[f"{name}_accuracy"] = [round(share, 5) for share in shares]
    for name, data in sets.others.items():
        _write_logits(folder / f"{name}.npz", model, data, config, labelled=False)
    if config.expected is not None:
        missed = config.expected.missed(summary["test_accuracy"])
        summary["expected_accuracy"] = list(config.expected.accuracy)
        summary["tolerance"] = config.expected.tolerance
        summary["missed_exits"] = list(missed)
    write_json(folder / _DATA, _description(sets, folder))
    save(model.cpu(), folder / "model")
    write_json(folder / _SUMMARY, summary)
    finish(folder)
    return summary


def _write_logits(path: Path, model: MultiExit, data: Rows, config: RunConfig, *, labelled: bool = True) -> Tensor:
    """Write what `anytime evaluate` reads; gives the logits as they were written."""
    logits = measure(model, data, graph=config.machine.graph).logits().half()
    arrays: dict[str, Any] = {"logits": logits.numpy(), "indices": data.rows.cpu().numpy()}
    if labelled:
        arrays["labels"] = data.labels.cpu().numpy()
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    write_bytes(path, stored.getvalue())
    return logits.float()


def _description(sets: Sets, folder: Path) -> dict[str, Any]:
    """What the network's inputs are; the word pieces of texts get a file of their own."""
    seen = sets.train
    words: dict[str, Any] = {"name": seen.name, "class_names": list(seen.class_names)}
    if not isinstance(seen, TokenData):
        return {**words, "mean": list(seen.mean), "std": list(seen.std)}
    assert sets.tokenizer is not None
    return {**words, "mean": [], "std": [], **save_tokenizer(folder, sets.tokenizer, length=seen.length)}


def _check_expected(config: RunConfig, exits: int) -> None:
    """Before training, as it would else be known when all is done."""
    if config.expected is not None and len(config.expected.accuracy) != exits:
        raise OptionError(
            f"expected has {len(config.expected.accuracy)} accuracies for a network with {exits} exits",
            expected="one accuracy an exit",
            fix="correct expected, or leave it out",
        )


def _options(config: RunConfig) -> dict[str, Any]:
    """The network's options as Python has them: YAML knows lists, the networks' settings tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.options.items()}


def _settled(config: RunConfig) -> RunConfig:
    """Paths in full, so that a run goes on from any folder; the plain step where several processes share it."""
    machine = config.machine if config.processes == 1 else replace(config.machine, graph=False, fused=False, streams=False)
    paths = (config.root, config.init)
    root, init = (path if path in (None, MINILM) else str(Path(path).resolve()) for path in paths)
    return replace(config, root=root, init=init, machine=machine)
