from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from anytime.artifacts import read_bundle
from anytime.data import ImageData, load_digits
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.models.msdnet import MSDNet, MSDNetConfig
from anytime.policy import exit_fractions
from anytime.train import L2W, ExitEvaluation, FitOptions, Hardware, TrainConfig, fit
from anytime.train.data.named import doubled
from anytime.train.data.rows import _stop_counting
from anytime.train.objectives.l2w import (
    Half,
    L2WStep,
    WeightNetwork,
    assign,
    centre,
    cross_entropies,
    meta_loss,
    sample_weights,
)

RECIPE = TrainConfig(epochs=4, batch=64, lr=0.1, schedule="cosine", augment=False, objective="l2w")
NETWORK = MSDNetConfig(
    classes=10, exits=2, base=1, step=1, channels=8, growth=4, growth_factors=(1, 2), bottleneck_factors=(1, 2), image_size=16
)


def shares(exits: int) -> tuple[float, ...]:
    return tuple(exit_fractions(L2W().ratio, exits).tolist())


def test_weights_are_centred_around_one() -> None:
    torch.manual_seed(0)
    losses = 3 * torch.rand(6, 4)
    for mode, dims in (("mat", (0, 1)), ("col", (1,)), ("row", (0,))):
        weights = sample_weights(WeightNetwork(4), losses, L2W(strength=0.5, centring=mode))  # type: ignore[arg-type]
        means = weights.mean(dims)
        torch.testing.assert_close(means, torch.ones_like(means))
        assert (weights - 1).abs().max().item() < 2 * 0.5
    assert centre(torch.tensor([[0.0, 1.0], [2.0, 5.0]]), "row").tolist() == [[-1, -2], [1, 2]]


def test_each_exit_takes_its_fraction_of_the_most_confident_that_are_left() -> None:
    assert shares(5) == pytest.approx((0.328, 0.246, 0.184, 0.138, 0.104), abs=6e-4)
    confidence = torch.tensor([[0.9, 0.1, 0.8, 0.7, 0.2, 0.3], [0.9, 0.2, 0.9, 0.1, 0.5, 0.4], [0.0] * 6])
    first, second, rest = assign(confidence, (0.34, 0.34, 0.32))
    assert first.tolist() == [0, 2]
    assert second.tolist() == [4, 5]
    assert sorted(rest.tolist()) == [1, 3]


def test_fractions_are_rounded_down_and_every_sample_leaves_once() -> None:
    confidence = torch.rand(5, 101, generator=torch.Generator().manual_seed(0))
    groups = assign(confidence, shares(5))
    assert [len(group) for group in groups[:-1]] == [int(101 * share) for share in shares(5)[:-1]]
    assert torch.cat(groups).sort().values.tolist() == list(range(101))
    assert [len(group) for group in assign(confidence[:, :2], shares(5))] == [0, 0, 0, 0, 2]


class Smooth(MultiExit):
    """Two smooth stages with batch norms, for finite differences."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            yield head(x)


class Scene:
    """A network, a weight network and two halves in double precision."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.network = Smooth().double().train()
        self.weigher = WeightNetwork(2).double()
        self.halves = tuple(Half(torch.randn(12, 3).double(), torch.randint(0, 4, (12,))) for _ in range(2))
        self.weights = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.velocity = {name: 0.1 * torch.randn_like(values) for name, values in self.weights.items()}
        self.config = TrainConfig(objective="l2w", weight_decay=0.01)

    def loss(self) -> Tensor:
        first, second = self.halves
        return meta_loss(self.network, self.weigher, self.weights, self.velocity, (first, second), lr=0.7, config=self.config)


def test_the_meta_gradient_agrees_with_finite_differences() -> None:
    scene = Scene()
    parameters = list(scene.weigher.parameters())
    gradients = torch.autograd.grad(scene.loss(), parameters)
    direction = [torch.randn_like(p) for p in parameters]
    along = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.add_(d, alpha=sign * 1e-5)
        values.append(scene.loss().item())
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.sub_(d, alpha=sign * 1e-5)
    assert abs(along) > 1e-3
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(along, rel=1e-5)


