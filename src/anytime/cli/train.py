"""`anytime train RECIPE --out FOLDER`: train a network with exits by a recipe, a file or flags, and resume it after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from anytime.cli.options import Flag

if TYPE_CHECKING:
    from anytime.train.log import EpochLog

# As `anytime.train.settings.DataName`, which imports torch.
Images = Literal["cifar10", "cifar100", "digits", "imagenet", "tiny-imagenet"]
Texts = Literal["imdb", "sst2", "agnews", "trec", "banking77", "clinc150"]


def train(
    recipe: str | None = None,
    /,
    *,
    out: Path | None = None,
    config: Path | None = None,
    resume: Flag = False,
    list_: Annotated[bool, Parameter(name="--list", negative=(), show_default=False)] = False,
    data: Images | Texts | None = None,
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
    seeds: Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True)] = None,
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
    """Train a network with exits. Flags override the file, the file overrides the recipe.

    Args:
        recipe: A recipe that ships with the library, by name.
        out: Folder of the run: settings, log, curves, checkpoint, and at the end network, logits and summary.
        config: A YAML file with settings, such as the config.yaml of another run.
        resume: Continue the run in --out; its folder has all settings.
        list_: List the recipes.
        data: The data set.
        root: Folder with the data; digits need none.
        init: Initial weights: a safetensors file or the folder of a run.
        model: The network, by name; the data set sets its number of classes.
        epochs: Passes over the training rows.
        batch: Rows per step, of all processes together.
        lr: The highest learning rate.
        momentum: Momentum of SGD.
        weight_decay: L2 decay.
        schedule: How the learning rate decreases.
        warmup: Epochs over which the learning rate first increases.
        objective: The loss to minimise, such as joint, product or joint-then-product.
        held_out: Validation rows, split off the training rows.
        seed: Seed of the initial weights, the order and the crops.
        seeds: Several seeds, one run each in a folder seed-N of --out; minutes is then the limit for all.
        device: cpu, cuda or cuda:1; by default a GPU if there is one.
        precision: Precision of convolutions and linear layers.
        processes: Number of processes that train together, each on its own GPU if there are GPUs.
        workers: Threads that decode images, for ImageNet.
        minutes: Stop, with a checkpoint, after this many minutes.
        checkpoint_every: Epochs between checkpoints.
        evaluate_every: Epochs between validations.
        set_: Any other setting, as NAME=VALUE, such as nesterov=true; may be repeated.
        json: Print the summary as one JSON document.
    """
    given = dict(locals())
    from anytime.train.command import Command, list_recipes, run_command
    from anytime.train.settings import read_pair, setting_names

    if list_:
        return list_recipes()
    flags = {name: given[name] for name in setting_names() if given.get(name) is not None}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    settings |= dict(read_pair(text) for text in set_ or ())
    return run_command(
        Command(recipe, out, config, resume, settings, seeds or (), json, prepare=write_environment, on_epoch=draw_curve)
    )


def write_environment(folder: Path) -> None:
    """Write environment.json: the versions and the machine of the run."""
    from anytime.artifacts import write_json
    from anytime.installed import environment

    write_json(folder / "environment.json", environment())


def draw_curve(folder: Path, line: EpochLog, epochs: int) -> None:
    """Draw curve.svg after each validation."""
    from anytime.cli.curve import write_curve

    if line.val_accuracy is not None or line.epoch == epochs:
        write_curve(folder / "log.csv", folder / "curve.svg")
