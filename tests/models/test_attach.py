"""Exits on any module: what they give, what is run for them, and what is left behind."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from anytime.data import load_digits
from anytime.errors import AttachWarning, DtypeError, OptionError, ShapeError, StateError
from anytime.models import AttachedExits, CifarResNet, PooledHead, attach_exits, measure_cost
from anytime.models.attach.heads import MixedPool, pooling
from anytime.testing import check_model
from anytime.train import ExitEvaluation, TrainConfig, fit

METHODS = pytest.mark.parametrize("method", ["trace", "thread"])
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
PLACES = ["blocks.0", "blocks.2.conv1", "blocks.2", "blocks.4"]


def resnet() -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(classes=5, depth=14, width=4)


def attached(method: Any = "auto", at: Any = PLACES, **options: Any) -> AttachedExits:
    return attach_exits(resnet(), at, example=IMAGES, classes=5, method=method, **options).eval()


@contextmanager
def counted(module: nn.Module) -> Iterator[Counter[str]]:
    """How often each submodule was entered."""
    calls: Counter[str] = Counter()
    handles = [
        part.register_forward_pre_hook(lambda _, __, name=name: calls.update([name]))
        for name, part in module.named_modules()
        if name and next(part.children(), None) is None
    ]
    yield calls
    for handle in handles:
        handle.remove()


@METHODS
def test_the_last_exit_is_the_untouched_module(method: str) -> None:
    model, alone = attached(method), resnet().eval()
    assert model.method == method
    *_, last = model.exits(IMAGES)
    torch.testing.assert_close(last, alone(IMAGES))


@METHODS
def test_exits_read_what_the_named_modules_give(method: str) -> None:
    seen: dict[str, Tensor] = {}
    body = resnet().eval()
    for name in PLACES:
        body.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    body(IMAGES)
    model = attached(method)
    for name, head, logits in zip(PLACES, model.heads, model.exits(IMAGES), strict=False):
        torch.testing.assert_close(logits, head(seen[name]))


@METHODS
def test_it_passes_check_model(method: str) -> None:
    check_model(attached(method), IMAGES, classes=5)


@METHODS
def test_nothing_runs_after_a_stop_and_nothing_twice(method: str) -> None:
    model = attached(method)
    body = dict(model.backbone.named_modules())
    order = [name for name, part in body.items() if name and next(part.children(), None) is None]
    with counted(model.backbone) as calls:
        run = model.exits(IMAGES)
        assert not calls
        next(run)
        assert list(calls) == order[: order.index("blocks.0.relu2") + 1]
        next(run)
        assert list(calls)[-1] == "blocks.2.conv1"
        run.close()
        assert list(calls)[-1] == "blocks.2.conv1"
    with counted(model.backbone) as calls:
        list(model.exits(IMAGES))
        assert set(calls) == set(order)
        assert set(calls.values()) == {1}


@METHODS
def test_gradients_are_those_of_the_module(method: str) -> None:
    model, alone = attached(method).train(), resnet().train()
    model(IMAGES)[-1].square().sum().backward()
    alone(IMAGES).square().sum().backward()
    for one, other in zip(model.backbone.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)
    model.zero_grad()
    next(model.exits(IMAGES)).sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any(name.startswith("backbone.blocks.0.") for name in reached)
    assert not any(name.startswith(("backbone.blocks.1.", "heads.1")) for name in reached)


@METHODS
def test_two_interleaved_runs_do_not_interfere(method: str) -> None:
    model = attached(method)
    together = [torch.cat(pair) for pair in zip(model.exits(IMAGES[:2]), model.exits(IMAGES[2:]), strict=True)]
    assert torch.allclose(torch.stack(together), model(IMAGES), atol=1e-5)


@METHODS
def test_a_copy_is_independent(method: str) -> None:
    model = attached(method)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.backbone.linear.weight.zero_()
        other.backbone.linear.bias.zero_()
    assert other(IMAGES)[-1].abs().max() == 0
    assert model(IMAGES)[-1].abs().max() > 0
    with counted(model.backbone) as calls:
        other(IMAGES)
    assert not calls


# Modules that are hard to stop.


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(2.0))


class FunctionalDropout(Body):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x) if mask is None else x * mask
        x = F.dropout(x, 0.5, self.training) * self.scale
        return self.third(self.second(x).relu())


class InPlace(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu_()).add_(1))


class Branching(Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.scale > 0:
            x = x * 2
        return self.third(self.second(x))


class OwnTensor(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)) + torch.ones(6))


class NoGradInside(Body):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.third(self.second(x))


class Remembers(Body):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first(x)
        return self.third(self.second(self.last))


class LooksAtTypes(Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x if isinstance(x, Tensor) else x * 0))


class LikeHuggingFace(Body):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.third(self.second(self.first(x))))


VECTORS = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (FunctionalDropout, "trace"),
        (InPlace, "trace"),
        (InPlace, "thread"),
        (Branching, "replay"),
        (Branching, "thread"),
        (OwnTensor, "replay"),
        (NoGradInside, "replay"),
        (Remembers, "thread"),
        (LooksAtTypes, "replay"),
    ],
)
def test_hard_modules_give_what_they_give_alone_in_both_modes(kind: type[nn.Module], method: str) -> None:
    wanted = method if method == "thread" or kind is InPlace else "auto"
    model = attach_exits(kind(), ["first", "second"], example=VECTORS, classes=3, method=wanted)  # type: ignore[arg-type]
    assert model.method == method
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(3)
        given = list(model.exits(VECTORS))
        torch.manual_seed(3)
        torch.testing.assert_close(given[-1], model.backbone(VECTORS))
        torch.testing.assert_close(given[0], model.heads[0](model.backbone.first(VECTORS)))
        torch.stack(given).square().sum().backward()
    assert (model.backbone.first.weight.grad is None) == (kind is NoGradInside)
    assert model.heads[0].linear.weight.grad is not None


def test_a_failed_trace_leaves_nothing_on_the_module() -> None:
    body = Remembers()
    with pytest.warns(AttachWarning, match="runs in a thread, .* forward sets Remembers.last"):
        attach_exits(body, ["first"], example=VECTORS, classes=3)
    assert isinstance(body.last, Tensor)


def test_logits_inside_of_an_object_are_found() -> None:
    for method in ("trace", "thread"):
        model = attach_exits(LikeHuggingFace(), ["first"], example=VECTORS, classes=3, method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(model(VECTORS)[-1], model.backbone(VECTORS).logits)


def test_a_trace_that_was_asked_for_and_fails_says_why() -> None:
    with pytest.raises(OptionError, match=r"test_attach.py:\d+: `if self.scale > 0:`.*control flow"):
        attach_exits(Branching(), ["first"], example=VECTORS, classes=3, method="trace")


def test_tokens_of_a_transformer_get_exits() -> None:
    torch.manual_seed(0)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False)
    body = nn.Sequential(nn.Embedding(11, 8), layers, nn.Flatten(), nn.Linear(8 * 5, 4))
    tokens = torch.randint(11, (3, 5))
    model = attach_exits(body, ["1.layers.0", "1.layers.1"], example=tokens, classes=4).eval()
    assert torch.allclose(model(tokens)[-1], body(tokens), atol=1e-5)
    assert attach_exits(body, [0.3, 0.7], example=tokens, classes=4).exit_names == ("1.layers.0", "1.layers.1")


# Stages.


def run_stages(model: AttachedExits, x: Tensor) -> list[Tensor]:
    carry, logits = (x,), []
    for exit in range(model.num_exits):
        carry, now = model.stage(exit, carry)
        logits.append(now)
    assert carry == ()
    return logits


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", [FunctionalDropout, InPlace, LikeHuggingFace])
def test_stages_give_what_exits_give_in_both_modes(kind: type[nn.Module], mode: bool) -> None:
    model = attach_exits(kind(), ["first", "second"], example=VECTORS, classes=3).train(mode)
    assert model.staged
    torch.manual_seed(3)
    wanted = list(model.exits(VECTORS))
    torch.manual_seed(3)
    for given, exit in zip(run_stages(model, VECTORS), wanted, strict=True):
        torch.testing.assert_close(given, exit)
    check_model(model, VECTORS)


class Sizes(Body):
    """Sizes, and what is made of them and of buffers, are needed on both sides of an exit."""

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        ramp = torch.arange(x.size(1), device=x.device) * self.scale
        x = self.first(x).view(rows, 2, width // 2)
        x = self.second(x.reshape(rows, width) + ramp)
        return self.third(x.view(rows, -1) + ramp) * rows / rows


class TokensFirst(Body):
    def forward(self, x: Tensor) -> Tensor:
        turned = x.t()
        return self.third(self.second(self.first(x)) + turned.t())


class Chunks(Body):
    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(2, dim=1)
        return self.third(self.second(self.first(x)) + torch.cat([chunks[1], chunks[0]], dim=1))


class SharedMemory(Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        flat = x.view(x.shape[0], 6)
        y = self.second(x)
        flat.relu_()
        return self.third(y + x)


class OtherInTraining(Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x) + x if self.training else self.second(x))


def test_sizes_are_recomputed_in_later_stages() -> None:
    model = attach_exits(Sizes(), ["first", "second"], example=VECTORS, classes=3, method="trace").eval()
    assert model.staged
    check_model(model, VECTORS)
    (first, *_), _ = model.stage(0, (VECTORS,))
    assert first.shape == (4, 6)


@pytest.mark.parametrize(
    ("kind", "why"), [(TokensFirst, "batch first"), (Chunks, "batch first"), (SharedMemory, "share memory")]
)
def test_a_module_that_cannot_be_traced_is_replayed(kind: type[nn.Module], why: str) -> None:
    model = attach_exits(kind(), ["first", "second"], example=VECTORS, classes=3).eval()
    assert model.method == "replay"
    assert why in model.why
    assert model.staged
    check_model(model, VECTORS)
    torch.testing.assert_close(model(VECTORS)[-1], model.backbone(VECTORS))
    with pytest.raises(OptionError, match=why):
        attach_exits(kind(), ["first", "second"], example=VECTORS, classes=3, method="trace")


def test_train_mode_with_other_operations_has_exits_but_no_stages() -> None:
    model = attach_exits(OtherInTraining(), ["first"], example=VECTORS, classes=3).eval()
    assert model.staged
    assert not model.train().staged
    with pytest.raises(StateError, match="in these modes"):
        model.stage(0, (VECTORS,))
    torch.testing.assert_close(model(VECTORS)[-1], model.backbone(VECTORS))
    assert model.eval().staged


def test_a_module_in_a_thread_has_no_stages_and_says_what_to_do() -> None:
    model = attach_exits(Branching(), ["first"], example=VECTORS, classes=3, method="thread")
    assert not model.staged
    for use in (lambda: model.stage(0, (VECTORS,)), lambda: model.carry_size(0)):
        with pytest.raises(StateError, match="method='trace'"):
            use()


def test_values_that_are_not_overwritten_are_carried_without_a_copy() -> None:
    model = attached("trace")
    with torch.no_grad():
        carry, _ = model.stage(0, (IMAGES,))
        seen: list[Tensor] = []
        model.backbone.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model.stage(1, carry)
    assert seen[0] is carry[0]


def test_the_stages_of_a_copy_are_independent() -> None:
    model = attached("trace")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.backbone.linear.weight.zero_()
        other.backbone.linear.bias.zero_()
    assert run_stages(other, IMAGES)[-1].abs().max() == 0
    assert run_stages(model, IMAGES)[-1].abs().max() > 0


def test_a_network_on_the_meta_device_has_stages() -> None:
    with torch.device("meta"):
        model = attach_exits(CifarResNet(classes=5, depth=8, width=4), ["blocks.0"], example=IMAGES.to("meta"), classes=5)
    assert [tuple(logits.shape) for logits in run_stages(model.eval(), IMAGES.to("meta"))] == [(4, 5)] * 2


# The thread.


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "anytime-exits"]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("end", ["close", "forget", "error"])
def test_no_thread_is_left_behind(steps: int, end: str) -> None:
    model = attach_exits(Branching(), ["first", "second"], example=VECTORS, classes=3, method="thread")
    run = model.exits(VECTORS)
    for _ in range(steps):
        next(run)
    assert len(names_of_threads()) == (steps > 0)
    if end == "close":
        run.close()  # type: ignore[attr-defined]
    elif end == "error":
        with pytest.raises(KeyError):
            run.throw(KeyError)  # type: ignore[attr-defined]
    del run
    gc.collect()
    assert not names_of_threads()


def test_an_open_run_does_not_keep_the_program_from_exiting() -> None:
    script = """
