"""IMTA, the improved training of an MSDNet by Li et al. (2019), in two stages.

The first stage trains an MSDNet but balances the gradients that meet in a stage (`balanced_exits`): those of its own exit and
those of all later exits. The second stage freezes that network and trains new linear classifiers, each of which also reads the
logits of the one before (`IMTA`), with the last exit of the first stage as a teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from anytime.checks import check_flag
from anytime.models import msdnet
from anytime.models.base import Carry, MultiExit
from anytime.models.msdnet import MSDNet, MSDNetConfig


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return `x`, and multiply its gradient by `scale` in the backward pass.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, 0.5).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    scaled: Tensor = _ScaledGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


def balanced_exits(network: MSDNet, x: Tensor) -> Iterator[Tensor]:
    """Yield the logits of each exit; in the backward pass, gradients from several exits are averaged instead of added.

    With k exits, the coarsest map of stage i (from 0) gets `(own + (k - i - 1) · later) / (k - i)`, where `own` comes from
    its exit and `later` from the next stage. The finer maps, which no exit reads, are not scaled, as in the published code.
    """
    for stage, (maps, classifier) in enumerate(zip(network.stages(x), network.classifier, strict=True)):
        left = network.num_exits - stage
        maps[-1] = scale_gradient(maps[-1], 1 / left)
        yield classifier(maps[-1])
        maps[-1] = scale_gradient(maps[-1], left - 1)


@dataclass(frozen=True)
class IMTAConfig(MSDNetConfig):
    """The shape of the MSDNet, and how it is frozen.

    Attributes:
        hold_statistics: Whether the frozen batch norms also keep their running statistics. By default these are updated in
            training, as in the published code.
    """

    hold_statistics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self.hold_statistics, "hold_statistics")

    @property
    def backbone(self) -> MSDNetConfig:
        """The shape of the MSDNet alone."""
        return MSDNetConfig(**_msdnet_fields(self))


class IMTA(MultiExit):
    """The network of the second stage: a frozen MSDNet with linear classifiers that read each other's logits.

    Exit 1 reads the pooled features of its stage; every later exit reads its features and a hidden layer over the logits of the
    exit before. The classifiers of the MSDNet are kept as teachers, and `exits` does not run them.

    Args:
        config: The shape; `PRESETS` has those of the published MSDNets.

    Example:
        >>> network = IMTA(IMTAConfig(classes=10)).eval()
        >>> [p.shape[1] for name, p in network.named_parameters() if name.startswith("heads") and p.ndim == 2][:2]
        [128, 256]
    """

    def __init__(self, config: IMTAConfig) -> None:
        super().__init__()
        self.config = config
        self.num_exits = config.exits
        self.backbone = MSDNet(config.backbone).requires_grad_(False)
        first, *later = (_linear(classifier).in_features for classifier in self.backbone.classifier)
        self.heads = nn.ModuleList(nn.Linear(width, config.classes) for width in (first, *(2 * width for width in later)))
        self.links = nn.ModuleList(
            nn.Sequential(nn.Linear(config.classes, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)) for width in later
        )

    @classmethod
    def on(cls, trained: MSDNet, *, hold_statistics: bool = False) -> Self:
        """Create a network on a copy of a trained MSDNet."""
        network = cls(IMTAConfig(**_msdnet_fields(trained.config), hold_statistics=hold_statistics))
        network.backbone.load_state_dict(trained.state_dict())
        return network.to(next(trained.parameters()).device).train(trained.training)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage; the first takes images, the others the maps of the MSDNet and the logits of the exit before."""
        self._check_carry(exit, carry)
        below, previous = (carry[:-1], carry[-1]) if exit else (carry, None)
        maps = self.backbone.maps(exit, below)
        logits = self._answer(exit, self._feature(exit, maps), previous)
        return (*maps, logits) if exit + 1 < self.num_exits else (), logits

    def carry_size(self, exit: int) -> int:
        """The maps of the MSDNet, and the logits of the exit before."""
        return self.backbone.carry_size(exit) + (exit > 0)

    def with_teacher(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of all exits, `(exits, batch, classes)`, and those of the MSDNet's last exit, without gradient."""
        features = [self._feature(exit, maps) for exit, maps in enumerate(self.backbone.stages(x))]
        teacher: Tensor = _linear(self.backbone.classifier[-1])(features[-1])
        answers: list[Tensor] = []
        for exit, feature in enumerate(features):
            answers.append(self._answer(exit, feature, answers[-1] if answers else None))
        return torch.stack(answers), teacher.detach()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.config.hold_statistics:
            self.backbone.eval()
        return self

    def _feature(self, exit: int, maps: list[Tensor]) -> Tensor:
        """The input of the linear layer in the MSDNet's classifier, `(batch, width)`."""
        pooled: Tensor = self.backbone.classifier[exit].get_submodule("m")(maps[-1])
        return pooled.flatten(1)

    def _answer(self, exit: int, feature: Tensor, previous: Tensor | None) -> Tensor:
        if previous is not None:
            feature = torch.cat((feature, self.links[exit - 1](previous)), dim=1)
        logits: Tensor = self.heads[exit](feature)
        return logits


def _linear(classifier: nn.Module) -> nn.Linear:
    linear = classifier.get_submodule("linear")
    assert isinstance(linear, nn.Linear)
    return linear


def _msdnet_fields(config: MSDNetConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(MSDNetConfig)}


PRESETS: Mapping[str, IMTAConfig] = MappingProxyType(
    {name.replace("msdnet", "imta"): IMTAConfig(**vars(config)) for name, config in msdnet.PRESETS.items()}
)
"""One network for each of the published MSDNets."""
