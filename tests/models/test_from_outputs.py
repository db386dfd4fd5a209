"""Models from code that returns, yields or computes in stages the logits of all exits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.errors import ShapeError
from anytime.models import from_outputs
from anytime.testing import check_model
from anytime.train import distillation, joint_cross_entropy, product_likelihood

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Branchy(nn.Module):
    """Three exits; `how` is the form of the output."""

    def __init__(self, how: str = "list") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.how, self.ran = how, 0

    def each(self, x: Tensor) -> Iterator[Tensor]:
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            self.ran += 1
            yield head(x)

    def forward(self, x: Tensor) -> Any:
        logits = list(self.each(x))
        match self.how:
            case "list":
                return logits
            case "tuple":
                return tuple(logits)
            case "stacked":
                return torch.stack(logits)
            case "batch first":
                return torch.stack(logits, 1)
            case "dict":
                return {"exits": logits, "loss": x.sum()}
            case "object":
                return SimpleNamespace(logits=logits)
            case "objects":
                return [SimpleNamespace(logits=each) for each in logits]
            case "dataclass":
                return Output(x.sum(), torch.stack(logits))
            case "nested":
                return x, {"aux": [logits[:-1], logits[-1]]}


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Yielding(Branchy):
    def forward(self, x: Tensor) -> Any:
        yield from self.each(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "list": {},
    "tuple": {},
    "stacked": {"exits_dim": 0},
    "batch first": {"exits_dim": 1},
    "dict": {"key": "exits"},
    "object": {},
    "objects": {},
    "dataclass": {},
    "nested": {"select": lambda output: [*output[1]["aux"][0], output[1]["aux"][1]]},
}


def expected(net: Branchy) -> Tensor:
    with torch.no_grad():
        return torch.stack(list(net.each(X)))


@pytest.mark.parametrize("known", [{"example": X}, {"exits": 3}])
def test_a_tensor_of_as_many_exits_as_rows_is_read_as_those_before(known: dict[str, Any]) -> None:
    model = from_outputs(Branchy("stacked").eval(), **known)
    whole = model(X)
    torch.testing.assert_close(model(X[:3]), whole[:, :3])


@pytest.mark.parametrize("how", OPTIONS)
def test_every_form_of_output_gives_the_logits_of_all_exits(how: str) -> None:
    net = Branchy(how).eval()
    model = from_outputs(net, example=X, **OPTIONS[how])
    assert (model.num_exits, model.staged, model.stops_early) == (3, False, False)
    torch.testing.assert_close(model(X), expected(net))
    assert from_outputs(net, exits=3, **OPTIONS[how])(X).shape == (3, 5, 3)


def test_a_model_with_all_outputs_at_once_answers_in_a_runner_and_says_that_it_cannot_stop_early() -> None:
    net = Branchy().eval()
    model = from_outputs(net, example=X)
    assert "cannot stop early" in repr(model)
    with anytime.Runner(model, rule="latest") as runner:
        answer = runner.predict(X, budget=anytime.Budget(exits=1))
    torch.testing.assert_close(answer.probs, expected(net)[0].softmax(-1))


def test_finding_the_number_of_exits_changes_nothing_in_the_module() -> None:
    net = Branchy().train()
    before = copy.deepcopy(net.state_dict())
    model = from_outputs(net, example=X)
    assert net.training
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_generator_runs_to_the_requested_exit_only() -> None:
    net = Yielding().eval()
    model = from_outputs(net, example=X)
    assert (model.num_exits, model.stops_early) == (3, True)
    net.ran = 0
    next(model.exits(X))
    assert net.ran == 1
    check_model(model, X)


def test_a_function_is_a_model() -> None:
    net = Branchy().eval()
    model = from_outputs(lambda x: net(x), example=X)
    torch.testing.assert_close(model(X), expected(net))


class Stage(nn.Module):
    def __init__(self, block: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.block, self.head = block, head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.block(x)
        return features, self.head(features)


def stage_forms(net: Branchy) -> dict[str, list[Any]]:
    pairs = list(zip(net.blocks, net.heads, strict=True))
    return {
        "pairs": pairs,
        "modules": [Stage(*pair) for pair in pairs],
        "logits alone at the last": [*pairs[:2], nn.Sequential(*pairs[2])],
    }


@pytest.mark.parametrize("form", ["pairs", "modules", "logits alone at the last"])
def test_stages_run_one_at_a_time_and_give_the_logits_of_the_module(form: str) -> None:
    net = Branchy().eval()
    model = from_outputs(stage_forms(net)[form])
    assert (model.num_exits, model.staged, model.stops_early) == (3, True, True)
    torch.testing.assert_close(model(X), expected(net))
    check_model(model, X)


def test_a_module_list_is_a_list_of_stages() -> None:
    net = Branchy().eval()
    model = from_outputs(nn.ModuleList(stage_forms(net)["modules"]))
    torch.testing.assert_close(model(X), expected(net))


class Scales(nn.Module):
    """A block on features at two scales, a list of tensors, as in ports of MSDNet."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.fine, self.coarse = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, stride=2, padding=1)

    def forward(self, x: Any) -> list[Tensor]:
        fine = x if self.first else x[0]
        below = self.coarse(fine) if self.first else self.coarse(fine) + x[1]
        return [self.fine(fine).relu(), below.relu()]


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: list[Tensor]) -> Tensor:
        return self.layer(x[0].mean((2, 3)) + x[1].mean((2, 3)))


