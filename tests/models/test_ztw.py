"""Cascading heads: what they read, what they do not teach, and that they learn."""

from __future__ import annotations

import torch
from torch import nn

from anytime.calibrate.ensembles import fit_geometric
from anytime.data import load_digits
from anytime.models import AttachedExits, CascadeHead, CifarResNet, attach_cascade, attach_exits
from anytime.testing import check_model
from anytime.train import ExitEvaluation, TrainConfig, exit_accuracy, fit

IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def cascade(**options: bool) -> AttachedExits:
    torch.manual_seed(0)
    body = CifarResNet(classes=10, depth=8, width=8, channels=1)
    return attach_cascade(body, ["stem", "blocks.0", "blocks.1"], example=IMAGES, classes=10, **options)  # type: ignore[arg-type]


def test_it_passes_check_model() -> None:
    check_model(cascade(), IMAGES, classes=10)
    check_model(cascade(normalise=False, convolution=False, frozen=False), IMAGES, classes=10)


def test_each_head_reads_the_one_before_it() -> None:
    model = cascade().eval()
    before = model(IMAGES)
    with torch.no_grad():
        model.heads[0].linear.bias += torch.arange(10.0)
    after = model(IMAGES)
    assert not torch.allclose(before[1], after[1])
    assert not torch.allclose(before[2], after[2])
    torch.testing.assert_close(before[3], after[3])  # the network's own output reads no head


def test_no_gradient_flows_into_the_head_before() -> None:
    model = cascade(frozen=False).train()
    list(model.exits(IMAGES))[2].square().sum().backward()
    assert all(p.grad is None for p in model.heads[0].parameters())
    assert all(p.grad is None for p in model.heads[1].parameters())
    assert all(p.grad is not None for p in model.heads[2].parameters())
    assert model.backbone.stem[0].weight.grad is not None


def test_logits_are_normalised_before_they_are_read() -> None:
    features, previous = torch.randn(2, 4, 8, 8), torch.randn(2, 10)
    head = CascadeHead((4, 8, 8), 10, reads_previous=True)
    assert torch.allclose(head(features, previous), head(features, 50 * previous + 3), atol=1e-4)
    plain = CascadeHead((4, 8, 8), 10, reads_previous=True, normalise=False)
    assert not torch.allclose(plain(features, previous), plain(features, 50 * previous + 3), atol=1e-2)


def test_maps_pass_a_convolution_of_the_same_width() -> None:
    head = CascadeHead((4, 8, 8), 10, reads_previous=False)
    assert isinstance(head.features, nn.Sequential)
    assert head.features[0].weight.shape == (4, 4, 3, 3)
    assert isinstance(CascadeHead((7,), 10, reads_previous=True).features, nn.Identity)


def test_heads_on_a_frozen_network_learn_and_it_is_not_changed() -> None:
    digits = load_digits()
    torch.manual_seed(0)
    body = CifarResNet(classes=10, depth=8, width=8, channels=1)
    recipe = TrainConfig(epochs=6, batch=64, lr=0.05, schedule="cosine", warmup=1, augment=False)
    fit(attach_exits(body, [], example=IMAGES, classes=10), digits["train"], recipe)
    trained = {name: value.clone() for name, value in body.state_dict().items() if "tracked" not in name}
    model = attach_cascade(body, ["stem", "blocks.0", "blocks.1"], example=IMAGES, classes=10)
    fit(model, digits["train"], recipe)
    assert all(torch.equal(value, body.state_dict()[name]) for name, value in trained.items())
    logits = ExitEvaluation(model, digits["val"]).logits()
    assert min(exit_accuracy(logits, digits["val"].labels)) > 0.85  # chance is 0.1
    rule = fit_geometric(logits, digits["val"].labels, epochs=50)
    combined = rule(ExitEvaluation(model, digits["test"]).logits())
    assert (combined.labels == digits["test"].labels).double().mean(-1).min() > 0.85
