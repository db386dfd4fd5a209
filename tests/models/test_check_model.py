"""The battery finds each fault that it says it finds, and only those."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import CheckError, OptionError, ShapeError
from anytime.models import Carry, MultiExit
from anytime.testing.models import check_model

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Good(MultiExit):
    """Three stages of one layer, one exit each; the faulty ones below change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_exits = 3
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.noise = nn.Dropout(0.5)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            yield head(self.noise(x))


class TooFew(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield from list(super().exits(x))[:2]


class OtherShape(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for exit, logits in enumerate(super().exits(x)):
            yield logits[:, :-1] if exit == 1 else logits


class NotFinite(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for logits in super().exits(x):
            yield logits / 0


class ChangesInput(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        return super().exits(x.relu_())


class Noisy(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for logits in super().exits(x):
            yield nn.functional.dropout(logits, 0.5)


class MixesRows(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        return super().exits(x - x.mean(0))


class KeepsState(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        self.now = x
        for stage, head in zip(self.stages, self.heads, strict=True):
            self.now = stage(self.now)
            yield head(self.now)


class EagerFunction(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        return iter(list(super().exits(x)))


class EagerGenerator(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield from list(super().exits(x))


class EagerTrunk(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        for head, feature in zip(self.heads, features, strict=True):
            yield head(feature)


class RunsOn(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        iterator = super().exits(x)
        try:
            yield from iterator
        finally:
            self.stages[2](x)


class LeavesThread(Good):
    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        threading.Thread(target=self.stop.wait, name="left over", daemon=True).start()
        yield from super().exits(x)


class OtherForward(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(0)


class LastOnly(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[-1]


class Detached(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x).detach()
            yield head(x)


class WithoutGradient(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for logits in super().exits(x):
            yield logits.detach()


class ChangesMode(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        self.noise.eval()
        return super().exits(x)


class FewerInTraining(Good):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for exit, logits in enumerate(super().exits(x)):
            if not self.training or exit == 2:
                yield logits


class Wide(Good):
    """A list as long as there are exits that is no list of stages: all of it is needed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        return super().exits(sum((stem(x) for stem in self.stems), torch.zeros_like(x)))


class LazyWide(Wide):
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield from Good.exits(self, sum((stem(x) for stem in self.stems), torch.zeros_like(x)))


class Recurrent(MultiExit):
    """The same layer at every exit."""

    num_exits = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(self.num_exits):
            x = self.layer(x)
            yield x


class Functions:
    """No module at all."""

    num_exits = 2

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        yield 2 * x


class Staged(Good):
    """The same three stages, given one at a time; two tensors are carried, the second of which is the input."""

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        x, start = carry if exit else (carry[0], carry[0])
        x = self.stages[exit](x)
        return (x, start) if exit < 2 else (), self.heads[exit](self.noise(x)) + start[:, :1]

    def carry_size(self, exit: int) -> int:
        return 2 if exit else 1

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        return MultiExit.exits(self, x)


class StagesDiffer(Staged):
    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        carry, logits = super().stage(exit, carry)
        return carry, logits + exit

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for exit, logits in enumerate(super().exits(x)):
            yield logits - 2 * exit


class ChangesCarry(Staged):
    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        return super().stage(exit, (carry[0].mul_(2), *carry[1:]) if exit == 1 else carry)


class LeavesSomething(Staged):
    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        left, logits = super().stage(exit, carry)
        return left or carry, logits


class BatchLast(Staged):
    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        left, logits = super().stage(exit, (carry[0].T, *carry[1:]) if exit else carry)
        return (left[0].T, left[1]) if left else (), logits


class LeavesSize(Staged):
    def stage(self, exit: int, carry: Any) -> Any:
        left, logits = super().stage(exit, carry[:2])
        return (*left, 3) if left else (), logits


class OtherAlone(Staged):
    """Its stages forget the input where only one row is left; its exits do not."""

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        alone = exit > 0 and len(carry[0]) == 1
        return super().stage(exit, (carry[0], 0 * carry[1]) if alone else carry)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        carry: Carry = (x,)
        for exit in range(self.num_exits):
            carry, logits = Staged.stage(self, exit, carry)
            yield logits


class NoCarrySize(Staged):
    def carry_size(self, exit: int) -> int:
        return 1


GOOD = [Good(), Staged(), LazyWide(), Recurrent(), Functions()]


@pytest.mark.parametrize("model", GOOD, ids=lambda model: type(model).__name__)
def test_a_good_model_passes(model: Any) -> None:
    check_model(model, X)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TooFew, "yielded 2 times"),
        (OtherShape, r"exit 2 gave \(3, 4\)"),
        (NotFinite, "exit 1 gave NaN or infinity"),
        (ChangesInput, "changed its input"),
        (Noisy, "the second time"),
        (MixesRows, "row 0 alone"),
        (KeepsState, "two interleaved inputs"),
        (EagerFunction, "ran before the first exit"),
        (EagerGenerator, r"'heads\.1' ran for exit 1"),
        (EagerTrunk, r"'stages\.1\.0' ran for exit 1"),
        (RunsOn, "stopping at the first exit ran"),
        (OtherForward, "differs from the exits"),
        (LastOnly, r"forward\(x\) differs from the exits: their shape is \(3, 5\)"),
        (Detached, r"no finite gradient reaches stages\.0"),
        (WithoutGradient, "no finite gradient reaches"),
        (ChangesMode, "changed the training mode of 'noise'"),
        (FewerInTraining, "train mode gave 1 exits"),
        (Wide, "ran before the first exit"),
        (StagesDiffer, "stage 1 gave different logits than exits"),
        (ChangesCarry, "stage 1 changed tensor 0"),
        (LeavesSomething, "the last stage returned 2 tensors"),
        (BatchLast, r"stage 0 returned tensor 0 of shape \(4, 3\)"),
        (LeavesSize, "stage 0 returned Tensor, Tensor, int"),
        (NoCarrySize, r"returned 2 tensors, and carry_size\(1\) is 1"),
        (OtherAlone, "stage 1 gave a different result for one row"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_each_fault_is_found(kind: type[Good], message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(CheckError, match=message):
        check_model(kind(), X.clone())


def test_a_thread_left_running_is_found() -> None:
    model = LeavesThread()
    try:
        with pytest.raises(CheckError, match="left over"):
            check_model(model, X)
    finally:
        model.stop.set()


def test_an_eager_model_without_lists_is_found() -> None:
    class Eager(Recurrent):
        def exits(self, x: Tensor) -> Iterator[Tensor]:
            yield from list(super().exits(x))

    with pytest.raises(CheckError, match="nothing ran for exit 2"):
        check_model(Eager(), X)


def test_another_number_of_classes_is_found() -> None:
    check_model(Good(), X, classes=5)
    with pytest.raises(CheckError, match=r"here \(3, 6\)"):
        check_model(Good(), X, classes=6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = Good().train(training)
    model.noise.eval()
    model.heads[0].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    check_model(model, X)
    assert model.training == training
    assert not model.noise.training
    assert not model.heads[0].weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("x", [X[:1], X[0], torch.zeros(2, 4)], ids=["one row", "no batch", "equal rows"])
def test_an_example_that_proves_nothing_is_refused(x: Tensor) -> None:
    with pytest.raises(ShapeError, match="the example has shape"):
        check_model(Good(), x)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(OptionError, match="the model is a Linear"):
        check_model(nn.Linear(4, 4), X)  # type: ignore[arg-type]
