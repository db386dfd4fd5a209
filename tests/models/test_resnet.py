"""The CIFAR ResNets, alone, with exits, and through the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytime.errors import FormatError, OptionError
from anytime.models import CifarResNet, ResNet, ResNetConfig, create, load, measure_cost, save
from anytime.models.resnet import PRESETS
from anytime.models.ztw import CascadeHead
from anytime.testing import check_model


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (56, 853_018)])
def test_parameters_are_the_published_numbers(depth: int, parameters: int) -> None:
    network = CifarResNet(classes=10, depth=depth)
    assert sum(p.numel() for p in network.parameters()) == parameters
    layers = [part for part in network.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


def test_multiplications_are_the_published_number() -> None:
    cost = measure_cost(create("resnet-cifar-56", classes=10), torch.zeros(1, 3, 32, 32))
    convolutions_and_linear = 125_485_706  # 125 million in the literature
    assert cost.macs[0] == pytest.approx(convolutions_and_linear, rel=0.01)
    assert cost.parameters == (853_018,)


def test_the_shortcut_halves_the_map_and_pads_the_channels() -> None:
    block = CifarResNet(classes=2, depth=14, width=4).eval().blocks[2]
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(1, 4, 6, 6)
    out = block(x)
    assert out.shape == (1, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert out[:, [0, 1, 6, 7]].abs().max() == 0


def test_sdn_has_six_internal_classifiers_at_fractions_of_the_macs() -> None:
    network = create("sdn-resnet-cifar-56", classes=10)
    assert isinstance(network, ResNet)
    assert network.num_exits == 7
    assert network.exit_fractions == pytest.approx(PRESETS["sdn-resnet-cifar-56"].at, abs=0.02)
    macs = measure_cost(network, torch.zeros(1, 3, 32, 32)).macs
    assert [spent / macs[-1] for spent in macs[:-1]] == pytest.approx(PRESETS["sdn-resnet-cifar-56"].at, abs=0.02)


def test_ztw_has_a_head_after_every_block_and_learns_only_those() -> None:
    network = create("ztw-resnet-cifar-56", classes=10)
    assert isinstance(network, ResNet)
    assert network.num_exits == 27
    assert [head.reads_previous for head in network.heads if isinstance(head, CascadeHead)] == [False] + [True] * 25
    assert not any(p.requires_grad for p in network.backbone.parameters())
    assert all(p.requires_grad for p in network.heads.parameters())


SMALL: dict[str, Any] = {"depth": 8, "width": 4, "image_size": 16}


@pytest.mark.parametrize(
    "options",
    [{}, {"at": (0.4, 0.7)}, {"at": ("stem", "blocks.1"), "heads": "cascade", "frozen": True}],
    ids=["alone", "sdn", "ztw"],
)
def test_every_kind_passes_check_model_and_loads_equal(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = create("resnet-cifar-20", classes=3, **SMALL, **options)
    images = torch.randn(3, 3, 16, 16)
    check_model(network, images, classes=3)
    save(network.eval(), tmp_path)
    again = load(tmp_path, classes=3)
    assert isinstance(again, ResNet)
    assert again.config == network.config
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in network.parameters()]
    with torch.no_grad():
        torch.testing.assert_close(again(images), network(images))
    assert again.exit_names == network.exit_names  # type: ignore[attr-defined]


def test_a_loaded_network_stops_where_it_should(tmp_path: Path) -> None:
    save(create("resnet-cifar-20", classes=3, **SMALL, at=["stem"]), tmp_path)
    network, ran = load(tmp_path), []
    for name, part in network.named_modules():
        part.register_forward_pre_hook(lambda _, __, name=name: ran.append(name))
    next(network.exits(torch.zeros(1, 3, 16, 16)))
    assert not [name for name in ran if name.startswith("backbone.blocks")]


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 21},
        {"depth": 2},
        {"depth": "20"},
        {"classes": 0},
        {"width": True},
        {"heads": "other"},
        {"heads": []},
        {"frozen": "yes"},
        {"statistics": None},
        {"at": "stem"},
        {"at": [None]},
        {"at": 3},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        ResNetConfig(**{"classes": 10, **options})
    assert next(iter(options)) in str(caught.value)


def test_a_stored_place_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    import json

    from anytime.artifacts import read_bundle, write_bundle

    save(create("resnet-cifar-20", classes=3, **SMALL, at=["stem"]), tmp_path)
    files = read_bundle(tmp_path)
    document = json.loads(files["config.json"])
    document["config"]["at"] = ["blocks.77"]
    write_bundle(tmp_path, {**files, "config.json": json.dumps(document).encode()})
    with pytest.raises(FormatError, match=r"blocks\.77"):
        load(tmp_path)
