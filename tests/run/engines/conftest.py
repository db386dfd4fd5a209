"""Every network of the library in small, with random batch norm statistics, and a replacement for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anytime.models import (
    IMTA,
    MLP,
    AveragedEnsemble,
    Carry,
    CifarResNet,
    DViT,
    DViTConfig,
    Ensemble,
    IMTAConfig,
    IntervalMLP,
    MLPConfig,
    MSDNet,
    MSDNetConfig,
    MultiExit,
    ResNet,
    ResNetConfig,
    attach_cascade,
    attach_exits,
)
from anytime.run.engines.cuda import CudaGraphs, Recorded, Step

SHAPE: dict[str, Any] = {"classes": 4, "exits": 3, "base": 1, "step": 1, "channels": 4, "growth": 4}
SMALL_DVIT = DViTConfig(
    classes=4,
    image_size=16,
    unfolds=(((8, 8, 0),), ((4, 4, 0),)),
    width=16,
    depth=1,
    heads=2,
    performer_width=8,
    random_features=4,
    reuse_hidden=8,
    reuse_width=6,
)


DVIT = replace(SMALL_DVIT, unfolds=(((7, 4, 2), (3, 2, 1)), ((5, 3, 1), (3, 2, 1)), ((3, 2, 1), (3, 2, 1))), depth=2)


def _images(rows: int = 2, side: int = 32) -> Tensor:
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(1))


def _points(rows: int = 2, width: int = 2) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def _resnet() -> CifarResNet:
    return CifarResNet(classes=4, depth=8, width=4)


def _mlp(exits: int = 3) -> MLP:
    return MLP(MLPConfig(classes=4, width=8, exits=exits))


ZOO: dict[str, tuple[Callable[[], MultiExit], Tensor]] = {
    "msdnet": (lambda: MSDNet(MSDNetConfig(**SHAPE)), _images()),
    "msdnet-min": (lambda: MSDNet(MSDNetConfig(**SHAPE, prune="min")), _images()),
    "imta": (lambda: IMTA(IMTAConfig(**SHAPE)), _images()),
    "dvit": (lambda: DViT(SMALL_DVIT), _images(side=16)),
    "mlp": (_mlp, _points()),
    "intervals": (lambda: IntervalMLP(exits=3), _points(width=1)),
    "ensemble": (lambda: Ensemble([nn.Linear(2, 4), _mlp(1)]), _points()),
    "averaged": (lambda: AveragedEnsemble([_mlp(), Ensemble([_mlp(1) for _ in range(3)])]), _points()),
    "attached": (
        lambda: attach_exits(_resnet(), ["blocks.0", "blocks.1.conv1", "blocks.1"], example=_images(), classes=4),
        _images(),
    ),
    "cascade": (lambda: attach_cascade(_resnet(), ["stem", "blocks.0"], example=_images(), classes=4), _images()),
    "resnet": (lambda: ResNet(ResNetConfig(classes=4, depth=8, width=4, at=(0.3, 0.6))), _images()),
    "dvit-performers": (lambda: DViT(DVIT), _images(side=16)),
}


def settled(model: MultiExit) -> MultiExit:
    """The model in eval mode, with batch norms as after training."""
    generator = torch.Generator().manual_seed(2)
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0, 0.3, generator=generator)
            part.running_var.uniform_(0.5, 2, generator=generator)
            part.weight.data.uniform_(0.5, 2, generator=generator)
            part.bias.data.normal_(0, 0.3, generator=generator)
    return model.eval().requires_grad_(False)


@pytest.fixture
def make_network() -> Callable[[str], tuple[MultiExit, Tensor]]:
    """A network by name, and an example."""

    def make(name: str) -> tuple[MultiExit, Tensor]:
        torch.manual_seed(0)
        return settled(ZOO[name][0]()), ZOO[name][1]

    return make


@pytest.fixture
def settle() -> Callable[[MultiExit], MultiExit]:
    """Puts a model into the state that it has after training."""
    return settled


class OnCPU(CudaGraphs):
    """Records like CUDA graphs: replays read and write the same memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.replays = 0
        self.times: dict[tuple[int, str], float] = {}  # by batch size and variant

    def record(self, steps: Sequence[Step], carry: Carry) -> list[Recorded]:
        recorded = []
        for step in steps:
            left, logits = step(carry)
            recorded.append(Recorded(left, logits, self._again(step, carry, (*left, logits))))
            carry = left
        return recorded

    def _again(self, step: Step, given: Carry, places: Carry) -> Callable[[], None]:
        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            left, logits = step(given)
            for place, new in zip(places, (*left, logits), strict=True):
                place.copy_(new)

        return replay

    def mark(self, device: torch.device) -> None:
        raise AssertionError("inputs on the CPU need no event")

    def queue(self, after: None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def exact(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self) -> None:
        pass

    def seconds(self, work: Callable[[], None]) -> float:
        work()
        lane: Any = work.__self__  # type: ignore[attr-defined]
        return self.times.get((lane.size, lane.variant.name), 1.0)


@pytest.fixture
def recorder() -> OnCPU:
    return OnCPU()
