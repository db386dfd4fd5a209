"""MSDNet against the published channel trace and against logits of an independently trained network."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from anytime.errors import OptionError, ShapeError
from anytime.models import MSDNet, MSDNetConfig
from anytime.models.msdnet import PRESETS
from anytime.testing.models import check_model


def on_meta(config: MSDNetConfig) -> MSDNet:
    with torch.device("meta"):
        return MSDNet(config)


def reference(shared: Path, data: str, classes: int) -> tuple[MSDNet, Tensor]:
    network = MSDNet(MSDNetConfig(classes=classes)).eval()
    network.load_state_dict(load_file(shared / "reference" / f"msdnet-{data}.safetensors"), strict=True)
    with np.load(shared / "reference" / f"msdnet-{data}-check.npz") as check:
        assert check["indices"].tolist() == list(range(256))
        return network, torch.from_numpy(check["logits"])


@torch.no_grad()
def test_logits_equal_the_reference_on_cifar100(shared: Path, cifar100_images: Tensor) -> None:
    network, expected = reference(shared, "cifar100", 100)
    assert (network(cifar100_images) - expected).abs().max() < 1e-3


@torch.no_grad()
def test_logits_equal_the_reference_on_cifar10(shared: Path, cifar10_images: Tensor) -> None:
    network, expected = reference(shared, "cifar10", 10)
    assert (network(cifar10_images) - expected).abs().max() < 1e-3


@torch.no_grad()
def test_channels_last_gives_the_same_logits_without_a_copy_back(shared: Path, cifar100_images: Tensor) -> None:
    network, expected = reference(shared, "cifar100", 100)
    network = network.to(memory_format=torch.channels_last)
    formats = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, args, out: formats.extend(t.is_contiguous(memory_format=torch.channels_last) for t in (*args, out))
            )
    images = cifar100_images[:64].contiguous(memory_format=torch.channels_last)
    assert (network(images) - expected[:, :64]).abs().max() < 1e-3
    assert all(formats)


def test_there_are_782_entries_under_the_names_of_the_port() -> None:
    names = on_meta(PRESETS["msdnet-cifar"]).state_dict().keys()
    assert len(names) == 782
    for name in (
        "blocks.0.0.layers.2.net.0.weight",
        "blocks.0.1.layers.0.conv_normal.net.3.weight",
        "blocks.2.0.layers.0.conv_down.net.4.running_mean",
        "blocks.2.1.m.1.net.0.weight",
        "classifier.6.m.1.net.1.bias",
        "classifier.6.linear.bias",
    ):
        assert name in names


@pytest.mark.parametrize(
    ("preset", "inputs"),
    [
        ("msdnet-cifar", [160, 208, 140, 188, 236, 152, 200]),
        ("msdnet-imagenet-4", [384, 384, 352, 304, 560]),
        ("msdnet-imagenet-6", [512, 544, 496, 880, 792]),
        ("msdnet-imagenet-7", [576, 640, 608, 528, 976]),
    ],
)
def test_classifiers_read_the_published_widths(preset: str, inputs: list[int]) -> None:
    convolutions = [classifier.m[0].net[0] for classifier in on_meta(PRESETS[preset]).classifier]
    assert [convolution.in_channels for convolution in convolutions] == inputs


def test_max_pruning_drops_scales_where_the_trace_says() -> None:
    plans = PRESETS["msdnet-cifar"].layers()
    after = [plan.width + 6 for plan in plans]
    assert after == [22, 28, 34, 40, 46, 52, 58, 35, 41, 47, 53, 59, 65, 38, 44, 50]
    drops = [number for number, plan in enumerate(plans, start=1) if plan.scales_in > plan.scales_out]
    assert drops == [7, 13]
    assert [plan.reduced_width for plan in plans if plan.reduced_width] == [29, 32]


def test_min_pruning_keeps_all_scales_till_the_end_and_reduces_at_the_thirds() -> None:
    plans = replace(PRESETS["msdnet-cifar"], prune="min").layers()
    assert [plan.scales_out for plan in plans] == [3] * 14 + [2, 1]
    assert [number for number, plan in enumerate(plans, start=1) if plan.reduced_width] == [5, 10]
    assert all(plan.scales_in == before.scales_out for before, plan in pairwise(plans))


def test_linear_spacing_adds_one_layer_per_stage() -> None:
    assert PRESETS["msdnet-cifar-linear"].depths == (1, 2, 3, 4, 5)
    assert PRESETS["msdnet-cifar"].depths == (4, 2, 2, 2, 2, 2, 2)


SMALL = MSDNetConfig(classes=4, exits=3, base=2, step=2, channels=4, growth=4)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, prune="min", exits=4),
        replace(SMALL, spacing="linear", base=1),
        replace(SMALL, init="he"),
        replace(SMALL, growth_factors=(1,), bottleneck_factors=(1,), image_size=8),
        replace(SMALL, stem="imagenet", image_size=128),
    ],
    ids=["max", "min", "linear", "he", "one scale", "imagenet stem"],
)
def test_every_kind_passes_check_model(config: MSDNetConfig) -> None:
    torch.manual_seed(0)
    check_model(MSDNet(config), torch.randn(3, 3, config.image_size, config.image_size), classes=4)


@pytest.mark.parametrize(
    "config", [*PRESETS.values(), *(replace(PRESETS[f"msdnet-{name}"], prune="min") for name in ("cifar", "imagenet-4"))]
)
def test_every_preset_gives_logits_of_its_classes(config: MSDNetConfig) -> None:
    images = torch.empty(2, 3, config.image_size, config.image_size, device="meta")
    assert on_meta(config)(images).shape == (config.exits, 2, config.classes)


def test_a_scale_is_concatenated_once_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args, **options: calls.append(1) or cat(*args, **options))
    config = PRESETS["msdnet-cifar"]
    list(on_meta(config).exits(torch.empty(1, 3, 32, 32, device="meta")))
    assert len(calls) == sum(plan.scales_out for plan in config.layers())


def test_a_bfloat16_training_step_never_depends_on_values() -> None:
    """Where there are only shapes, anything that waits for a number (`item`, a branch on data) is an error."""
    network = on_meta(PRESETS["msdnet-cifar"]).to(torch.bfloat16, memory_format=torch.channels_last).train()
    images = torch.empty(4, 3, 32, 32, device="meta", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    logits = network(images)
    logits.sum().backward()
    assert logits.dtype == torch.bfloat16
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_he_init_scales_convolutions_by_their_fan_out() -> None:
    torch.manual_seed(0)
    network = MSDNet(replace(PRESETS["msdnet-cifar"], init="he"))
    convolution = network.classifier[0].m[0].net[0]
    assert convolution.weight.std().item() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.02)
    assert network.classifier[0].linear.bias.abs().max() == 0


def test_default_init_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    convolution = MSDNet(PRESETS["msdnet-cifar"]).classifier[0].m[0].net[0]
    assert convolution.weight.abs().max().item() <= (9 * 160) ** -0.5  # uniform within 1/sqrt(fan in)


@pytest.mark.parametrize(
    "options",
    [
        {"classes": 0},
        {"classes": True},
        {"exits": 2.0},
        {"exits": 10**6},
        {"exits": 10**30},
        {"spacing": "odd"},
        {"prune": None},
        {"prune": []},
        {"stem": "mnist"},
        {"init": "zero"},
        {"growth_factors": (1, 2)},
        {"growth_factors": "124"},
        {"growth_factors": (1, 2, 0)},
        {"growth_factors": ()},
        {"growth": 5, "growth_factors": (1, 1, 1)},
        {"reduction": 0.0},
        {"reduction": 0.01},
        {"reduction": "half"},
        {"reduction": float("nan")},
        {"image_size": 64},
        {"base": 1, "exits": 1},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        MSDNetConfig(**{"classes": 10, **options})
    assert caught.value.expected
    assert caught.value.fix


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 32, 32, 3), (1, 3, 28, 28)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="images have shape"):
        next(MSDNet(SMALL).exits(torch.zeros(shape)))
