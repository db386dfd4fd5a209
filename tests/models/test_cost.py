"""Costs against the published table and against torch's own counter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from anytime.errors import ShapeError
from anytime.models import Cost, MSDNet, MSDNetConfig, MultiExit, measure_cost
from anytime.models.msdnet import PRESETS

CIFAR, LINEAR = PRESETS["msdnet-cifar"], PRESETS["msdnet-cifar-linear"]
TABLE = {
    "CIFAR-100": (CIFAR, "15.14 25.51 37.10 46.33 57.34 66.96 75.94", ".43 .88 1.27 1.70 2.18 2.60 3.07"),
    "CIFAR-10": (replace(CIFAR, classes=10), "15.13 25.48 37.06 46.28 57.28 66.89 75.86", ".42 .85 1.24 1.65 2.12 2.53 2.99"),
    "linear 5": (LINEAR, "6.86 14.35 27.54 41.71 58.48", ".30 .65 1.02 1.49 2.08"),
    "linear 7": (
        replace(LINEAR, exits=7),
        "6.86 14.35 27.29 48.45 76.43 108.85 137.28",
        ".30 .65 1.11 1.73 2.38 3.05 3.97",
    ),
    "ImageNet 4": (PRESETS["msdnet-imagenet-4"], "339.9 685.5 1008.2 1254.5 1360.5", "4.24 8.77 13.07 16.75 23.96"),
    "ImageNet 6": (PRESETS["msdnet-imagenet-6"], "514.7 1171.2 1844.5 2501.4 2742.1", "7.08 15.69 24.01 42.19 56.53"),
    "ImageNet 7": (PRESETS["msdnet-imagenet-7"], "615.7 1436.4 2283.2 2967.4 3253.8", "8.76 20.15 31.73 41.86 62.31"),
}


@functools.cache
def cost_of(config: MSDNetConfig) -> Cost:
    with torch.device("meta"):
        return measure_cost(MSDNet(config), torch.empty(1, 3, config.image_size, config.image_size))


def in_millions(counts: tuple[int, ...], like: str) -> list[str]:
    """The counts with as many digits as the numbers in `like`."""
    digits = len(like.split()[0].partition(".")[2])
    return [f"{count / 1e6:.{digits}f}".removeprefix("0") for count in counts]


@pytest.mark.parametrize("row", TABLE)
def test_every_row_of_the_table(row: str) -> None:
    config, macs, parameters = TABLE[row]
    cost = cost_of(config)
    assert in_millions(cost.macs, macs) == macs.split()
    assert in_millions(cost.parameters, parameters) == parameters.split()
    assert cost.unused == ()


def test_imagenet_step_7_to_the_last_digit() -> None:
    assert cost_of(PRESETS["msdnet-imagenet-7"]).macs == (615692968, 1436392016, 2283210200, 2967421456, 3253794488)


def test_all_parameters_are_counted_at_the_last_exit() -> None:
    network = MSDNet(LINEAR)
    cost = measure_cost(network, torch.zeros(1, 3, 32, 32))
    assert cost.parameters[-1] == sum(parameter.numel() for parameter in network.parameters())
    assert sum(cost.stage_macs) == cost.macs[-1]


@pytest.mark.parametrize("prune", ["max", "min"])
def test_convolutions_and_linear_layers_agree_with_torch(prune: str) -> None:
    network = MSDNet(replace(LINEAR, prune=prune)).eval()
    images = torch.zeros(1, 3, 32, 32)
    only = {nn.ReLU: nothing, nn.AvgPool2d: nothing, nn.Linear: lambda layer, x, out: layer.weight.numel()}
    cost = measure_cost(network, images, layers=only)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flops = [counter.get_total_flops() for _ in network.exits(images)]
    assert flops == [2 * macs for macs in cost.macs]


def nothing(layer: nn.Module, x: Tensor, out: Tensor) -> int:
    return 0


class Chain(MultiExit):
    """Two exits: after a layer, and after one more."""

    num_exits = 2

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        x = self.first(x)
        yield x
        yield self.second(x)


def test_each_layer_is_counted_by_hand() -> None:
    first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, groups=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d((2, 1)))
    second = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 5, bias=False))
    cost = measure_cost(Chain(first, second), torch.zeros(7, 3, 8, 8))
    assert cost.stage_macs == (64 * 4 * 27 + 64 * 4 + 32 * 4 * 2, 32 * 4 + 4 * 5 + 5 + 25)
    assert cost.parameters == (4 * 27 + 4 + 8, 4 * 27 + 4 + 8 + 25 + 25)


def test_a_layer_that_runs_twice_costs_twice_and_is_stored_once() -> None:
    layer = nn.Linear(4, 4, bias=False)
    cost = measure_cost(Chain(layer, layer), torch.zeros(1, 4))
    assert cost.macs == (16, 32)
    assert cost.parameters == (16, 16)


def test_parameters_that_no_exit_uses_are_listed() -> None:
    model = Chain(nn.Linear(4, 4), nn.Linear(4, 4))
    model.spare = nn.Linear(4, 4, bias=False)
    assert measure_cost(model, torch.zeros(1, 4)).unused == ("spare.weight",)


def test_an_unknown_layer_costs_one_per_element_is_named_and_takes_a_counter() -> None:
    model = Chain(nn.Linear(4, 4), nn.Sequential(nn.RMSNorm(4)))
    cost = measure_cost(model, torch.zeros(1, 4))
    assert (cost.macs, cost.estimated) == ((20, 24), ("RMSNorm",))
    cost = measure_cost(model, torch.zeros(1, 4), layers={nn.RMSNorm: lambda layer, x, out: 2 * out.numel()})
    assert (cost.macs, cost.estimated) == ((20, 28), ())


class Product(nn.Module):
    """A linear layer of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_of_an_unknown_layer_with_products_these_are_counted() -> None:
    cost = measure_cost(Chain(nn.Linear(4, 4), Product()), torch.zeros(1, 4))
    assert (cost.macs, cost.estimated) == ((20, 36), ())


@pytest.mark.parametrize("meta", [True, False])
def test_attention_is_counted_with_all_its_products(meta: bool) -> None:
    """Four projections, without their biases, and two products of 3 × 3 with 8 channels."""
    with torch.device("meta" if meta else "cpu"):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        cost = measure_cost(Chain(layer, nn.Identity()), torch.zeros(1, 3, 8))
    attention, block = 3 * (4 * 64) + 2 * 9 * 8, 3 * (16 * 9 + 8 * 17) + 2 * 24  # the block: two linear layers, two norms
    assert cost.macs[0] == attention + block


def test_a_recurrent_layer_costs_each_parameter_once_per_step() -> None:
    class First(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    lstm = First(4, 5, batch_first=True)
    assert measure_cost(Chain(lstm, nn.Identity()), torch.zeros(1, 7, 4)).macs[0] == 7 * sum(
        p.numel() for p in lstm.parameters()
    )


def test_the_model_is_not_changed() -> None:
    model = Chain(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_cost(model, torch.ones(2, 4))
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("shape", [(4,), (0, 4)])
def test_an_example_without_a_row_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="example has shape"):
        measure_cost(Chain(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(shape))


def test_inputs_get_the_type_of_the_weights() -> None:
    model = Chain(nn.Linear(4, 4), nn.Linear(4, 4))
    assert measure_cost(model, torch.ones(2, 4)).macs == measure_cost(model.half(), torch.ones(2, 4)).macs
