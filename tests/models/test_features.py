"""What the last layer of each exit reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import OptionError, ShapeError
from anytime.models import (
    IMTA,
    MLP,
    DViT,
    Ensemble,
    IMTAConfig,
    IntervalMLP,
    MLPConfig,
    MSDNet,
    MSDNetConfig,
    attach_cascade,
    attach_exits,
    create,
)
from anytime.models.features import collect_features, exit_features, last_layers


def seeded(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))


class Hidden(nn.Module):
    """Cannot be traced: looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if bool(x.detach().sum() > 1e9):
            x = x + 1
        logits: Tensor = self.head(self.second(x).relu())
        return logits


EXAMPLE, IMAGES = seeded((4, 8)), seeded((2, 3, 32, 32))
MODELS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "mlp": (lambda: MLP(MLPConfig(classes=4, inputs=8, width=8, exits=3)), EXAMPLE),
    "msdnet": (lambda: MSDNet(MSDNetConfig(classes=5, exits=2)), IMAGES),
    "imta": (lambda: IMTA(IMTAConfig(classes=5, exits=2)), IMAGES),
    "dvit": (lambda: create("dvit-cifar", classes=5), IMAGES),
    "resnet": (lambda: create("sdn-resnet-cifar-56", classes=5), IMAGES),
    "traced": (lambda: attach_exits(body(), at=["1", "3"], example=EXAMPLE, classes=3, method="trace"), EXAMPLE),
    "thread": (
        lambda: attach_exits(Hidden(), at=["first", "second"], example=EXAMPLE, classes=3, method="thread"),
        EXAMPLE,
    ),
    "cascade": (lambda: attach_cascade(body(), at=["1", "3"], example=EXAMPLE, classes=3), EXAMPLE),
    "ensemble": (lambda: Ensemble([nn.Linear(8, 3), MLP(MLPConfig(classes=3, inputs=8, exits=2))]), EXAMPLE),
}


def model_and_rows(name: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    make, x = MODELS[name]
    return make(), x


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_layer_applied_to_the_features_gives_the_logits(name: str) -> None:
    model, x = model_and_rows(name)
    model.eval()
    layers = last_layers(model, x[:1])
    pairs = list(exit_features(model, x))
    assert len(layers) == len(pairs) == model.num_exits
    for layer, (features, logits), plain in zip(layers, pairs, model.exits(x), strict=True):
        torch.testing.assert_close(logits, plain)
        assert features.shape == (len(x), layer.in_features)
        assert torch.allclose(layer(features), logits, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_hook_is_left_and_the_mode_is_restored(name: str) -> None:
    model, x = model_and_rows(name)
    model.train()
    before = {key: (dict(part._forward_hooks), part.training) for key, part in model.named_modules()}
    last_layers(model, x)
    run = exit_features(model, x)
    next(run)  # suspended, never closed
    assert {key: (dict(part._forward_hooks), part.training) for key, part in model.named_modules()} == before
    with pytest.raises(ZeroDivisionError):
        list(exit_features(_breaks(model, x), x))
    assert {key: (dict(part._forward_hooks), part.training) for key, part in model.named_modules()} == before


def _breaks(model: Any, x: Tensor) -> Any:
    """The model, whose last linear layer raises when it runs."""
    last_layers(model, x)[-1].forward = lambda x: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    return model


def test_nothing_runs_after_the_last_requested_exit() -> None:
    model = MLP(MLPConfig(classes=4, exits=3))
    ran: list[nn.Module] = []
    for part in (*model.layers, *model.heads):
        part.register_forward_hook(lambda module, *_: ran.append(module))
    run = exit_features(model, seeded((4, 2)))
    assert ran == []
    next(run)
    assert ran == [model.layers[0], model.heads[0]]


def test_two_interleaved_runs_do_not_interfere() -> None:
    model = MLP(MLPConfig(classes=4, exits=3))
    first, second = seeded((4, 2)), seeded((4, 2)) + 1
    alone = [features for features, _ in exit_features(model, first)]
    turns = [pair[0] for pair, _ in zip(exit_features(model, first), exit_features(model, second), strict=True)]
    torch.testing.assert_close(alone, turns)


def test_features_stay_when_a_later_stage_overwrites_them() -> None:
    class Overwrites(nn.Module):
        num_exits = 2

        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            x = x.clone()
            for head in self.heads:
                yield head(x)
                x.mul_(2)

    with torch.no_grad():
        first, second = (features for features, _ in exit_features(Overwrites(), torch.ones(1, 3)))
    assert first.tolist() == [[1, 1, 1]]
    assert second.tolist() == [[2, 2, 2]]


def test_features_of_batches_are_collected_in_order_and_in_eval_mode() -> None:
    model = MLP(MLPConfig(classes=4, exits=2)).train()
    x, labels = seeded((5, 2)), torch.arange(5)
    features, collected = collect_features(model, zip(x.split(2), labels.split(2), strict=True))
    assert model.training
    assert torch.equal(collected, labels)
    for found, (wanted, _) in zip(features, exit_features(model, x), strict=True):
        assert not found.requires_grad
        assert torch.allclose(found, wanted, atol=1e-6)
    with pytest.raises(ShapeError, match="batches is empty"):
        collect_features(model, [])


def test_gradients_go_through() -> None:
    model = MLP(MLPConfig(classes=4, exits=2))
    *_, (features, _) = exit_features(model, seeded((4, 2)))
    features.sum().backward()
    assert model.layers[0][0].weight.grad is not None  # type: ignore[index]


class Plain:
    num_exits = 1

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield x


class Short(nn.Module):
    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield self.head(x)


class Averaged(Short):
    num_exits = 1

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield self.head(torch.stack((x, x), 1)).mean(1)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (Plain(), OptionError, "Plain"),
        (nn.Linear(2, 2), OptionError, "Linear"),
        (Short(), ShapeError, "yields 1 exits"),
        (Averaged(), OptionError, "exit 1"),
        (IntervalMLP(inputs=2), OptionError, "exit 1"),
        (Ensemble.averaged([MLP(MLPConfig(classes=3))]), OptionError, "exit 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_models_without_linear_exits_are_refused(model: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        last_layers(model, torch.zeros(2, 2))
    with pytest.raises(error, match=says):
        list(exit_features(model, torch.zeros(2, 2)))


def test_dvit_reads_the_class_token() -> None:
    model = create("dvit-cifar", classes=5)
    assert isinstance(model, DViT)
    assert last_layers(model, seeded((1, 3, 32, 32))) == [network.get_submodule("head") for network in model.networks]
