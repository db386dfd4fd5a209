"""`anytime train RECIPE --out FOLDER`: train a network with exits, by a recipe, a file or flags, and go on after a stop."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from anytime.errors import OptionError
from anytime.process import INTERRUPTED
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from anytime.train.log import EpochLog
    from anytime.train.run import RunResult
    from anytime.train.settings import RunConfig, Source

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


def train(
    recipe: str | None = None,
    /,
    *,
    out: Path | None = None,
    config: Path | None = None,
    resume: Flag = False,
    list_: Annotated[bool, Parameter(name="--list", negative=(), show_default=False)] = False,
    data: Literal["cifar10", "cifar100", "digits", "imagenet", "imdb", "sst2", "trec", "banking77", "clinc150"] | None = None,
    root: Path | None = None,
    init: Path | None = None,
    model: str | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: Literal["step", "cosine", "linear"] | None = None,
    warmup: float | None = None,
    objective: str | None = None,
    held_out: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    precision: Literal["float32", "bfloat16"] | None = None,
    processes: int | None = None,
    workers: int | None = None,
    minutes: float | None = None,
    checkpoint_every: int | None = None,
    evaluate_every: int | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    json: Flag = False,
) -> int:
    """Train a network with exits. Flags win over the file, the file over the recipe.

    Args:
        recipe: A recipe that ships with the library, by name.
        out: Folder of the run: settings, log, picture, checkpoint, and at the end network, logits and summary.
        config: A YAML file with settings, such as the config.yaml of another run.
        resume: Go on with the run in --out; nothing else is needed.
        list_: List the recipes.
        data: The data set.
        root: Folder with the data; digits need none.
        init: Weights to begin from: a safetensors file or the folder of a run.
        model: The network, by name; the data set says how many classes it has.
        epochs: Passes over the training rows.
        batch: Images a step, of all processes together.
        lr: The learning rate at its highest.
        momentum: Of stochastic gradient descent.
        weight_decay: L2.
        schedule: How the rate falls.
        warmup: Epochs over which the rate first climbs.
        objective: What is minimised, such as joint, product or joint-then-product.
        held_out: Validation rows, split off the training rows.
        seed: Of the network's start, the order and the crops.
        device: cpu, cuda or cuda:1; a GPU where there is one.
        precision: Of convolutions and linear layers.
        processes: How many share each batch, each on a device of its own where there are GPUs.
        workers: Threads that decode images, for ImageNet.
        minutes: Stop, with a checkpoint, after this many.
        checkpoint_every: Epochs between checkpoints.
        evaluate_every: Epochs between validations.
        set_: Any other setting, as NAME=VALUE, such as nesterov=true; once for each.
        json: Print the summary as one JSON document.
    """
    given = dict(locals())
    if list_:
        return list_recipes()
    from anytime.artifacts import write_json
    from anytime.cli.doctor import environment
    from anytime.train.parallel import leads
    from anytime.train.run import claim, is_finished
    from anytime.train.run import train as run

    if out is None:
        raise OptionError("no folder for the run was given", expected="--out FOLDER", fix="add --out")
    with claim(prepare(given, out), out, resume=resume) as settings:
        before = is_finished(out)
        if leads():
            print(settings.to_yaml(), file=sys.stderr)
            if not before:
                write_json(out / "environment.json", environment())
        result = run(settings, out, on_epoch=EpochTalk(out, settings.recipe.epochs))
    if leads() and before:
        print(f"anytime: the run in {out} is finished; nothing was trained", file=sys.stderr)
    return show(result, json=json) if leads() else 0


def prepare(given: dict[str, Any], out: Path) -> RunConfig:
    """The settings of the run that was asked for."""
    from anytime.train.run import stored_config
    from anytime.train.settings import read_recipe, read_settings, resolve

    recipe, config, flags = given["recipe"], given["config"], flags_in(given)
    if given["resume"]:
        if recipe or config:
            raise OptionError(
                f"--resume came with {recipe or config}",
                expected="--resume --out FOLDER: the folder has the settings",
                fix=f"leave {recipe or '--config'} out",
            )
        return stored_config(out, flags)
    named = [] if recipe is None else [read_recipe(recipe)]
    files = [] if config is None else [read_settings(config)]
    return resolve(*named, *files, flags)


def flags_in(given: dict[str, Any]) -> Source:
    """The settings among the arguments of `train`, those of --set too."""
    from anytime.train.settings import Source, read_pair, setting_names

    names = set(setting_names())
    flags = {name: value for name, value in given.items() if name in names and value is not None}
    for name in {"root", "init"} & flags.keys():
        flags[name] = str(flags[name])
    return Source("command line", {**flags, **dict(read_pair(text) for text in given["set_"] or ())})


def list_recipes() -> int:
    """Print the recipes with a sentence on each."""
    from anytime.train.settings import read_recipe, recipe_names

    width = max(len(name) for name in recipe_names())
    for name in recipe_names():
        values = read_recipe(name).values
        expected = values.get("expected")
        reached = f" (last exit {expected['accuracy'][-1]:.3f})" if expected else ""
        print(f"{name:{width}}  {values['about']}{reached}")
    return 0


def show(result: RunResult, *, json: bool) -> int:
    """Say how the run ended; gives the exit code: 1 if it has not ended, or stays below what was expected, 130 after Ctrl-C."""
    from anytime.train.stopping import CTRL_C

    if result.summary is None:
        print(f"Stopped at step {result.step:,} of {result.steps:,}: {result.stopped}. Nothing is lost.", file=sys.stderr)
        print(f"Go on with: anytime train --resume --out {result.folder}", file=sys.stderr)
        return INTERRUPTED if result.stopped == CTRL_C else 1
    if json:
        import json as writer

        print(writer.dumps(result.summary, allow_nan=False))
    else:
        print(f"test accuracy by exit: {_shares(result.summary['test_accuracy'])}")
    missed = result.summary.get("missed_exits")
    if missed is not None:
        told = f"expected {_shares(result.summary['expected_accuracy'])}, less {result.summary['tolerance']:g} at most"
        print(f"not reached by exit {', '.join(map(str, missed))}: {told}" if missed else f"reached: {told}", file=sys.stderr)
    print(f"Next: anytime evaluate {result.folder / 'test.npz'} --out {result.folder / 'report'}", file=sys.stderr)
    return 1 if missed else 0


@dataclass(frozen=True)
class EpochTalk:
    """Says how an epoch went, and draws the run's curve anew."""

    folder: Path
    epochs: int

    def __call__(self, line: EpochLog) -> None:
        from anytime.cli.curve import write_curve

        val = "" if line.val_accuracy is None else f"  val {_shares(line.val_accuracy)}"
        losses = " ".join(f"{loss:.3f}" for loss in line.losses)
        speed = f"{line.images_per_second:,.0f} inputs/s"
        print(f"epoch {line.epoch}/{self.epochs}{val}  loss {losses}  lr {line.lr:.3g}  {speed}", file=sys.stderr, flush=True)
        if line.val_accuracy is not None or line.epoch == self.epochs:
            write_curve(self.folder / "log.csv", self.folder / "curve.svg")


def _shares(shares: Any) -> str:
    return " ".join(f"{share:.4f}" for share in shares)