import torch
from torch import nn
from anytime.models import attach_exits
x = torch.zeros(2, 6)
run = attach_exits(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), ["0"], example=x, classes=3, method="thread").exits(x)
next(run)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=280)


def test_runs_in_several_threads_do_not_interfere() -> None:
    model, wrong = attached("thread"), []
    with torch.no_grad():
        wanted = model(IMAGES)

    def use() -> None:
        with torch.no_grad():
            for stop in (1, 3, 5, 2):
                run = model.exits(IMAGES)
                given = torch.stack([next(run) for _ in range(stop)])
                if not torch.allclose(given, wanted[:stop], atol=1e-5):
                    wrong.append(stop)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not names_of_threads()


def test_errors_are_raised_where_the_caller_waits() -> None:
    class Failing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.shape[0] == 3:
                raise ZeroDivisionError("three rows")
            return self.third(self.second(x))

    model = attach_exits(Failing(), ["first"], example=VECTORS, classes=3, method="thread")
    run = model.exits(VECTORS[:3])
    next(run)
    with pytest.raises(ZeroDivisionError, match="three rows"):
        next(run)
    assert not names_of_threads()


def test_a_module_that_takes_another_path_is_detected() -> None:
    class Fickle(Body):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if x.shape[0] == 1:
                return self.third(y)
            return self.third(self.second(y) if x.shape[0] != 3 else self.second(self.first(y)))

    model = attach_exits(Fickle(), ["first", "second"], example=VECTORS, classes=3, method="thread")
    with pytest.raises(StateError, match="1 of 2 exits"):
        list(model.exits(VECTORS[:1]))
    with pytest.raises(StateError, match="ran more often or in another order"):
        list(model.exits(VECTORS[:3]))


