from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import OptionError, ShapeError
from anytime.models.cost import measure_cost
from anytime.models.imta import IMTA, PRESETS, IMTAConfig, balanced_exits, scale_gradient
from anytime.models.msdnet import MSDNet, MSDNetConfig
from anytime.testing import check_model

SMALL = MSDNetConfig(
    classes=5, exits=4, base=2, step=1, channels=4, growth=4, growth_factors=(1, 2), bottleneck_factors=(1, 2), image_size=16
)
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


@pytest.fixture
def trained() -> MSDNet:
    """Not trained at all, but with statistics that are not those of a new network."""
    torch.manual_seed(0)
    network = MSDNet(SMALL).train()
    with torch.no_grad():
        network(IMAGES)
    return network


def test_a_scaled_gradient_does_not_change_the_value_and_can_be_differentiated_twice() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(scale_gradient(x, 0.3), x)
    (once,) = torch.autograd.grad((scale_gradient(x, 0.3) ** 2).sum(), x, create_graph=True)
    torch.testing.assert_close(once, 0.6 * x)
    (twice,) = torch.autograd.grad(once.sum(), x)
    torch.testing.assert_close(twice, torch.full_like(x, 2 * 0.3**2))  # scaled once more on its way back


class Seen:
    """The coarsest maps of a pass: what blocks give, what exits read, what the next blocks read."""

    def __init__(self, network: MSDNet) -> None:
        self.given: list[Tensor] = []
        self.by_exit: list[Tensor] = []
        self.by_next: list[Tensor] = []
        for block, classifier in zip(network.blocks, network.classifier, strict=True):
            block.register_forward_hook(lambda _, __, maps: self.given.append(kept(maps[-1])))
            classifier.register_forward_pre_hook(lambda _, args: self.by_exit.append(kept(args[0])))
            block.register_forward_pre_hook(lambda _, args: self.by_next.append(kept(args[0][-1])))


def kept(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.retain_grad()
    return x


def test_the_gradient_into_a_stage_is_the_weighted_mean_of_its_own_and_the_later_ones(trained: MSDNet) -> None:
    network = trained.double()
    seen = Seen(network)
    losses = [nn.functional.cross_entropy(logits, LABELS) for logits in balanced_exits(network, IMAGES.double())]
    own = [
        torch.autograd.grad(loss, x, retain_graph=True)[0] for loss, x in zip(losses, seen.by_exit, strict=True)
    ]  # an exit's loss reaches what it reads through its classifier alone
    torch.stack(losses).sum().backward()
    exits = network.num_exits
    for stage, given in enumerate(seen.given):
        left = exits - stage
        later = seen.by_next[stage + 1].grad if left > 1 else torch.zeros_like(given)
        assert later is not None
        torch.testing.assert_close(given.grad, (own[stage] + (left - 1) * later) / left)
    assert float(own[0].norm()) > 0


def test_balanced_exits_give_the_logits_of_plain_ones(trained: MSDNet) -> None:
    network = trained.eval()
    torch.testing.assert_close(torch.stack(tuple(balanced_exits(network, IMAGES))), network(IMAGES))
    ran: list[int] = []
    for stage, block in enumerate(network.blocks):
        block.register_forward_hook(lambda *_, stage=stage: ran.append(stage))
    next(balanced_exits(network, IMAGES))
    assert ran == [0]


def test_it_passes_check_model_and_its_exits_read_each_other(trained: MSDNet) -> None:
    network = IMTA.on(trained).eval()
    check_model(network, IMAGES, classes=5)
    first, second, *_ = network.exits(IMAGES)
    feature = trained.eval().classifier[1].m(list(trained.stages(IMAGES))[1][-1]).flatten(1)
    by_hand = network.heads[1](torch.cat((feature, network.links[0](first)), 1))
    torch.testing.assert_close(second, by_hand)


def test_only_heads_and_links_learn_and_gradients_pass_from_exit_to_exit(trained: MSDNet) -> None:
    network = IMTA.on(trained)
    assert {name.split(".")[0] for name, p in network.named_parameters() if p.requires_grad} == {"heads", "links"}
    *_, last = network.exits(IMAGES)
    last.sum().backward()
    gradient = network.heads[0].weight.grad
    assert gradient is not None
    assert float(gradient.abs().sum()) > 0


def test_the_teacher_is_the_last_exit_of_the_first_stage_without_gradient(trained: MSDNet) -> None:
    network = IMTA.on(trained)
    rival = copy.deepcopy(trained).train()
    logits, teacher = network.with_teacher(IMAGES)
    torch.testing.assert_close(teacher, rival(IMAGES)[-1])  # the same batch statistics, as both are in training
    assert not teacher.requires_grad
    assert logits.requires_grad
    torch.testing.assert_close(logits, IMTA.forward(network, IMAGES))


@pytest.mark.parametrize("hold", [False, True])
def test_frozen_statistics_move_or_are_held(trained: MSDNet, hold: bool) -> None:
    network = IMTA.on(trained, hold_statistics=hold).eval().train()
    before = copy.deepcopy(network.backbone.state_dict())
    network(IMAGES + 3)
    after = network.backbone.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in changed)
    assert bool(changed) is not hold
    assert network.links[0].training


def test_the_network_it_is_built_on_is_not_changed(trained: MSDNet) -> None:
    before = copy.deepcopy(trained.state_dict())
    IMTA.on(trained)(IMAGES)
    assert all(torch.equal(before[name], values) for name, values in trained.state_dict().items())
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_presets_follow_those_of_msdnet_and_cost_a_little_more() -> None:
    assert PRESETS["imta-cifar-linear"] == IMTAConfig(classes=100, exits=5, spacing="linear", base=1, step=1)
    image = torch.zeros(1, 3, 32, 32)
    plain = measure_cost(MSDNet(PRESETS["imta-cifar"].backbone), image).macs
    cost = measure_cost(IMTA(PRESETS["imta-cifar"]), image)
    link, wider = 128 * 101 + 128, 100 * 128  # the layer over the logits with its ReLU, and the wider classifier
    assert [after - before for before, after in zip(plain, cost.macs, strict=True)] == [i * (link + wider) for i in range(7)]
    assert {name.split(".")[-2] for name in cost.unused} == {"linear"}


def test_wrong_images_and_settings_are_refused(trained: MSDNet) -> None:
    with pytest.raises(ShapeError):
        next(IMTA.on(trained).exits(torch.zeros(1, 3, 8, 8)))
    with pytest.raises(OptionError, match="hold_statistics"):
        IMTAConfig(classes=3, hold_statistics="no")  # type: ignore[arg-type]
