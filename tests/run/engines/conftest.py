"""Every network of the library in small, with random batch norm statistics, and a replacement for CUDA graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from anytime.run.engines.cuda.recording import CudaGraphs, Recorded, Step
from anytime.run.engines.cuda.rule import RuleColumns

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
    """Records like CUDA graphs: what is started runs in its order, on the same memory, once something waits for it.

    Attributes:
        started: How many stages were started.
        replays: How many of them have run.
        stuck: Whether nothing ends unless something waits for it without limit.
        stage_seconds: How long a stage takes, as the engine is told.
        times: How long all stages of a batch size and variant take, likewise.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.started = self.replays = 0
        self.stuck = False
        self.stage_seconds = 1e-4
        self.times: dict[tuple[int, str], float] = {}
        self._pending: deque[Callable[[], None]] = deque()

    def record(self, steps: Sequence[Step], carry: Carry, rule: RuleColumns | None = None) -> list[Recorded]:
        recorded = []
        state: Carry = ()
        for exit, step in enumerate(steps):
            work = partial(self._work, rule, exit, step, carry, state)
            carry, state, result = work()
            host = torch.full(result.shape, torch.nan)
            recorded.append(self._recorded(work, (*carry, *state, host)))
            host.copy_(result)
        return recorded

    def _work(self, rule: RuleColumns | None, exit: int, step: Step, carry: Carry, state: Carry) -> tuple[Carry, Carry, Tensor]:
        left, logits = step(carry)
        if rule is None:
            return left, (), logits.float()
        after, columns = rule.step(exit, logits, state)
        return left, after, columns

    def _recorded(self, work: Callable[[], tuple[Carry, Carry, Tensor]], places: Carry) -> Recorded:
        last = [None]

        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            left, state, result = work()
            for place, new in zip(places, (*left, *state, result), strict=True):
                place.copy_(new)

        def start() -> None:
            self.started += 1
            last[0] = one = partial(replay)  # type: ignore[call-overload]
            self._pending.append(one)

        def wait() -> None:
            while last[0] in self._pending:
                self._pending.popleft()()

        def done() -> bool:
            if not self.stuck:
                wait()
            return not self.stuck

        return Recorded(places[:-1], places[-1], start, wait, done, self.stage_seconds)

    def mark(self, device: torch.device) -> None:
        raise AssertionError("inputs on the CPU need no event")

    @contextmanager
    def queue(self, after: None = None) -> Iterator[None]:
        # Copies by torch are not queued here, so that what they read must have run.
        while self._pending:
            self._pending.popleft()()
        yield

    def join(self) -> None:
        pass

    def exact(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def seconds(self, work: Callable[[], None]) -> float:
        work()
        lane: Any = work.__self__  # type: ignore[attr-defined]
        return self.times.get((lane.size, lane.variant.name), 1.0)


@pytest.fixture
def recorder() -> OnCPU:
    return OnCPU()
