"""What is trained and how: the recipe, and separately the hardware it runs on.

Two runs with the same recipe learn the same up to rounding, on any hardware.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from anytime.checks import check_choice, check_count, check_flag, check_number, check_seed, check_threads
from anytime.errors import OptionError

Schedule = Literal["step", "cosine", "linear"]
ObjectiveName = Literal["joint", "product", "joint-then-product", "sdn", "distillation", "equilibrium", "one-for-all", "l2w"]
Centring = Literal["mat", "col", "row"]
Precision = Literal["float32", "bfloat16"]
OptimizerName = Literal["sgd", "adam", "adamw"]
_EXACT_IN_FLOAT64 = 2**53
_LARGEST_RATE = 1e30


@dataclass(frozen=True)
class Distillation:
    """How exits learn from a teacher; the defaults are IMTA's.

    Args:
        teacher: The exit that teaches with the objective `distillation`, from 1; -1 is the last.
        weight: Weight of the teacher in a student's loss (γ); the labels have the rest.
        temperature: Divides the logits of teacher and student.
    """

    teacher: int = -1
    weight: float = 0.1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if type(self.teacher) is not int or self.teacher == 0:
            raise OptionError(
                f"teacher is {self.teacher!r}", expected="the number of an exit", fix="set teacher=-1 for the last exit"
            )
        check_number(self.weight, "weight", low=0, most=1)
        check_number(self.temperature, "temperature", above=0)


@dataclass(frozen=True)
class L2W:
    """How a network learns to weight samples (L2W); the defaults are those for CIFAR.

    Args:
        strength: Scale of the weights' deviation from 1 (ε).
        centring: Which mean is subtracted from the predicted weights: of all (`mat`), of each sample over the exits (`col`) or
            of each exit over the samples (`row`).
        ratio: Fraction of samples that leave at an exit, divided by that of the exit before (q).
        meta_every: Batches between steps of the weight network, counted in each epoch.
        meta_lr: The weight network's highest learning rate; it follows the schedule of `lr`.
        meta_weight_decay: The weight network's L2 decay.
    """

    strength: float = 0.8
    centring: Centring = "col"
    ratio: float = 0.75
    meta_every: int = 1
    meta_lr: float = 1e-4
    meta_weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("strength", "meta_lr", "meta_weight_decay"):
            check_number(getattr(self, name), name, low=0, most=_LARGEST_RATE, fix=f"pass a number such as {name}=0.0001")
        check_choice(self.centring, "centring", get_args(Centring))
        check_number(self.ratio, "ratio", above=0)
        check_count(self.meta_every, "meta_every")


@dataclass(frozen=True)
class StrongAugment:
    """Strong augmentation of training images; by default none. Images are in memory or streamed by this library.

    Args:
        operations: Operations of RandAugment per image, each applied with probability one half; 0 for none.
        magnitude: Their mean magnitude, from 0 to 10.
        erasing: Probability that a random box of an image is replaced by noise.
        mixup: Parameter of the beta distribution of the weights with which pairs of images and their labels are mixed.
        cutmix: The same for the area of a box that is exchanged. With both, each batch has one of them, chosen at random.
    """

    operations: int = 0
    magnitude: float = 9.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        check_count(self.operations, "operations", low=0, most=16)
        for name, most in (("magnitude", 10.0), ("erasing", 1.0), ("mixup", 100.0), ("cutmix", 100.0)):
            check_number(getattr(self, name), name, low=0, most=most)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def used(self) -> bool:
        """Whether images are changed at all."""
        return self.operations > 0 or self.erasing > 0 or self.mixes


@dataclass(frozen=True)
class TrainConfig:
    """A recipe. The defaults are those of MSDNet on CIFAR: batch 64, 300 epochs, learning rate divided by 10 twice.

    Args:
        epochs: Passes over the training rows.
        batch: Rows per step. Rows that do not fill a batch are left out of an epoch, different ones in each.
        lr: The highest learning rate.
        head_rate: Factor on the learning rate of the exits' heads, and of what they mix.
        optimizer: `sgd`, `adam` for heads on a frozen backbone, or `adamw` for pretrained encoders.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: L2 decay of all parameters; with `adamw` decoupled, and of matrices alone.
        schedule: `step` divides the learning rate by 10 at each milestone, `cosine` and `linear` decrease it to 0.
        milestones: Fractions of the epochs.
        warmup: Epochs over which the learning rate first increases.
        objective: `joint` is the sum of the exits' cross-entropies (Eq. 1), `product` the likelihood of Product Anytime,
            `joint-then-product` the paper's finetuning: the first, then the second for the last part of the epochs. `sdn` is
            `joint` with weights that grow over the epochs, in `distillation` one exit teaches the others, `equilibrium` and
            `one-for-all` are the two stages of IMTA, `l2w` learns a weight per sample and exit.
        product_from: Fraction of the epochs after which `joint-then-product` switches to the product.
        exit_weights: One weight per exit, or None for all ones; for `sdn`, the final weights.
        frozen: Names of modules whose parameters do not change, such as `blocks` to train only the heads of an MSDNet.
        hold_statistics: Whether frozen modules run in evaluation mode: batch norms keep their statistics, dropout is off.
        distillation: Settings of `distillation` and `one-for-all`.
        l2w: Settings of `l2w`.
        augment: Whether training images are randomly cropped (padding 4) and mirrored; texts are not changed.
        strong_augment: RandAugment, random erasing, mixup and cutmix.
        label_smoothing: Part of a label's probability that is spread over all classes.
        average_decay: Highest decay of the exponential moving average of the weights, which is then what is validated and
            stored; 0 for no average.
        seed: Seed of the order, the augmentation and dropout. The network's initial weights are the caller's.
        clip_norm: Scale gradients down to this norm over all parameters; None to leave them as they are.
        steps_per_epoch: Steps of an epoch for batches from a loader; None for as many as it has.
    """

    epochs: int = 300
    batch: int = 64
    lr: float = 0.1
    head_rate: float = 1.0
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    schedule: Schedule = "step"
    milestones: tuple[float, ...] = (0.5, 0.75)
    warmup: float = 0.0
    objective: ObjectiveName = "joint"
    product_from: float = 2 / 3
    exit_weights: tuple[float, ...] | None = None
    frozen: tuple[str, ...] = ()
    hold_statistics: bool = False
    distillation: Distillation = field(default_factory=Distillation)
    l2w: L2W = field(default_factory=L2W)
    augment: bool = True
    strong_augment: StrongAugment = field(default_factory=StrongAugment)
    label_smoothing: float = 0.0
    average_decay: float = 0.0
    seed: int = 0
    clip_norm: float | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            check_count(getattr(self, name), name, most=_EXACT_IN_FLOAT64)
        if self.steps_per_epoch is not None:
            check_count(self.steps_per_epoch, "steps_per_epoch", most=_EXACT_IN_FLOAT64)
        check_seed(self.seed)
        for name in ("lr", "head_rate", *(() if self.clip_norm is None else ("clip_norm",))):
            check_number(getattr(self, name), name, above=0, most=_LARGEST_RATE, fix=f"pass a number such as {name}=0.1")
        check_number(self.weight_decay, "weight_decay", low=0)
        for name, most in (("momentum", 1), ("warmup", self.epochs), ("product_from", 1)):
            check_number(getattr(self, name), name, low=0, most=most)
        for name in ("label_smoothing", "average_decay"):
            check_number(getattr(self, name), name, low=0, below=1)
        for name, choices in (("optimizer", OptimizerName), ("schedule", Schedule), ("objective", ObjectiveName)):
            check_choice(getattr(self, name), name, get_args(choices))
        for name in ("nesterov", "augment", "hold_statistics"):
            check_flag(getattr(self, name), name)
        if self.exit_weights is not None:
            object.__setattr__(self, "exit_weights", _numbers(self.exit_weights, "exit_weights"))
        object.__setattr__(self, "milestones", _numbers(self.milestones, "milestones", most=1))
        if not isinstance(self.frozen, tuple | list) or not all(isinstance(name, str) for name in self.frozen):
            raise OptionError(
                f"frozen is {self.frozen!r}", expected="a list of module names", fix="write it as a list: frozen=[blocks]"
            )
        object.__setattr__(self, "frozen", tuple(self.frozen))
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                known = ", ".join(part.name for part in fields(kind))
                raise OptionError(
                    f"{name} is {getattr(self, name)!r}", expected=f"some of {known}", fix=f"write {name} as NAME: VALUE pairs"
                )

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned; unknown names are refused."""
        _check_known(cls, values)
        read = dict(values)
        distillation = read.get("distillation")
        if isinstance(distillation, dict) and "share" in distillation:  # its former name
            read["distillation"] = {"weight" if name == "share" else name: value for name, value in distillation.items()}
        for name, kind in _NESTED.items():
            if isinstance(read.get(name), dict):
                read[name] = _nested(name, kind, read[name])
        return cls(**read)


