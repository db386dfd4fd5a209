"""Train a network with exits on CIFAR: `python -m anytime.train.cifar --data cifar100 --root FOLDER --out FOLDER`.

It needs torch, NumPy and safetensors alone (and Pillow for sheets), so that it runs where there is little else.

The recipe is that of MSDNet (batch 64, rate .1, 300 epochs, divided by 10 at ½ and ¾, no Nesterov) made for a large
batch: the rate grows in proportion to the batch, climbs for the first epochs, and goes down by a cosine with
Nesterov's rule. Batch, rate and weight decay then give the same decay an epoch as the original.

Other objectives bring defaults of their own (`_DEFAULTS`), each for a few minutes of a GPU: those of IMTA's second stage, which
begins from the weights of the first (`--objective one-for-all --init STAGE1/model.safetensors`), and those of L2W, whose
batch, rate and network are the published ones.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from anytime.artifacts import tensors_to_bytes, write_bytes
from anytime.data import ImageData, Split, hold_out, load_cifar
from anytime.errors import AnytimeError
from anytime.models.base import MultiExit
from anytime.outputs import lock_run
from anytime.process import run_program
from anytime.safe_text import print_safely as print
from anytime.train.config import L2W, Centring, Distillation, Hardware, Objective, OptimizerName, Schedule, TrainConfig
from anytime.train.data.logits import Evaluation, exit_accuracy
from anytime.train.log import EpochLog
from anytime.train.loop import FitOptions, Outcome, fit
from anytime.train.objectives.plan import learnt_rule
from anytime.train.run import check_finished, check_new, finish, is_finished
from anytime.train.start import start_network
from anytime.train.stopping import CTRL_C

_SUMMARY = "summary.json"
_FILES = ("config.json", "split.json", "log.csv", "val.npz", "test.npz", "model.safetensors", _SUMMARY)
_RATE_PER_IMAGE = 0.1 / 64
# Seconds kept back for the last evaluation and for writing.
_RESERVE = 25.0
# Where an objective's defaults are not those of the parser. L2W was published with 300 epochs, each of which takes several
# times as long as one of the others.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "one-for-all": {"epochs": 90},
    "l2w": {"model": "msdnet-cifar-linear", "epochs": 40, "batch": 1024, "lr": 0.8, "warmup": 0.0, "nesterov": False},
}


def main(arguments: list[str] | None = None) -> int:
    """Train, once a seed; gives the exit code."""
    parser = _parser()
    parser.set_defaults(**_DEFAULTS.get(parser.parse_args(arguments).objective, {}))
    options = parser.parse_args(arguments)
    try:
        return _train_all(options)
    except AnytimeError as error:
        print(error, file=sys.stderr)
        return 2


def _train_all(options: argparse.Namespace) -> int:
    began = time.monotonic()
    folders = {seed: options.out if len(options.seeds) == 1 else options.out / f"seed-{seed}" for seed in options.seeds}
    for folder in () if options.resume else folders.values():
        check_new(folder)
    sets = load_cifar(options.data, options.root)
    split = hold_out(len(sets["train"]), options.held_out, seed=options.split_seed)
    train, val = split.apply(sets["train"])
    print(f"{options.data}: {len(train)} train, {len(val)} val, {len(sets['test'])} test ({time.monotonic() - began:.0f} s)")
    done = True
    for seed, folder in folders.items():
        left = None if options.minutes is None else options.minutes * 60 - (time.monotonic() - began) - _RESERVE
        if left is not None and left <= 0:
            print(f"seed {seed}: no time left, not begun")
            return 1
        done &= _train_one(options, seed, folder, split, (train, val, sets["test"]), left)
    return 0 if done else 1


def _train_one(
    options: argparse.Namespace,
    seed: int,
    folder: Path,
    split: Split,
    sets: tuple[ImageData, ImageData, ImageData],
    seconds: float | None,
) -> bool:
    """One run with all its files; whether it came to its end."""
    with lock_run(folder):
        if not options.resume:
            check_new(folder)
        if is_finished(folder):
            check_finished(folder, _FILES)
            print(f"the run in {folder} is finished\n{(folder / _SUMMARY).read_text()}", flush=True)
            return True
        return _train_locked(options, seed, folder, split, sets, seconds)


def _train_locked(
    options: argparse.Namespace,
    seed: int,
    folder: Path,
    split: Split,
    sets: tuple[ImageData, ImageData, ImageData],
    seconds: float | None,
) -> bool:
    train, val, test = sets
    config, machine = _config(options, seed), _machine(options)
    model = start_network(options.model, config, classes=train.classes, init=options.init)
    described = {"network": type(model).__name__, **_describe(options, config, machine)}
    print(json.dumps(described), flush=True)
    _write(folder / "config.json", json.dumps(described, indent=1).encode())
    _write(folder / "split.json", split.to_json().encode())
    fit_options = FitOptions(
        folder=folder,
        resume=options.resume,
        checkpoint_every=options.checkpoint_every,
        evaluate_every=options.evaluate_every,
        seconds=seconds,
        on_epoch=lambda line: _say(line, config),
    )
    outcome = fit(model, train, config, val=val, machine=machine, options=fit_options)
    if not outcome.finished:
        print(f"stopped at step {outcome.step} of {outcome.steps}: {outcome.stopped}; go on with --resume", flush=True)
        if outcome.stopped == CTRL_C:
            raise KeyboardInterrupt
        return False
    _finish(folder, model, {"val": val, "test": test}, outcome, config, machine)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return True


def _finish(
    folder: Path,
    model: MultiExit,
    sets: dict[str, ImageData],
    outcome: Outcome,
    config: TrainConfig,
    machine: Hardware,
) -> None:
    """Write logits, weights and the summary."""
    rule = learnt_rule(config)
    summary: dict[str, Any] = {
        "seed": config.seed,
        "epochs": config.epochs,
        "seconds": round(outcome.seconds, 1),
        "images_per_second": round(outcome.images_per_second),
    }
    for name, data in sets.items():
        logits = Evaluation(model, data, graph=machine.graph).logits()
        summary[f"{name}_accuracy"] = [round(share, 5) for share in exit_accuracy(logits, data.labels, rule)]
        stored = io.BytesIO()
        np.savez(stored, logits=logits.numpy().astype(np.float16), labels=data.labels.numpy(), indices=data.rows.numpy())
        _write(folder / f"{name}.npz", stored.getvalue())
    _write(folder / "model.safetensors", tensors_to_bytes(model.state_dict()))
    _write(folder / _SUMMARY, json.dumps(summary, indent=1).encode())
    finish(folder, _FILES)
    print(json.dumps(summary), flush=True)


def _config(options: argparse.Namespace, seed: int) -> TrainConfig:
    return TrainConfig(
        epochs=options.epochs,
        batch=options.batch,
        lr=_RATE_PER_IMAGE * options.batch if options.lr is None else options.lr,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay,
        optimizer=options.optimizer,
        schedule=options.schedule,
        milestones=tuple(options.milestones),
        warmup=min(options.warmup, options.epochs),
        objective=options.objective,
        frozen=tuple(options.frozen),
        hold_statistics=options.hold_statistics,
        distillation=Distillation(share=options.teacher_share, temperature=options.temperature),
        l2w=L2W(strength=options.strength, centring=options.centring, meta_every=options.meta_every),
        seed=seed,
    )


def _machine(options: argparse.Namespace) -> Hardware:
    cuda = options.device.startswith("cuda")
    return Hardware(
        device=options.device,
        precision=options.precision or ("bfloat16" if cuda else "float32"),
        channels_last=cuda if options.channels_last is None else options.channels_last,
        graph=cuda if options.graph is None else options.graph,
        compile=options.compile,
        fused=options.fused,
        streams=options.streams,
    )


def _describe(options: argparse.Namespace, config: TrainConfig, machine: Hardware) -> dict[str, Any]:
    """All that was asked for and where it ran."""
    on_gpu = machine.device.startswith("cuda")
    return {
        "model": options.model,
        "init": None if options.init is None else options.init.name,
        "data": options.data,
        "held_out": options.held_out,
        "split_seed": options.split_seed,
        "recipe": config.to_json(),
        "machine": machine.to_json(),
        "hardware": torch.cuda.get_device_name(machine.device) if on_gpu else "cpu",
        "torch": torch.__version__,
    }


def _say(line: EpochLog, config: TrainConfig) -> None:
    if line.val_accuracy is not None:
        shares = " ".join(f"{share:.4f}" for share in line.val_accuracy)
        losses = " ".join(f"{loss:.3f}" for loss in line.losses)
        print(
            f"epoch {line.epoch}/{config.epochs}  val {shares}  loss {losses}  lr {line.lr:.4f}  "
            f"{line.images_per_second:,.0f} images/s  {line.seconds:.0f} s",
            flush=True,
        )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m anytime.train.cifar", description="Train a network with exits on CIFAR.")
    add = parser.add_argument
    add("--data", choices=("cifar10", "cifar100"), default="cifar100")
    add("--root", type=Path, required=True, help="folder with the data, in any of its published forms")
    add("--out", type=Path, required=True, help="folder for log, logits and weights; one folder a seed where there are several")
    add("--model", default="msdnet-cifar", help="name of the network")
    add("--init", type=Path, help="weights to begin from: a safetensors file, or the folder of a run")
    add("--epochs", type=int, default=200)
    add("--batch", type=int, default=256)
    add("--lr", type=float, help="highest learning rate; .1 for each 64 images of a batch by default")
    add("--nesterov", action=argparse.BooleanOptionalAction, default=True)
    add("--weight-decay", type=float, default=1e-4)
    add("--optimizer", choices=get_args(OptimizerName), default="sgd")
    add("--schedule", choices=get_args(Schedule), default="cosine")
    add("--milestones", type=float, nargs="+", default=TrainConfig.milestones, metavar="SHARE", help="of the epochs, with step")
    add("--warmup", type=float, default=5.0, help="epochs")
    add("--objective", choices=get_args(Objective), default="joint")
    add("--frozen", nargs="+", default=[], metavar="NAME", help="modules that keep their weights, such as blocks")
    add("--hold-statistics", action="store_true", help="frozen batch norms keep their statistics too")
    _add_objective_settings(parser)
    add("--seeds", "--seed", type=int, nargs="+", default=[0], help="one run each, one after the other")
    add("--held-out", type=int, default=5000, help="validation rows, split off the training rows")
    add("--split-seed", type=int, default=0)
    add("--minutes", type=float, help="stop cleanly, with a checkpoint, before this limit for the whole command")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    add("--checkpoint-every", type=int, default=5, help="epochs")
    add("--evaluate-every", type=int, default=10, help="epochs")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=("float32", "bfloat16"), help="bfloat16 on a GPU by default")
    add("--channels-last", action=argparse.BooleanOptionalAction, help="on a GPU by default")
    add("--graph", action=argparse.BooleanOptionalAction, help="the step as a CUDA graph; on a GPU by default")
    add("--compile", action="store_true", help="fuse with torch.compile; takes minutes to begin")
    add("--fused", action="store_true", help="batch norm and ReLU as one operation (Triton)")
    add("--streams", action="store_true", help="independent parts of an MSDNet side by side")
    return parser


def _add_objective_settings(parser: argparse.ArgumentParser) -> None:
    taught = parser.add_argument_group("with distillation and one-for-all")
    taught.add_argument("--teacher-share", type=float, default=Distillation.share)
    taught.add_argument("--temperature", type=float, default=Distillation.temperature)
    weighed = parser.add_argument_group("with l2w")
    weighed.add_argument("--strength", type=float, default=L2W.strength, help="how far weights go from 1")
    weighed.add_argument("--centring", choices=get_args(Centring), default=L2W.centring)
    weighed.add_argument("--meta-every", type=int, default=L2W.meta_every, help="batches between steps of the weight network")


if __name__ == "__main__":
    run_program(main)
