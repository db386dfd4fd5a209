"""Every network stage by stage: what is carried, what is dropped, what can be exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import ShapeError, StateError
from anytime.models import (
    IMTA,
    MLP,
    AveragedEnsemble,
    Carry,
    CifarResNet,
    DViT,
    DViTConfig,
    Ensemble,
    ExitModel,
    IMTAConfig,
    IntervalMLP,
    MLPConfig,
    MSDNet,
    MSDNetConfig,
    MultiExit,
    ResNet,
    ResNetConfig,
    StagedModel,
    attach_cascade,
    attach_exits,
    is_staged,
)
from anytime.models.msdnet import PRESETS
from anytime.testing import check_model

SHAPE: dict[str, Any] = {"classes": 4, "exits": 4, "base": 2, "step": 2, "channels": 4, "growth": 4}
TINY_DVIT = DViTConfig(
    classes=4,
    image_size=16,
    unfolds=(((7, 4, 2), (3, 2, 1)), ((5, 3, 1), (3, 2, 1)), ((3, 2, 1), (3, 2, 1))),
    width=16,
    depth=2,
    heads=2,
    performer_width=8,
    random_features=4,
    reuse_hidden=8,
    reuse_width=6,
)


def resnet() -> CifarResNet:
    return CifarResNet(classes=4, depth=8, width=4)


def images(side: int = 32, rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(1))


def points(width: int = 2) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1))


def mlp(exits: int = 3) -> MLP:
    return MLP(MLPConfig(classes=4, width=8, exits=exits))


# Each network, an input, and how many tensors its stages are given.
ZOO: dict[str, tuple[Callable[[], MultiExit], Tensor, list[int]]] = {
    "msdnet": (lambda: MSDNet(MSDNetConfig(**SHAPE)), images(), [1, 3, 2, 2]),
    "msdnet-min": (lambda: MSDNet(MSDNetConfig(**SHAPE, prune="min")), images(), [1, 3, 3, 3]),
    "imta": (lambda: IMTA(IMTAConfig(**SHAPE)), images(), [1, 4, 3, 3]),
    "dvit": (lambda: DViT(TINY_DVIT), images(16), [1, 4, 4]),
    "mlp": (mlp, points(), [1, 1, 1]),
    "intervals": (lambda: IntervalMLP(exits=3), points(1), [1, 1, 1]),
    "ensemble": (lambda: Ensemble([nn.Linear(2, 4), mlp(1)]), points(), [1, 1]),
    "averaged": (lambda: AveragedEnsemble([mlp(), Ensemble([mlp(1) for _ in range(3)])]), points(), [1, 2, 2]),
    "averaged-mixed": (
        lambda: AveragedEnsemble([MSDNet(MSDNetConfig(**SHAPE)), IMTA(IMTAConfig(**SHAPE))]),
        images(),
        [1, 7, 5, 5],
    ),
    "attached": (
        lambda: attach_exits(resnet(), ["blocks.0", "blocks.1.conv1", "blocks.1"], example=images(), classes=4),
        images(),
        [1, 1, 2, 1],
    ),
    "cascade": (
        lambda: attach_cascade(resnet(), ["stem", "blocks.0", "blocks.1"], example=images(), classes=4),
        images(),
        [1, 2, 2, 1],
    ),
    "resnet": (lambda: ResNet(ResNetConfig(classes=4, depth=8, width=4, at=(0.3, 0.6))), images(), [1, 1, 1]),
}
EVERY = pytest.mark.parametrize("name", ZOO)


def made(name: str) -> tuple[MultiExit, Tensor]:
    make, x, _ = ZOO[name]
    torch.manual_seed(0)
    return make().eval(), x


def by_stages(model: StagedModel, x: Tensor) -> Iterator[tuple[Carry, Tensor]]:
    carry: Carry = (x,)
    for exit in range(model.num_exits):
        carry, logits = model.stage(exit, carry)
        yield carry, logits


@EVERY
def test_every_network_passes_check_model(name: str) -> None:
    model, x = made(name)
    assert is_staged(model)
    check_model(model, x)


@EVERY
def test_stages_take_carry_size_tensors(name: str) -> None:
    model, x = made(name)
    assert [model.carry_size(exit) for exit in range(model.num_exits)] == ZOO[name][2]
    lengths = [len(carry) for carry, _ in by_stages(model, x)]
    assert lengths == [*ZOO[name][2][1:], 0]


@EVERY
@torch.no_grad()
def test_rows_may_be_dropped_one_after_the_other(name: str) -> None:
    """As in a batch whose inputs leave early: after each stage one row less, and the others in another order."""
    model, x = made(name)
    wanted = model(x)
    rows, carry = torch.arange(len(x)), (x,)
    for exit in range(model.num_exits):
        carry, logits = model.stage(exit, carry)
        torch.testing.assert_close(logits, wanted[exit, rows], rtol=1e-4, atol=1e-5)
        kept = torch.arange(len(rows)).flip(0)[: max(1, len(rows) - 1)]
        rows, carry = rows[kept], tuple(tensor[kept] for tensor in carry)


@EVERY
@torch.no_grad()
def test_nothing_is_carried_that_no_later_stage_reads(name: str) -> None:
    """A tensor of NaN in place of a carried one must be seen in a later exit."""
    model, x = made(name)
    carries = [carry for carry, _ in by_stages(model, x)]
    for exit, carry in enumerate(carries[:-1], start=1):
        for at in range(len(carry)):
            now = tuple(tensor * float("nan") if at == place else tensor for place, tensor in enumerate(carry))
            later = []
            for stage in range(exit, model.num_exits):
                now, logits = model.stage(stage, now)
                later.append(logits)
            # A ReLU on a GPU or a largest value of a pool may hide NaN from one class, not from all of them.
            assert torch.stack(later).isnan().any(), (exit, at)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@EVERY
def test_gradients_through_stages_are_those_through_exits(name: str, mode: bool) -> None:
    model, x = made(name)
    gradients = []
    for run in (lambda: [logits for _, logits in by_stages(model, x)], lambda: list(model.exits(x))):
        model.train(mode)
        torch.manual_seed(2)
        model.zero_grad()
        torch.stack(run()).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_published_msdnet_passes_check_model() -> None:
    torch.manual_seed(0)
    network = MSDNet(PRESETS["msdnet-cifar"]).eval()
    x = images(rows=2)
    carries, logits = zip(*by_stages(network, x), strict=True)
    torch.testing.assert_close(torch.stack(logits), network(x))
    assert [[tuple(tensor.shape[1:]) for tensor in carry] for carry in carries] == [
        [(40, 32, 32), (80, 16, 16), (160, 8, 8)],
        [(52, 32, 32), (104, 16, 16), (208, 8, 8)],
        [(70, 16, 16), (140, 8, 8)],
        [(94, 16, 16), (188, 8, 8)],
        [(118, 16, 16), (236, 8, 8)],
        [(152, 8, 8)],
        [],
    ]
    for exit, carry in enumerate(carries[:-1], start=1):
        _, alone = network.stage(exit, tuple(tensor[1:] for tensor in carry))
        torch.testing.assert_close(alone, logits[exit][1:], rtol=1e-4, atol=1e-5)


class Stage(nn.Module):
    """What a runtime exports: tensors in, tensors out."""

    def __init__(self, model: MultiExit, exit: int) -> None:
        super().__init__()
        self.model, self.exit = model, exit

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        left, logits = self.model.stage(self.exit, carry)
        return *left, logits


def check_export(model: MultiExit, x: Tensor) -> None:
    """Every stage, exported for any number of rows, gives for fewer rows what the stage gives."""
    carry: Carry = (x,)
    for exit in range(model.num_exits):
        batch = torch.export.Dim("batch", min=1)
        sizes = (tuple({0: batch} for _ in carry),)
        program = torch.export.export(Stage(model, exit), carry, dynamic_shapes=sizes, strict=False)
        for rows in (1, 3):
            few = tuple(tensor[:rows] for tensor in carry)
            left, logits = model.stage(exit, few)
            for given, wanted in zip(program.module()(*few), (*left, logits), strict=True):
                torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
        carry, _ = model.stage(exit, carry)


@pytest.mark.parametrize("name", ["mlp", "intervals", "averaged", "attached", "cascade"])
@torch.no_grad()
def test_every_stage_can_be_exported_for_any_batch(name: str) -> None:
    check_export(*made(name))


@torch.no_grad()
def test_every_stage_of_a_small_dvit_can_be_exported_for_any_batch() -> None:
    unfolds = (((4, 4, 0),), ((3, 1, 1), (3, 2, 1)))
    check_export(DViT(replace(TINY_DVIT, unfolds=unfolds, depth=1)).eval(), images(16))


@torch.no_grad()
def test_every_stage_of_a_small_imta_can_be_exported_for_any_batch() -> None:
    scales = {"growth_factors": (1, 2), "bottleneck_factors": (1, 2), "image_size": 16}
    check_export(IMTA(IMTAConfig(**{**SHAPE, **scales, "exits": 2, "base": 1, "step": 1})).eval(), images(16))


@pytest.mark.long
@torch.no_grad()
def test_every_stage_of_the_published_networks_can_be_exported() -> None:
    check_export(MSDNet(PRESETS["msdnet-cifar"]).eval(), images())
    check_export(DViT(DViTConfig(classes=10)).eval(), images(224))


# What is not staged, and wrong calls.


class OnlyExits(MultiExit):
    num_exits = 2

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        yield 2 * x


def test_a_model_with_exits_only_works_and_is_not_staged() -> None:
    model = OnlyExits()
    assert not model.staged
    assert not is_staged(model)
    assert torch.equal(model(points())[1], 2 * points())
    with pytest.raises(StateError, match="OnlyExits does not define stage"):
        model.stage(0, (points(),))


def test_overriding_exits_in_a_subclass_disables_stages() -> None:
    class Doubled(MLP):
        def exits(self, x: Tensor) -> Iterator[Tensor]:
            for logits in super().exits(x):
                yield 2 * logits

    class Again(Doubled):
        def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
            carry, logits = super().stage(exit, carry)
            return carry, 2 * logits

    assert not Doubled(MLPConfig(classes=4)).staged
    assert Again(MLPConfig(classes=4)).staged
    average = AveragedEnsemble([mlp(5), Doubled(MLPConfig(classes=4))])
    assert not average.staged
    assert average(points()).shape == (5, 4, 4)
    with pytest.raises(StateError, match="1 of the members"):
        average.stage(0, (points(),))


def test_a_model_without_either_says_so_when_it_is_used() -> None:
    class Neither(MultiExit):
        num_exits = 1

    assert not Neither().staged
    with pytest.raises(StateError, match="Neither"):
        next(Neither().exits(points()))


def test_the_first_stage_takes_the_named_inputs_by_default() -> None:
    class Named(MultiExit):
        num_exits = 2
        input_names = ("ids", "mask")

    assert [Named().carry_size(exit) for exit in (0, 1)] == [2, 1]


def test_protocols_are_recognised_by_attributes() -> None:
    class Plain:
        num_exits = 1

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            yield x

    class WithStage(Plain):
        def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
            return (), carry[0]

    assert isinstance(Plain(), ExitModel)
    assert not is_staged(Plain())
    assert isinstance(WithStage(), StagedModel)
    assert is_staged(WithStage())
    check_model(WithStage(), points())


@EVERY
def test_a_wrong_stage_or_carry_is_named(name: str) -> None:
    model, x = made(name)
    for exit in (-1, model.num_exits):
        with pytest.raises(StateError, match=rf"stage\({exit}, carry\) is called"):
            model.stage(exit, (x,))
    for exit in range(model.num_exits):
        what = rf"stage\({exit}, carry\)" if exit else "the model"  # whose inputs the first stage takes
        with pytest.raises(ShapeError, match=f"{what} got 0 tensors"):
            model.stage(exit, ())


def test_inputs_of_another_shape_are_refused_by_the_first_stage() -> None:
    for name in ("msdnet", "imta", "dvit", "mlp"):
        with pytest.raises(ShapeError, match="have shape"):
            made(name)[0].stage(0, (torch.zeros(2, 3, 7, 7),))


def test_a_network_of_one_stage_leaves_nothing() -> None:
    for model, x in ((mlp(1), points()), (MSDNet(replace(PRESETS["msdnet-cifar"], exits=1)), images(rows=2))):
        carry, logits = model.eval().stage(0, (x,))
        assert carry == ()
        torch.testing.assert_close(logits, model(x)[0])