@dataclass(frozen=True)
class Hardware:
    """Where a recipe runs, and with which arithmetic.

    Args:
        device: `cpu`, `cuda`, `cuda:1`.
        precision: `bfloat16` computes convolutions and linear layers in bfloat16; weights, batch norm statistics and the loss
            stay float32.
        channels_last: Whether images and weights use the channels-last memory format.
        graph: Whether the step is captured as a CUDA graph.
        compile: Whether `torch.compile` fuses the forward and backward pass.
        streams: Whether independent parts of an MSDNet run on parallel CUDA streams.
        threads: Torch's threads on a CPU; by default one per core, which a small network does not need.
    """

    device: str = "cpu"
    precision: Precision = "float32"
    channels_last: bool = False
    graph: bool = False
    compile: bool = False
    streams: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.precision, "precision", get_args(Precision))
        for name in ("channels_last", "graph", "compile", "streams"):
            check_flag(getattr(self, name), name)
        if self.threads is not None:
            check_threads(self.threads)
        if (self.graph or self.streams) and not self.device.startswith("cuda"):
            raise OptionError(
                f"graph or streams is true with device {self.device}",
                expected="device=cuda",
                fix="set graph=false and streams=false",
            )
        if self.compile and self.streams:
            raise OptionError("compile and streams are true", expected="one of them", fix="set compile=false")

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned; unknown names are refused."""
        _check_known(cls, values)
        return cls(**values)

    @classmethod
    def best(cls, device: str) -> Self:
        """The fastest settings for a device."""
        if device.startswith("cuda"):
            return cls(device=device, precision="bfloat16", channels_last=True, graph=True)
        return cls(device=device)


_NESTED: dict[str, type[Any]] = {"distillation": Distillation, "l2w": L2W, "strong_augment": StrongAugment}


def _nested(name: str, kind: type[Any], values: dict[str, Any]) -> Any:
    """Settings within the setting `name`, which errors mention."""
    try:
        _check_known(kind, values)
        return kind(**values)
    except OptionError as error:
        raise OptionError(f"{name} has a wrong setting: {error.got}", expected=error.expected, fix=error.fix) from error


def _check_known(kind: type[Any], values: Mapping[str, Any]) -> None:
    names = sorted(part.name for part in fields(kind))
    for name in values:
        check_choice(name, "the name of a setting", names)


def _numbers(values: Any, name: str, *, most: float = sys.float_info.max) -> tuple[float, ...]:
    if not isinstance(values, tuple | list):
        raise OptionError(f"{name} is {values!r}", expected="a list of numbers", fix=f"write it as a list: {name}=[0.5]")
    return tuple(check_number(value, name, low=0, most=most) for value in values)