def scales() -> list[tuple[nn.Module, nn.Module]]:
    return [(Scales(first=exit == 0), Pool()) for exit in range(3)]


def test_features_may_be_lists_of_tensors() -> None:
    stages, images = scales(), torch.randn(4, 2, 8, 8)
    with torch.no_grad():
        first = stages[0][0].eval()(images)
        second = stages[1][0].eval()(first)
    model = from_outputs(stages, example=images).eval()
    assert [model.carry_size(exit) for exit in range(3)] == [1, 2, 2]
    torch.testing.assert_close(model(images)[1], stages[1][1](second))
    check_model(model, images)
    with anytime.Runner(model, rule="latest", engine="folded", example=images) as runner:
        torch.testing.assert_close(runner.predict(images).probs, model(images)[2].softmax(-1), atol=1e-5, rtol=1e-4)


def test_without_an_example_several_tensors_are_refused() -> None:
    with pytest.raises(ShapeError, match="example=x"):
        from_outputs(scales())(torch.randn(4, 2, 8, 8))


def test_stages_may_take_a_dict_of_inputs() -> None:
    class First(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a + b, a - b

    given = {"a": X, "b": 2 * X}
    model = from_outputs([First(), (nn.Identity(), nn.Linear(4, 4))], example=given)
    assert model.input_names == ("a", "b")
    torch.testing.assert_close(model({"b": 2 * X, "a": X})[0], -X)


def test_stages_are_pickled_and_copied() -> None:
    images = torch.randn(4, 2, 8, 8)
    model = from_outputs(scales(), example=images).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(images), model(images))


@pytest.mark.parametrize("loss", [joint_cross_entropy, product_likelihood, distillation])
def test_losses_take_a_list_of_logits(loss: Any) -> None:
    logits, labels = torch.randn(3, 5, 4), torch.arange(5) % 4
    teacher = (torch.randn(5, 4),) if loss is distillation else ()
    torch.testing.assert_close(loss(list(logits), labels, *teacher), loss(logits, labels, *teacher))
    torch.testing.assert_close(loss(tuple(logits.half()), labels, *teacher), loss(logits.half(), labels, *teacher))


def test_arrays_of_numpy_are_logits() -> None:
    arrays = [torch.randn(5, 3).numpy() for _ in range(2)]
    model = from_outputs(lambda x: arrays, example=X)
    assert torch.equal(model(X), torch.stack([torch.from_numpy(each) for each in arrays]))
    stacked = torch.stack([torch.from_numpy(each) for each in arrays]).numpy()
    assert torch.equal(anytime.collect_logits(lambda x: stacked, [X]).logits, model(X))


def test_stages_may_come_from_zip() -> None:
    net = Branchy().eval()
    assert torch.equal(from_outputs(zip(net.blocks, net.heads, strict=True))(X), torch.stack(list(net.each(X))))