def test_the_look_ahead_is_a_step_of_sgd() -> None:
    scene = Scene()
    first, second = scene.halves
    ahead = copy.deepcopy(scene.network)
    optimizer = torch.optim.SGD(ahead.parameters(), 0.7, momentum=0.9, weight_decay=0.01)
    for name, parameter in ahead.named_parameters():
        optimizer.state[parameter] = {"momentum_buffer": scene.velocity[name].clone()}
    losses = cross_entropies(ahead(first.images), first.labels)
    weights = sample_weights(scene.weigher, losses, scene.config.l2w).detach()
    (weights * losses).mean(0).sum().backward()
    optimizer.step()
    logits = ahead(second.images)
    groups = assign(logits.softmax(-1).amax(-1), shares(2))
    judged = cross_entropies(logits, second.labels)
    expected = torch.stack([judged[rows, exit].mean() for exit, rows in enumerate(groups)]).sum()
    assert scene.loss().item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_look_ahead_does_not_change_the_network() -> None:
    scene = Scene()
    before = copy.deepcopy(scene.network.state_dict())
    scene.loss().backward()
    assert all(torch.equal(before[name], values) for name, values in scene.network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_look_ahead_never_reads_a_value_back(dtype: torch.dtype) -> None:
    """On the meta device, anything that reads a value (`item`, a branch on data) is an error."""
    with torch.device("meta"):
        network, weigher = MSDNet(NETWORK).train(), WeightNetwork(2)
        images, labels = torch.empty(16, 3, 16, 16, dtype=dtype), torch.empty(16, dtype=torch.int64)
    _stop_counting(network)
    weights = {name: torch.empty_like(p) for name, p in network.named_parameters()}
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(dtype)
    halves = tuple(Half(*parts) for parts in zip(images.chunk(2), labels.chunk(2), strict=True))
    lr = torch.empty((), device="meta")
    loss = meta_loss(network, weigher, weights, weights, (halves[0], halves[1]), lr=lr, config=RECIPE)
    gradients = torch.autograd.grad(loss, list(weigher.parameters()))
    assert [g.shape for g in gradients] == [p.shape for p in weigher.parameters()]
    assert {g.device.type for g in gradients} == {"meta"}


def test_a_batch_is_two_steps_of_each_optimizer(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    step = L2WStep(tiny.Tiny(), digits["train"], None, RECIPE, Hardware())  # type: ignore[arg-type]
    step.begin(0)
    before = copy.deepcopy(step.weigher.state_dict())
    step(0, 0.05)
    assert {int(state["step"]) for state in step.meta_optimizer.state.values()} == {2}
    assert step.meta_optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 * 0.5)
    assert any(not torch.equal(before[name], values) for name, values in step.weigher.state_dict().items())


def test_without_a_meta_step_two_halves_are_two_plain_weighted_steps(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    config = replace(RECIPE, l2w=L2W(strength=0.0, meta_every=2))
    step = L2WStep(copy.deepcopy(model), digits["train"], None, config, Hardware())  # type: ignore[arg-type]
    step.begin(0)
    step(1, 0.05)
    assert not step.meta_optimizer.state
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    images, labels = step.batch()
    total = torch.zeros(3)
    for half in (slice(0, 32), slice(32, 64)):
        losses = cross_entropies(model.train()(images[half]), labels[half]).mean(0)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        total += losses.detach() / 2
    torch.testing.assert_close(step.take_losses(), total)
    for name, values in step.weights.named.items():
        torch.testing.assert_close(values, model.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def larger_digits() -> dict[str, ImageData]:
    return {name: doubled(data) for name, data in load_digits(channels=3).items()}


def all_of(step: L2WStep) -> list[Tensor]:
    """Every tensor of the state of a step."""
    return [*step.weights.named.values(), *step.network.buffers(), *step.optimizer_state().values()]


def flat(step: L2WStep) -> Tensor:
    return torch.cat([weight.flatten() for weight in step.weights.named.values()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_the_captured_step_equals_the_eager_step() -> None:
    # From the same state each time: training amplifies rounding.
    config, data = replace(RECIPE, l2w=L2W(meta_every=2)), larger_digits()["train"]
    plain, graph = (
        L2WStep(MSDNet(NETWORK), data, None, config, Hardware(device="cuda", graph=captured))  # type: ignore[arg-type]
        for captured in (False, True)
    )
    plain.begin(0)
    graph.begin(0)
    for index in range(12):
        with torch.no_grad():
            for here, there in zip(all_of(plain), all_of(graph), strict=True):
                there.copy_(here)
        before = flat(plain)
        for step in (plain, graph):
            step(index, 0.02)
        moved, apart = flat(plain) - before, flat(plain) - flat(graph)
        assert float(apart.norm()) < 0.01 * float(moved.norm())


def test_every_exit_of_an_msdnet_learns_the_digits() -> None:
    sets = larger_digits()
    torch.manual_seed(0)
    model = MSDNet(NETWORK)
    assert fit(model, sets["train"].take(torch.arange(320)), replace(RECIPE, epochs=2, batch=32)).finished
    assert min(ExitEvaluation(model, sets["test"]).accuracy()) > 0.8  # chance is 0.1


def test_a_stopped_run_ends_with_the_same_bits(digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path) -> None:
    recipe, few = replace(RECIPE, epochs=2), digits["train"].take(torch.arange(256))
    for name in ("whole", "stopped"):
        torch.manual_seed(0)
        model = tiny.Tiny(width=4)
        options = FitOptions(folder=tmp_path / name, resume=True, checkpoint_every=1)
        if name == "stopped":
            with pytest.raises(KeyboardInterrupt):
                fit(copy.deepcopy(model), few, recipe, options=replace(options, on_epoch=interrupt_second))
        fit(model, few, recipe, options=options)
    whole, stopped = (read_bundle(tmp_path / name / "checkpoint") for name in ("whole", "stopped"))
    assert whole["model.safetensors"] == stopped["model.safetensors"]
    assert whole["optimizer.safetensors"] == stopped["optimizer.safetensors"]


def interrupt_second(line: object) -> None:
    if getattr(line, "epoch", 0) == 2:
        raise KeyboardInterrupt


def test_settings_that_l2w_does_not_support_are_refused(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    with pytest.raises(OptionError, match="streams"):
        fit(tiny.Tiny(), digits["train"], RECIPE, hardware=Hardware(device="cuda", streams=True))
    for wrong in (replace(RECIPE, nesterov=True), replace(RECIPE, batch=63)):
        with pytest.raises(OptionError, match="nesterov"):
            fit(tiny.Tiny(), digits["train"], wrong)
    with pytest.raises(OptionError, match="centring"):
        L2W(centring="both")  # type: ignore[arg-type]
    assert TrainConfig.from_json(replace(RECIPE, l2w=L2W(ratio=0.5)).to_json()).l2w.ratio == 0.5
