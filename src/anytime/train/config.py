"""What is trained and how: a recipe, and apart from it the machine it runs on.

Two runs with the same recipe learn the same thing up to rounding, whatever the machine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from anytime.checks import check_choice, check_count, check_flag, check_number, check_seed
from anytime.errors import OptionError

Schedule = Literal["step", "cosine", "linear"]
Objective = Literal["joint", "product", "joint-then-product", "sdn", "distillation", "equilibrium", "one-for-all", "l2w"]
Centring = Literal["mat", "col", "row"]
Precision = Literal["float32", "bfloat16"]
OptimizerName = Literal["sgd", "adam", "adamw"]
_MOST = 2**53
"""More epochs or rows in a batch than these no float counts."""


@dataclass(frozen=True)
class Distillation:
    """How exits learn from a teacher; the defaults are IMTA's.

    Args:
        teacher: Which exit `distillation` takes for the teacher, from 0; -1 is the last.
        share: Of the teacher in a student's loss (γ); the rest is that of the labels.
        temperature: By which teacher's and student's logits are divided.
    """

    teacher: int = -1
    share: float = 0.1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.teacher, bool) or not isinstance(self.teacher, int):
            raise OptionError(f"teacher is {self.teacher!r}", expected="the number of an exit", fix="-1 is the last")
        check_number(self.share, "share", low=0, most=1)
        check_number(self.temperature, "temperature", above=0)


@dataclass(frozen=True)
class L2W:
    """How a network learns to weigh samples (L2W); the defaults are those for CIFAR.

    Args:
        strength: How far weights go from 1 (ε).
        centring: What is subtracted from the predicted weights: their mean over all (`mat`), over a sample's exits (`col`) or
            over an exit's samples (`row`).
        ratio: Of the share of samples that leave at an exit to that at the exit before (q).
        meta_every: Batches from one step of the weight network to the next, counted in each epoch.
        meta_lr: The weight network's highest learning rate; it falls as `lr` does.
        meta_weight_decay: Its L2 decay.
    """

    strength: float = 0.8
    centring: Centring = "col"
    ratio: float = 0.75
    meta_every: int = 1
    meta_lr: float = 1e-4
    meta_weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        check_number(self.strength, "strength", low=0)
        check_choice(self.centring, "centring", get_args(Centring))
        check_number(self.ratio, "ratio", above=0)
        check_count(self.meta_every, "meta_every")
        check_number(self.meta_lr, "meta_lr", low=0)
        check_number(self.meta_weight_decay, "meta_weight_decay", low=0)


@dataclass(frozen=True)
class TrainConfig:
    """A recipe. The defaults are those of MSDNet on CIFAR: batch 64, 300 epochs, the rate divided by 10 twice.

    Args:
        epochs: Passes over the training rows.
        batch: Images or texts a step; rows that do not fill a batch are left out of an epoch, others in each epoch.
        lr: The learning rate at its highest.
        head_rate: By how much the rate of exits' heads, and of what they mix, is higher than that of the rest.
        optimizer: `sgd`, `adam` for heads on a frozen backbone, or `adamw` for pretrained encoders.
        momentum: Of stochastic gradient descent.
        nesterov: Whether to look ahead by Nesterov's rule.
        weight_decay: L2, on all parameters; with `adamw` apart from the gradient, and on matrices alone.
        schedule: `step` divides the rate by 10 at each of the `milestones`, `cosine` and `linear` go down to 0.
        milestones: Shares of the epochs.
        warmup: Epochs over which the rate first climbs.
        objective: `joint` is the sum of the exits' cross-entropies (Eq. 1), `product` the likelihood of Product Anytime,
            `joint-then-product` the paper's finetuning: the first, and for the last part of the epochs the second. `sdn` is
            `joint` with weights that grow over the epochs, `distillation` lets one exit teach the others, `equilibrium` and
            `one-for-all` are the two stages of IMTA, `l2w` learns a weight for each sample and exit.
        product_from: At which share of the epochs `joint-then-product` changes over.
        exit_weights: One weight an exit, or none for all ones; for `sdn`, what they grow to.
        frozen: Names of modules whose parameters stay as they are, such as `blocks` for the heads of an MSDNet alone.
        hold_statistics: Whether frozen modules compute as in evaluation: batch norms keep their statistics, nothing is dropped.
        distillation: Settings of `distillation` and `one-for-all`.
        l2w: Settings of `l2w`.
        augment: Whether training images are cropped (padding 4) and mirrored at random; texts are not changed.
        seed: Of the order, the crops and what is dropped. The network's own start is the caller's.
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
    objective: Objective = "joint"
    product_from: float = 2 / 3
    exit_weights: tuple[float, ...] | None = None
    frozen: tuple[str, ...] = ()
    hold_statistics: bool = False
    distillation: Distillation = field(default_factory=Distillation)
    l2w: L2W = field(default_factory=L2W)
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.epochs, "epochs", most=_MOST)
        check_count(self.batch, "batch", most=_MOST)
        check_seed(self.seed)
        for name in ("lr", "head_rate"):
            check_number(getattr(self, name), name, above=0)
        check_number(self.momentum, "momentum", low=0, most=1)
        check_number(self.weight_decay, "weight_decay", low=0)
        check_number(self.warmup, "warmup", low=0, most=self.epochs)
        check_number(self.product_from, "product_from", low=0, most=1)
        check_choice(self.optimizer, "optimizer", get_args(OptimizerName))
        check_choice(self.schedule, "schedule", get_args(Schedule))
        check_choice(self.objective, "objective", get_args(Objective))
        for name in ("nesterov", "augment", "hold_statistics"):
            check_flag(getattr(self, name), name)
        if self.exit_weights is not None:
            object.__setattr__(self, "exit_weights", _numbers("exit_weights", self.exit_weights, 0, sys.float_info.max))
        object.__setattr__(self, "milestones", _numbers("milestones", self.milestones, 0, 1))
        if not isinstance(self.frozen, tuple | list) or not all(isinstance(name, str) for name in self.frozen):
            raise OptionError(f"frozen is {self.frozen!r}", expected="a tuple of names of modules", fix="('blocks',)")
        object.__setattr__(self, "frozen", tuple(self.frozen))
        for name, kind in (("distillation", Distillation), ("l2w", L2W)):
            if not isinstance(getattr(self, name), kind):
                raise OptionError(f"{name} is {getattr(self, name)!r}", expected=f"a {kind.__name__}", fix=f"correct {name}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_json` gave; unknown names are refused."""
        _known(cls, values)
        read = dict(values)
        for name in ("exit_weights", "frozen", "milestones"):
            if isinstance(read.get(name), list):
                read[name] = tuple(read[name])
        for name, kind in (("distillation", Distillation), ("l2w", L2W)):
            if isinstance(read.get(name), dict):
                read[name] = _part(name, kind, read[name])
        return cls(**read)


@dataclass(frozen=True)
class Hardware:
    """Where and with which arithmetic a recipe runs.

    Args:
        device: `cpu`, `cuda`, `cuda:1`.
        precision: `bfloat16` computes convolutions and linear layers in bfloat16; weights, batch norm's statistics and the
            loss stay float32.
        channels_last: Whether images and weights have their channels innermost in memory.
        graph: Whether the whole step is captured as a CUDA graph.
        compile: Whether `torch.compile` fuses the forward and backward pass.
        fused: Whether batch norm and ReLU are one operation, by Triton kernels for channels-last maps.
        streams: Whether independent parts of an MSDNet run side by side on a GPU.
    """

    device: str = "cpu"
    precision: Precision = "float32"
    channels_last: bool = False
    graph: bool = False
    compile: bool = False
    fused: bool = False
    streams: bool = False

    def __post_init__(self) -> None:
        check_choice(self.precision, "precision", get_args(Precision))
        for name in ("channels_last", "graph", "compile", "fused", "streams"):
            check_flag(getattr(self, name), name)
        if (self.graph or self.streams) and not self.device.startswith("cuda"):
            raise OptionError(
                f"a CUDA graph or streams were asked for on {self.device}",
                expected="device='cuda'",
                fix="leave graph and streams off on a CPU",
            )
        if self.compile and (self.streams or self.fused):
            raise OptionError(
                "compile was asked for with streams or fused", expected="one or the other", fix="leave compile off"
            )
        if self.fused and not self.channels_last:
            raise OptionError("fused was asked for without channels_last", expected="both", fix="set channels_last too")

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read back what `to_json` gave; unknown names are refused."""
        _known(cls, values)
        return cls(**values)

    @classmethod
    def best(cls, device: str) -> Self:
        """The fastest settings for a device."""
        if device.startswith("cuda"):
            return cls(device=device, precision="bfloat16", channels_last=True, graph=True)
        return cls(device=device)


def _part(name: str, kind: type[Any], values: dict[str, Any]) -> Any:
    """Settings within a setting; what is wrong in them is said with its name."""
    try:
        _known(kind, values)
        return kind(**values)
    except OptionError as error:
        raise OptionError(f"{name} has a wrong setting: {error.got}", expected=error.expected, fix=error.fix) from error


def _known(kind: type[Any], values: dict[str, Any]) -> None:
    names = {field.name for field in fields(kind)}
    unknown = sorted(str(name) for name in values if name not in names)
    if unknown:
        raise OptionError(
            f"unknown settings {', '.join(unknown)}", expected=f"some of {', '.join(sorted(names))}", fix="correct the name"
        )


def _numbers(name: str, values: Any, low: float, high: float) -> tuple[float, ...]:
    if not isinstance(values, tuple | list):
        raise OptionError(f"{name} is {values!r}", expected="a list of numbers", fix=f"write {name} as a list")
    for value in values:
        check_number(value, name, low=low, most=high)
    return tuple(float(value) for value in values)
