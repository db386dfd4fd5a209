"""A packed MSDNet is the same function, in few launches, of which none reads what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from anytime.errors import DeviceError, ShapeError
from anytime.models import MSDNet, MSDNetConfig
from anytime.run.engines import kernel
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.folding import difference, folded_copy, logits_of_stages
from anytime.run.engines.packed import Convolution, PackedMSDNet, can_be_packed, run_with_torch

SMALL = MSDNetConfig(classes=4, exits=3, base=1, step=1, channels=4, growth=4)
CONFIGS = {
    "max": SMALL,
    "min": replace(SMALL, prune="min", base=3, step=2),
    "linear": replace(SMALL, spacing="linear", exits=4),
    "odd sides": replace(SMALL, image_size=41, base=3),
    "two scales": replace(SMALL, growth_factors=(1, 2), bottleneck_factors=(1, 2), image_size=20),
    "one scale": replace(SMALL, growth_factors=(1,), bottleneck_factors=(1,), image_size=9),
}


Packed = Callable[[MSDNetConfig], tuple[MSDNet, PackedMSDNet, torch.Tensor]]


@pytest.fixture
def packed(settle: Any) -> Packed:
    def pack(config: MSDNetConfig) -> tuple[MSDNet, PackedMSDNet, torch.Tensor]:
        torch.manual_seed(0)
        model = settle(MSDNet(config))
        x = torch.randn(3, 3, config.image_size, config.image_size)
        folded = folded_copy(model, x[:1])
        assert can_be_packed(folded)
        return model, PackedMSDNet(folded, run_with_torch), x

    return pack


@pytest.mark.parametrize("name", CONFIGS)
def test_it_gives_the_logits_of_the_network(name: str, packed: Packed) -> None:
    model, network, x = packed(CONFIGS[name])
    wanted = list(model.exits(x))
    for one, other in zip(logits_of_stages(network, x), wanted, strict=True):  # type: ignore[arg-type]
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_a_stage_may_be_run_again_and_on_some_rows(packed: Packed) -> None:
    model, network, x = packed(SMALL)
    wanted = list(model.exits(x))
    carry, _ = network.stage(0, (x,))
    network.stage(1, carry)
    torch.testing.assert_close(network.stage(1, carry)[1], wanted[1], rtol=1e-4, atol=1e-5)
    some = (carry[0][[2, 0]],)
    left, logits = network.stage(1, some)
    torch.testing.assert_close(logits, wanted[1][[2, 0]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network.stage(2, left)[1], wanted[2][[2, 0]], rtol=1e-4, atol=1e-5)


def test_images_of_another_form_are_named_and_other_orders_of_memory_are_taken(packed: Packed) -> None:
    model, network, x = packed(SMALL)
    with pytest.raises(ShapeError, match=r"shape \(3, 1, 32, 32\)"):
        network.stage(0, (x[:, :1],))
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network.stage(0, (last,))[1], next(model.exits(x)), rtol=1e-4, atol=1e-5)


def test_the_paper_s_network_takes_58_launches(packed: Packed) -> None:
    config = MSDNetConfig(classes=100)
    _, network, _ = packed(config)
    assert [len(stage) for stage in network.launches] == [14, 7, 8, 7, 7, 8, 7]
    assert network.table.shape == (117, 15)


def written(one: Convolution) -> set[int]:
    return {
        one.write + pixel * one.write_pixel + channel for pixel in range(one.side_out**2) for channel in range(one.channels_out)
    }


def read(one: Convolution) -> set[int]:
    places = range(one.side_in**2)
    return {
        one.read + pixel * one.read_pixel + channel * one.read_channel for pixel in places for channel in range(one.channels_in)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_convolutions_of_a_launch_do_not_need_each_other(name: str, packed: Packed) -> None:
    _, network, _ = packed(CONFIGS[name])
    for stage, launches in enumerate(network.launches):
        for number, launch in enumerate(launches):
            places = [written(one) for one in launch.work]
            assert sum(map(len, places)) == len(set.union(*places))  # each number is written once
            elsewhere = number == len(launches) - 1 or (stage == 0 and number == 0)  # logits out, or the image in
            assert elsewhere or not set.union(*places) & set.union(*map(read, launch.work))
            assert number == len(launches) - 1 or max(max(place) for place in places) < network.row


def test_networks_of_another_make_are_not_packed(make_network: Any, settle: Any) -> None:
    for name in ("imta", "mlp", "resnet"):
        model, x = make_network(name)
        assert not can_be_packed(folded_copy(model, x))
    assert not can_be_packed(settle(MSDNet(SMALL)))  # its batch norms are still there
    assert not can_be_packed(None)


def test_the_engine_packs_and_says_so(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    assert CudaGraphsEngine(model, x, sizes=(2, 4), pack=True, recorder=recorder).why == "requested; packed"
    assert CudaGraphsEngine(model, x, sizes=(2,), pack=False, recorder=recorder).why == "requested; fused"


def test_a_kernel_that_fails_or_errs_is_left_out(make_network: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_network("msdnet")

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("anytime.run.engines.cuda.variants.run_with_torch", fail)
    engine = CudaGraphsEngine(model, x, sizes=(2,), recorder=recorder)
    assert engine.why == "requested; fused; packed is left out: RuntimeError: no such kernel"

    monkeypatch.setattr("anytime.run.engines.cuda.variants.run_with_torch", lambda *given: given[-1].fill_(float("nan")))
    engine = CudaGraphsEngine(model, x, sizes=(2,), recorder=recorder)
    assert engine.why == "requested; fused; packed is left out: its logits differ by inf of the largest logit of an exit"
    run = engine.begin(x)
    assert difference([run.advance()], [next(model.exits(x))]) < 1e-5


def test_large_tiles_are_for_launches_of_much_work(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    _, network, _ = packed(MSDNetConfig(classes=100))
    grids: list[tuple[tuple[int, int], int]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *_, **options: grids.append((grid, options["tile_positions"]))

    monkeypatch.setattr(kernel, "triton", "there")
    monkeypatch.setattr(kernel, "convolve", Noted(), raising=False)
    run = kernel.run_with_triton("ieee")
    image, launch = torch.zeros(1, 3, 32, 32), network.launches[0][0]  # 16 channels at 32 · 32 places
    run(network, launch, image, image)
    run(network, launch, image.expand(64, -1, -1, -1), image)
    run(network, network.launches[0][-1], torch.zeros(64, network.row), image)  # 100 classes at one place
    assert grids == [((64, 1), 16), ((1024, 1), 64), ((28, 1), 16)]


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "triton", None)
    with pytest.raises(DeviceError, match="Triton is not installed"):
        kernel.run_with_triton("tf32")
