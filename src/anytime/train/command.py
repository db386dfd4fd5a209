"""The command `train` without its command line: settings from recipe, file and flags; one run per seed; what is printed.

`anytime train` and `python -m anytime.train` parse the arguments and call `run_command`. Results go to stdout, messages to
stderr.
"""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anytime.errors import OptionError
from anytime.process import INTERRUPTED
from anytime.safe_text import print_safely as print
from anytime.train.distributed import is_rank_zero
from anytime.train.log import EpochLog
from anytime.train.run import OnEpoch, RunResult, claim, is_finished, stored_config, train
from anytime.train.settings import RunConfig, Source, read_recipe, read_settings, recipe_names, resolve
from anytime.train.stopping import CTRL_C


@dataclass(frozen=True)
class Command:
    """What the command line asks for.

    Attributes:
        recipe: Name of a shipped recipe.
        out: The folder of the run; with several seeds, of one folder `seed-N` per run.
        config: A YAML file with settings.
        resume: Whether to continue the run in `out`.
        settings: Settings from flags, which override the file, which overrides the recipe.
        seeds: Seeds to train with, one run after the other; none for the seed of the settings.
        json: Whether to print the summary as JSON.
        prepare: Called with the folder before a run is trained.
        on_epoch: Called with the folder, the log line and the number of epochs after each epoch.
    """

    recipe: str | None
    out: Path | None
    config: Path | None = None
    resume: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    json: bool = False
    prepare: Callable[[Path], None] = lambda folder: None
    on_epoch: Callable[[Path, EpochLog, int], None] = lambda folder, line, epochs: None


def run_command(command: Command) -> int:
    """Train, once per seed; returns the exit code. With several seeds, `minutes` is the limit for all of them together."""
    if command.out is None:
        raise OptionError("no folder for the run was given", expected="--out FOLDER", fix="add --out FOLDER")
    if len(command.seeds) < 2:
        settings = {**command.settings, "seed": command.seeds[0]} if command.seeds else command.settings
        return _run_one(replace(command, settings=settings), command.out)
    start, minutes, code = time.monotonic(), command.settings.get("minutes"), 0
    for seed in command.seeds:
        settings = {**command.settings, "seed": seed}
        folder = command.out / f"seed-{seed}"
        if isinstance(minutes, int | float):
            settings["minutes"] = minutes - (time.monotonic() - start) / 60
            if settings["minutes"] <= 0:
                print(f"seed {seed} was not trained: the {minutes:g} minutes are over", file=sys.stderr)
                return 1
        resume = command.resume and (folder / "config.yaml").is_file()
        code = max(code, _run_one(replace(command, settings=settings, resume=resume), folder))
        if code == INTERRUPTED:
            break
    return code


def list_recipes() -> int:
    """Print the recipes with one sentence each."""
    width = max(len(name) for name in recipe_names())
    for name in recipe_names():
        values = read_recipe(name).values
        expected = values.get("expected")
        reached = f" (last exit {expected['accuracy'][-1]:.3f})" if expected else ""
        print(f"{name:{width}}  {values['about']}{reached}")
    return 0


def show(result: RunResult, *, json: bool) -> int:
    """Print how the run ended; returns the exit code: 1 if unfinished or below the expected accuracy, 130 after Ctrl-C."""
    if result.summary is None:
        print(
            f"Stopped at step {result.step:,} of {result.steps:,}: {result.stopped}. A checkpoint was saved.", file=sys.stderr
        )
        print(f"Continue with: anytime train --resume --out {result.folder}", file=sys.stderr)
        return INTERRUPTED if result.stopped == CTRL_C else 1
    if json:
        print(json_text.dumps(result.summary, allow_nan=False))
    else:
        print(f"test accuracy by exit: {_numbers(result.summary['test_accuracy'])}")
    missed = result.summary.get("missed_exits")
    if missed is not None:
        expected = f"expected {_numbers(result.summary['expected_accuracy'])}, tolerance {result.summary['tolerance']:g}"
        exits = ", ".join(map(str, missed))
        print(f"not reached by exit {exits}: {expected}" if missed else f"reached: {expected}", file=sys.stderr)
    print(f"Next: anytime evaluate {result.folder / 'test.npz'} --out {result.folder / 'report'}", file=sys.stderr)
    return 1 if missed else 0


def _run_one(command: Command, out: Path) -> int:
    with claim(_settings(command, out), out, resume=command.resume) as settings:
        finished = is_finished(out)
        if is_rank_zero():
            print(settings.to_yaml(), file=sys.stderr)
            if not finished:
                command.prepare(out)
        result = train(settings, out, on_epoch=_after_epoch(command, out, settings.recipe.epochs))
    if not is_rank_zero():
        return 0
    if finished:
        print(f"anytime: the run in {out} is finished; nothing was trained", file=sys.stderr)
    return show(result, json=command.json)


def _settings(command: Command, out: Path) -> RunConfig:
    recipe, config, flags = command.recipe, command.config, Source("command line", command.settings)
    if not command.resume:
        named = [] if recipe is None else [read_recipe(recipe)]
        files = [] if config is None else [read_settings(config)]
        return resolve(*named, *files, flags)
    if (recipe or config) and not command.seeds:
        raise OptionError(
            f"--resume was given with {recipe or config}",
            expected="--resume --out FOLDER: the folder has the settings",
            fix=f"remove {recipe or '--config'}",
        )
    return stored_config(out, flags)


def _after_epoch(command: Command, out: Path, epochs: int) -> OnEpoch:
    def report(line: EpochLog) -> None:
        val = "" if line.val_accuracy is None else f"  val {_numbers(line.val_accuracy)}"
        losses = " ".join(f"{loss:.3f}" for loss in line.losses)
        speed = f"{line.images_per_second:,.0f} inputs/s"
        print(f"epoch {line.epoch}/{epochs}{val}  loss {losses}  lr {line.lr:.3g}  {speed}", file=sys.stderr, flush=True)
        command.on_epoch(out, line, epochs)

    return report


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.4f}" for value in values)
