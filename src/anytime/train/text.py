"""Train an encoder with exits on texts: `python -m anytime.train.text --data trec --root FOLDER --weights FOLDER --out FOLDER`.

It is `anytime train` for machines that have torch, NumPy, safetensors, PyYAML and pyarrow, and little else. The settings are
those of the recipe `DATA-minilm`, or of another, and of the flags; the files of a run are those that `anytime.train.run` tells.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, get_args

from anytime.data.text import TextName
from anytime.errors import AnytimeError
from anytime.process import run_program
from anytime.safe_text import print_safely as print
from anytime.train.log import EpochLog
from anytime.train.run import RunResult, claim, is_finished, stored_config, train
from anytime.train.settings import RunConfig, Source, read_pair, read_recipe, resolve
from anytime.train.stopping import CTRL_C

# Seconds kept back for the last evaluation and for writing.
_RESERVE = 25.0
_SETTINGS = ("data", "root", "model", "epochs", "batch", "lr", "objective", "length", "classes", "held_out", "device")


def main(arguments: list[str] | None = None) -> int:
    """Train, once a seed; gives the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _train_all(options)
    except AnytimeError as error:
        print(error, file=sys.stderr)
        return 2


def _train_all(options: argparse.Namespace) -> int:
    began, done = time.monotonic(), True
    for seed in options.seeds:
        left = None if options.minutes is None else options.minutes * 60 - (time.monotonic() - began) - _RESERVE
        if left is not None and left <= 0:
            print(f"seed {seed}: no time left, not begun")
            return 1
        folder = options.out if len(options.seeds) == 1 else options.out / f"seed-{seed}"
        resume = options.resume and (folder / "config.yaml").is_file()
        with claim(_settings(options, seed, left, folder, resume=resume), folder, resume=resume) as config:
            done &= _train_one(config, folder, keep=options.keep_checkpoint)
    return 0 if done else 1


def _settings(options: argparse.Namespace, seed: int, seconds: float | None, folder: Path, *, resume: bool) -> RunConfig:
    """The settings of a run: those its folder has where it goes on, else those of recipe and flags."""
    limit = {} if seconds is None else {"minutes": seconds / 60}
    if resume:
        return stored_config(folder, Source("command line", limit))
    given = {name: getattr(options, name) for name in _SETTINGS if getattr(options, name) is not None}
    if options.weights is not None:
        given["init"] = options.weights
    flags = {**given, **limit, "seed": seed, **dict(read_pair(text) for text in options.set)}
    return resolve(read_recipe(options.recipe or f"{options.data}-minilm"), Source("command line", flags))


def _train_one(config: RunConfig, folder: Path, *, keep: bool) -> bool:
    """One run with all its files; whether it came to its end."""
    print(f"the run in {folder} is finished" if is_finished(folder) else json.dumps(config.values()), flush=True)
    result: RunResult = train(config, folder, on_epoch=lambda line: _say(line, config.recipe.epochs))
    if result.summary is None:
        print(f"stopped at step {result.step} of {result.steps}: {result.stopped}; go on with --resume", flush=True)
        if result.stopped == CTRL_C:
            raise KeyboardInterrupt
        return False
    print(json.dumps(result.summary), flush=True)
    if not keep:
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return True


def _say(line: EpochLog, epochs: int) -> None:
    val = "" if line.val_accuracy is None else "  val " + " ".join(f"{share:.4f}" for share in line.val_accuracy)
    losses = " ".join(f"{loss:.3f}" for loss in line.losses)
    speed = f"{line.images_per_second:,.0f} texts/s  {line.seconds:.0f} s"
    print(f"epoch {line.epoch}/{epochs}{val}  loss {losses}  lr {line.lr:.2g}  {speed}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m anytime.train.text", description="Train an encoder with exits on texts.")
    add: Any = parser.add_argument
    add("--data", choices=get_args(TextName), required=True)
    add("--out", type=Path, required=True, help="folder of the run; one folder a seed where there are several")
    add("--root", help="folder with the parquet files; by default data/text in the folder ANYTIME_SHARED names")
    add("--weights", help="folder of a pretrained encoder, or of a run; minilm, the installed package, with most recipes")
    add("--recipe", help="a recipe that ships with the library, by name; DATA-minilm by default")
    add("--model", help="name of the network")
    add("--epochs", type=int)
    add("--batch", type=int, help="texts a step")
    add("--lr", type=float, help="highest learning rate")
    add("--objective", help="such as joint, product or distillation")
    add("--length", type=int, help="word pieces a text at most")
    add("--classes", type=int, help="how many of the classes to take, drawn by split_seed; all by default")
    add("--held-out", type=int, help="validation rows, split off the training rows of a set that has none of its own")
    add("--device", help="cpu, cuda or cuda:1; a GPU where there is one")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting, such as head_rate=10")
    add("--seeds", "--seed", type=int, nargs="+", default=[0], help="one run each, one after the other")
    add("--minutes", type=float, help="stop cleanly, with a checkpoint, before this limit for the whole command")
    add("--resume", action="store_true", help="go on with the runs in --out that were begun")
    add("--keep-checkpoint", action="store_true", help="leave the last checkpoint of a run that has come to its end")
    return parser


if __name__ == "__main__":
    run_program(main)