@METHODS
def test_the_callers_modes_apply_inside(method: Any) -> None:
    model = attach_exits(InPlace(), ["first"], example=VECTORS, classes=3, method=method)
    with torch.no_grad():
        assert not any(logits.requires_grad for logits in model.exits(VECTORS))
    with torch.inference_mode():
        assert all(logits.is_inference() for logits in model.exits(VECTORS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [logits.dtype for logits in model.exits(VECTORS)] == [torch.bfloat16] * 2
    assert all(logits.requires_grad for logits in model.exits(VECTORS))


@METHODS
def test_heads_that_were_made_inside_autocast_work_outside(method: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = attach_exits(InPlace(), ["first"], example=VECTORS, classes=3, method=method)
        assert [logits.dtype for logits in model.exits(VECTORS)] == [torch.bfloat16] * 2
    assert {parameter.dtype for parameter in model.heads.parameters()} == {torch.float32}
    assert [logits.dtype for logits in model.exits(VECTORS)] == [torch.float32] * 2


# Frozen.


@METHODS
def test_a_frozen_module_does_not_learn_and_its_statistics_stay(method: str) -> None:
    model = attached(method, frozen=True).train()
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    logits = model(IMAGES)
    assert not list(model.exits(IMAGES))[-1].requires_grad
    logits.square().sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.backbone.state_dict().items())
    assert all(p.grad is None for p in model.backbone.parameters())
    assert all(p.grad is not None for p in model.heads.parameters())
    assert not any(part.training for part in model.backbone.modules() if isinstance(part, nn.BatchNorm2d))
    assert model.backbone.blocks.training


def test_statistics_of_a_frozen_module_move_on_request() -> None:
    model = attached(frozen=True, statistics="moving").train()
    before = model.backbone.blocks[0].norm1.running_mean.clone()
    model(IMAGES)
    assert not torch.equal(before, model.backbone.blocks[0].norm1.running_mean)
    assert not any(p.requires_grad for p in model.backbone.parameters())


def test_attaching_leaves_modes_and_statistics_alone() -> None:
    body = resnet().train()
    body.blocks[1].eval()
    before = {name: value.clone() for name, value in body.state_dict().items()}
    modes = [part.training for part in body.modules()]
    attach_exits(body, PLACES, example=IMAGES, classes=5)
    assert all(torch.equal(before[name], value) for name, value in body.state_dict().items())
    assert modes == [part.training for part in body.modules()]
    assert not attach_exits(body.eval(), PLACES, example=IMAGES, classes=5).training


def test_modes_that_cannot_be_traced_are_run_in_a_thread() -> None:
    class Moody(Body):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.third(x * 2 if self.body.training != self.training and x.sum() > 0 else x)

    body = Moody()
    body.body = nn.Sequential(nn.Linear(6, 6))
    model = attach_exits(nn.Sequential(body), ["0.first"], example=VECTORS, classes=3)
    assert model.method == "trace"
    body.eval().body.train()
    for points in (VECTORS, -VECTORS, VECTORS + 9, VECTORS - 9):
        torch.testing.assert_close(model(points)[-1], model.backbone(points))


# Places.


def test_fractions_select_the_nearest_block() -> None:
    model = attached(at=[0.5, 0.25])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        spent = {}
        for name, block in model.backbone.blocks.named_children():
            block.register_forward_hook(lambda *_, name=name: spent.update({f"blocks.{name}": counter.get_total_flops()}))
        model.backbone(IMAGES[:2])
        total = counter.get_total_flops()
    wanted = tuple(min(spent, key=lambda name, share=share: abs(spent[name] / total - share)) for share in (0.25, 0.5))
    assert model.exit_names == wanted
    assert model.exit_fractions == pytest.approx([spent[name] / total for name in wanted])


def test_each_fraction_gets_a_place_of_its_own() -> None:
    body = nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.warns(AttachWarning, match="requested at 0.6 of the MACs is at 0.98"):
        model = attach_exits(body, [0.6, 0.5], example=VECTORS)
    assert model.exit_names == ("1", "3")


def test_inputs_may_be_spread_out_or_one_dict() -> None:
    class Reads(nn.Module):
        """Takes a dict in its only argument."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.last(self.first(batch["left"] + 2 * batch["right"]).relu())  # type: ignore[no-any-return]

    x = {"left": VECTORS, "right": VECTORS + 1}
    body = Reads()
    model = attach_exits(body, ["first"], example={**x, "labels": torch.zeros(len(VECTORS))}).eval()
    assert model.input_names == ("left", "right")
    assert model.staged
    assert torch.equal(model(x)[-1], body(x))
    assert torch.equal(model(**x), model(x))
    assert torch.equal(model(x["left"], x["right"]), model(x))


def test_among_layers_that_cost_nothing_the_last_is_chosen() -> None:
    body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    assert attach_exits(body, [0.4], example=VECTORS, classes=3).exit_names == ("2",)


def test_exits_are_ordered_as_they_are_passed() -> None:
    assert attached(at=["blocks.3", "stem", 0.99]).exit_names == ("stem", "blocks.3", "pool")


def test_a_place_around_another_comes_after_it() -> None:
    model = attached(at=["blocks", "blocks.5.conv2", "stem.0"])
    assert model.exit_names == ("stem.0", "blocks.5.conv2", "blocks")
    check_model(model, IMAGES, classes=5)


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.named, self.last = nn.Linear(6, 6), nn.Linear(6, 6), Named(), nn.Linear(6, 3)
        self.turned = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.turned(x.T)
        return self.last(self.named(self.twice(self.twice(x)))["x"])


@pytest.mark.parametrize(
    ("at", "error", "message"),
    [
        (["tvice"], OptionError, "did you mean 'twice'"),
        ([""], OptionError, "no submodule ''"),
        (["zzz"], OptionError, "named_modules"),
        (["twice"], OptionError, "runs 2 times"),
        (["never"], OptionError, "never runs"),
        (["named"], ShapeError, "returns a dict"),
        (["twice#3"], OptionError, "name one of its calls, 'twice#1' to '#2'"),
        (["twice#0"], OptionError, "runs 2 times"),
        (["turned"], ShapeError, "batch as its first"),
        (["last", "last"], OptionError, "same place"),
        ([0.0], OptionError, "above 0 and below 1"),
        ([1.0], OptionError, "above 0 and below 1"),
        ([1], OptionError, "above 0 and below 1"),
        ([True], OptionError, "above 0 and below 1"),
        ([float("nan")], OptionError, "above 0 and below 1"),
        ([None], OptionError, "above 0 and below 1"),
        ("last", OptionError, "a list of names"),
        (0.5, OptionError, "a list of names"),
    ],
)
def test_a_wrong_place_is_named(at: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attach_exits(Odd(), at, example=VECTORS, classes=3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": 4}, ShapeError, r"module returns \(2, 5\)"),
        ({"example": IMAGES[0, 0, 0]}, ShapeError, "example has shape"),
        ({"head": lambda shape: None}, OptionError, "NoneType"),
        ({"head": lambda shape: nn.Flatten()}, ShapeError, "head at 'stem' returns"),
        ({"method": "magic"}, OptionError, "method is 'magic'"),
        ({"statistics": "none"}, OptionError, "statistics"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attach_exits(resnet(), **{"at": ["stem"], "example": IMAGES, "classes": 5, **options})


def test_an_output_that_is_not_a_tensor_is_refused() -> None:
    class Pair(Body):
        def forward(self, x: Tensor) -> Any:
            return self.third(self.first(x)), x

    with pytest.raises(ShapeError, match="returns a tuple"):
        attach_exits(Pair(), ["first"], example=VECTORS, classes=3)


# Heads.


@pytest.mark.parametrize("shape", [(6, 8, 8), (6, 4, 4), (6, 2, 2), (6, 7, 3), (9, 5), (7,)])
def test_pooled_heads_fit_maps_tokens_and_vectors(shape: tuple[int, ...]) -> None:
    assert PooledHead(shape, 3)(torch.randn(2, *shape)).shape == (2, 3)


def test_features_of_another_rank_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(1, 2, 3, 4\)"):
        pooling((1, 2, 3, 4))


@pytest.mark.parametrize("mix", [0.0, 0.25, 1.0])
def test_mixed_pooling_is_a_mix_of_max_and_mean(mix: float) -> None:
    pool, x = MixedPool(), torch.randn(2, 3, 8, 8)
    assert 0 <= pool.mix.item() <= 1
    with torch.no_grad():
        pool.mix.fill_(mix)
    assert torch.allclose(pool(x), mix * F.max_pool2d(x, 2) + (1 - mix) * F.avg_pool2d(x, 2))


def test_a_custom_head_is_given_the_shape() -> None:
    shapes = []

    def head(shape: tuple[int, ...]) -> nn.Module:
        shapes.append(shape)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(shape[0], 5))

    model = attached(at=["stem", "blocks.5"], head=head)
    assert shapes == [(4, 16, 16), (16, 4, 4)]
    assert model(IMAGES).shape == (3, 4, 5)


@pytest.mark.parametrize("frozen", [False, True])
def test_exits_learn_the_digits(frozen: bool) -> None:
    digits = load_digits()
    torch.manual_seed(0)
    body = CifarResNet(classes=10, depth=8, width=8, channels=1)
    recipe = TrainConfig(epochs=6, batch=64, lr=0.05, schedule="cosine", warmup=1, augment=False)
    if frozen:
        fit(attach_exits(body, [], example=torch.zeros(2, 1, 8, 8), classes=10), digits["train"], recipe)
        weights = {name: value.clone() for name, value in body.state_dict().items()}
    model = attach_exits(body, ["blocks.0", "blocks.1"], example=torch.zeros(2, 1, 8, 8), classes=10, frozen=frozen)
    fit(model, digits["train"], recipe)
    assert min(ExitEvaluation(model, digits["test"]).accuracy()) > 0.85  # chance is 0.1
    if frozen:
        moved = [n for n, value in body.state_dict().items() if not torch.equal(weights[n], value) and "tracked" not in n]
        assert not moved


class ProductBetween(Body):
    """A matrix product outside of all layers, and layers called with keyword arguments."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(input=self.first(x))
        return self.third(x @ self.scale.expand(6, 6))


def test_costs_are_the_same_for_both_methods() -> None:
    rows = torch.randn(2, 6)
    costs = [
        measure_cost(attach_exits(ProductBetween(), ["first", "second"], example=rows, classes=3, method=method), rows)
        for method in ("trace", "thread")
    ]
    layer, head = 6 * 6 + 6, 6 * 3 + 3
    assert costs[0].macs == (layer + head, 2 * (layer + head), 2 * (layer + head) + 36 + head)
    assert costs[1] == costs[0]


def test_a_module_that_branches_on_values_has_costs() -> None:
    rows = torch.randn(2, 6)
    plain = attach_exits(InPlace(), ["first"], example=rows, classes=3)
    assert measure_cost(attach_exits(Branching(), ["first"], example=rows, classes=3), rows) == measure_cost(plain, rows)


def test_a_flop_counter_of_the_caller_counts_what_runs_in_the_thread() -> None:
    totals = []
    for model in (attached("trace"), attached("thread")):
        with FlopCounterMode(display=False) as counter:
            list(model.exits(IMAGES))
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_refused_module_is_not_changed() -> None:
    module = resnet()
    with pytest.raises(ShapeError, match="classes"):
        attach_exits(module, ["blocks.0"], example=IMAGES, classes=7, frozen=True)
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("change", "word"), [({"at": None}, "at is None"), ({"example": [1.0]}, "example"), ({"module": None}, "module")]
)
def test_arguments_of_another_kind_are_named(change: dict[str, Any], word: str) -> None:
    given = {"module": resnet(), "at": ["blocks.0"], "example": IMAGES, "classes": 5, **change}
    with pytest.raises((OptionError, DtypeError), match=word):
        attach_exits(**given)
