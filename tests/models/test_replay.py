"""Exits on modules that cannot be traced, by replaying their forward: what stages are given, and what they give."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime import Budget, Runner
from anytime.checks import tensors_of
from anytime.errors import AttachWarning, InputError, ShapeError, StateError
from anytime.models import AttachedExits, attach_exits, measure_cost
from anytime.models.attach.heads import TokenPool
from anytime.run.engines.onnx import Stage, onnx_bytes, stage_free_sizes
from anytime.run.export import export
from anytime.testing import check_model

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None, turn: Tensor | None = None) -> tuple[Tensor]:
        q, k, v = self.query(x if turn is None else x * turn).chunk(3, dim=-1)
        scores = q @ k.mT / WIDTH**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, torch.finfo(x.dtype).min)
        x = x + scores.softmax(-1) @ v
        return (x + self.dropout(self.mlp(x)),)


class Rotary(nn.Module):
    """Returns a tensor without rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None] ** -0.5


class Decoderlike(nn.Module):
    """A stem, a list of blocks and an end, in a forward that looks at its inputs."""

    def __init__(self, *, turns: bool = False, skips: bool = False, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.last = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.rotary = Rotary() if turns else None
        self.skips = skips

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = first = self.norm(self.words(input_ids))
        turn = None if self.rotary is None else self.rotary(x)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if input_ids.shape[1] > 99:
            raise ValueError("too long")
        for number, block in enumerate(self.blocks):
            (x,) = block(x, attention_mask, turn)
            if self.skips and number == 2:
                x = x + first
        weight = (attention_mask / attention_mask.sum(1, keepdim=True))[..., None].to(x.dtype)
        return self.last((x * weight).sum(1))


def tokens(rows: int = 4, length: int = 9) -> Tensor:
    return torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(rows: int = 4, length: int = 9) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length - 3 :] = 0
    return {"input_ids": tokens(rows, length), "attention_mask": mask}


def attached(
    module: nn.Module | None = None, x: Any = None, at: Any = ("blocks.0", "blocks.2"), **options: Any
) -> AttachedExits:
    model = attach_exits(module or Decoderlike(), list(at), example=tokens() if x is None else x, **options).eval()
    assert model.method == "replay", model.why
    return model


KINDS = {
    "plain": Decoderlike,
    "rotary": lambda: Decoderlike(turns=True),
    "skip connection": lambda: Decoderlike(skips=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [tokens(), padded(), tuple(padded().values())], ids=["tensor", "dict", "tuple"])
def test_stages_give_what_the_module_gives_to_any_rows(kind: str, x: Any) -> None:
    model = attached(KINDS[kind](), x)
    with torch.no_grad():
        alone = (
            model.backbone(**x) if isinstance(x, dict) else model.backbone(*x) if isinstance(x, tuple) else model.backbone(x)
        )
        logits = model(x)
        torch.testing.assert_close(logits[-1], alone)
        carry = tensors_of(x, model.input_names)
        for exit, rows in enumerate(([0, 2, 3], [2, 1], [0])):
            left, given = model.stage(exit, carry)
            torch.testing.assert_close(given, logits[exit, [[0, 1, 2, 3], [0, 2, 3], [3, 2]][exit]])
            carry = tuple(tensor[rows] for tensor in left)
    if isinstance(x, Tensor):
        check_model(model, x, classes=3)


@pytest.mark.parametrize(("kind", "carried"), [("plain", [1, 2, 2]), ("rotary", [1, 2, 2]), ("skip connection", [1, 3, 2])])
def test_what_a_later_stage_reads_is_carried_or_computed_again(kind: str, carried: list[int]) -> None:
    """A skip connection over an exit is carried as long as it is read; a tensor without rows is computed again."""
    model = attached(KINDS[kind]())
    sizes = [model.carry_size(exit) for exit in range(3)]
    assert sizes[:2] == carried[:2]
    ran: list[str] = []
    for name in ("words", "norm", *(["rotary"] if kind == "rotary" else [])):
        model.backbone.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    model(tokens())
    assert ran.count("words") == ran.count("norm") == 1
    assert ran.count("rotary") == (3 if kind == "rotary" else 0)


@torch.no_grad()
def test_every_block_runs_once_with_its_hooks_and_none_after_a_stop() -> None:
    model, ran = attached(), []
    for number, block in enumerate(model.backbone.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    run = model.exits(tokens())
    next(run)
    assert ran == [0]
    next(run)
    assert ran == [0, 1, 2]
    next(run)
    assert ran == [0, 1, 2, 3]


@torch.no_grad()
def test_other_lengths_and_batch_sizes_than_the_examples() -> None:
    model = attached(Decoderlike(turns=True), padded(4, 9))
    for rows, length in ((1, 4), (5, 9), (3, 14)):
        x = padded(rows, length)
        torch.testing.assert_close(model(x)[-1], model.backbone(**x))
    assert model.free_sizes(0) == ({1: "length"}, {1: "length"})
    assert model.free_sizes(1) == ({1: "length"},) * 3


def test_images_keep_the_size_of_the_example_and_are_not_carried() -> None:
    class Images(Decoderlike):
        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x.flatten(2).mT)
            for block in self.blocks:
                (x,) = block(x)
            return self.last(x.mean(1) if x.shape[1] < 99 else x[:, 0])

    images = torch.randn(3, WIDTH, 4, 4, generator=torch.Generator().manual_seed(0))
    model = attached(Images(), images)
    check_model(model.requires_grad_(False), images)
    assert [model.carry_size(exit) for exit in range(3)] == [1, 1, 1]
    with pytest.raises(ShapeError, match=r"expected: the example's shapes, \(8, 4, 4\)"):
        model(torch.randn(3, WIDTH, 5, 5))


@torch.no_grad()
def test_adding_padding_moves_no_exit() -> None:
    model, x = attached(Decoderlike(turns=True), padded()), padded()
    wide = {name: nn.functional.pad(tensor, (0, 6)) for name, tensor in x.items()}
    torch.testing.assert_close(model(wide), model(x), rtol=1e-4, atol=1e-5)


# A call of a part that runs several times.


class Shared(Decoderlike):
    """One block, three times."""

    times = 3

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.words(input_ids))
        for _ in range(self.times if input_ids.shape[1] < 99 else 1):
            (x,) = self.blocks[0](x)
        return self.last(x.mean(1))


@pytest.mark.parametrize("method", ["replay", "thread"])
@torch.no_grad()
def test_exits_after_single_calls_of_a_shared_block(method: Any) -> None:
    module = Shared().eval()
    model = attach_exits(module, ["blocks.0#1", "blocks.0#2"], example=tokens(), method=method).eval()
    assert model.exit_names == ("blocks.0#1", "blocks.0#2")
    x, read = module.norm(module.words(tokens())), []
    for _ in range(2):
        (x,) = module.blocks[0](x)
        read.append(x)
    logits = model(tokens())
    for head, features, given in zip(model.heads, read, logits, strict=False):
        torch.testing.assert_close(given, head(features))
    torch.testing.assert_close(logits[-1], module(tokens()))


def test_fractions_select_a_call_of_a_shared_block() -> None:
    model = attached(Shared(), at=[0.34, 0.67])
    assert model.exit_names == ("blocks.0#1", "blocks.0#2")
    macs = measure_cost(model, tokens()).stage_macs
    assert macs[0] == pytest.approx(macs[1], rel=0.1)


def test_another_number_of_calls_is_detected() -> None:
    model = attached(Shared(), at=["blocks.0#2"])
    model.stage(0, (tokens(),))
    model.backbone.times = 1
    with pytest.raises(StateError, match=r"did not pass 'blocks\.0'"):
        model.stage(0, (tokens(),))


# Copies, threads, training.


@torch.no_grad()
def test_copies_and_pickles_are_independent() -> None:
    model = attached(Decoderlike(turns=True))
    wanted = model(tokens())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(tokens()), wanted)
        other.backbone.blocks[3].mlp[2].weight.zero_()
        assert not torch.equal(other(tokens())[-1], wanted[-1])
        torch.testing.assert_close(other(tokens())[:2], wanted[:2])
        torch.testing.assert_close(model(tokens()), wanted)


@torch.no_grad()
def test_threads_do_not_interfere() -> None:
    model, wrong = attached(Decoderlike(skips=True)), []
    batches = [torch.randint(20, (rows, 5 + rows)) for rows in (1, 2, 3)]
    wanted = [model.backbone(batch) for batch in batches]

    def use(index: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                runs = list(zip(model.exits(batches[index]), model.exits(batches[index]), strict=True))
                if not all(torch.allclose(last, wanted[index], atol=1e-5) for last in runs[-1]):
                    wrong.append(index)
                if not torch.allclose(model.backbone(batches[index]), wanted[index], atol=1e-5):
                    wrong.append(index)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [True, False])
def test_gradients_are_those_of_the_module(kind: str, train: bool) -> None:
    model, alone = attached(KINDS[kind]()).train(train), KINDS[kind]().train(train)
    assert model.staged
    torch.manual_seed(3)
    model(tokens())[-1].square().sum().backward()
    torch.manual_seed(3)
    alone(tokens()).square().sum().backward()
    for one, other in zip(model.backbone.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    model.zero_grad()
    sum(logits.sum() for logits in model.exits(tokens())).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_heads_on_a_frozen_module_learn_and_the_module_does_not() -> None:
    model = attached(frozen=True).train()
    model(tokens()).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.heads.parameters())
    assert all(parameter.grad is None for parameter in model.backbone.parameters())


def test_a_part_that_runs_again_with_dropout_is_not_replayed_in_training() -> None:
    class Noisy(Rotary):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

    module = Decoderlike(turns=True)
    module.rotary = Noisy()
    model = attached(module)
    assert model.staged
    assert not model.train().staged
    assert model(tokens()).isfinite().all()


@torch.no_grad()
def test_a_path_that_rounding_would_hide_is_found() -> None:
    """The skip connection is scaled by 1e-12: blank tensors hold NaN while the stages are checked."""

    class Tiny(Decoderlike):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = first = self.norm(self.words(input_ids))
            for block in self.blocks:
                (x,) = block(x, torch.ones_like(input_ids) if input_ids.shape[1] > 0 else None)
            return self.last((x + self.scale * first).mean(1))

    module = Tiny()
    module.register_buffer("scale", torch.tensor(1e-12))
    model = attached(module)
    module.scale.fill_(1.0)
    torch.testing.assert_close(model(tokens())[-1], module(tokens()))


# Engines and precision.


@torch.no_grad()
def test_every_stage_can_be_exported_with_several_inputs_and_any_length() -> None:
    model, x = attached(Decoderlike(turns=True, layers=3), padded(), at=["blocks.1"]), padded(2)
    carry = tuple(x.values())
    for exit in range(model.num_exits):
        left, _ = model.stage(exit, carry)
        inputs, outputs = [f"carry_{place}" for place in range(len(carry))], [f"left_{place}" for place in range(len(left))]
        free = stage_free_sizes(model, exit, inputs, outputs)
        assert onnx_bytes(Stage(model, exit), carry, inputs=inputs, outputs=[*outputs, "logits"], free=free)  # checks itself
        batch = torch.export.Dim("batch", min=1)
        sizes = (tuple({0: batch, **dict.fromkeys(more, torch.export.Dim.DYNAMIC)} for more in model.free_sizes(exit)),)
        program = torch.export.export(Stage(model, exit), carry, dynamic_shapes=sizes, strict=False)
        for given, wanted in zip(program.module()(*carry), (*left, model.stage(exit, carry)[1]), strict=True):
            torch.testing.assert_close(given, wanted)
        carry = left


def test_a_budget_of_macs_selects_the_exit() -> None:
    model = attached()
    macs = measure_cost(model, tokens()).macs
    with Runner(model, macs=macs, engine="onnxruntime", example=tokens()) as runner:
        exits = [runner.predict(tokens(1), budget=Budget(macs=cost)).exit for cost in macs]
    assert exits == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_modules_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    module = Decoderlike(turns=True).to(dtype)
    model = attached(module, padded())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model(padded())[-1], module.eval()(**padded()))
    export(model, tmp_path / "stages", rule="latest", example=padded())  # in float32
    with Runner.load(tmp_path / "stages") as runner, Runner(model.float(), "latest") as own:
        torch.testing.assert_close(runner.predict(padded()).probs, own.predict(padded()).probs, atol=1e-4, rtol=1e-4)


def test_integers_in_place_of_images_are_named() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    with pytest.raises(InputError, match=r"the example, which is uint8[\s\S]*example.float\(\) / 255"):
        attach_exits(body, ["0"], example=torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


def test_attaching_in_inference_mode_makes_heads_that_learn() -> None:
    module = Decoderlike(turns=True)
    with torch.inference_mode():
        model = attached(module)
    model(tokens()).sum().backward()


def test_the_reason_names_where_tracing_stopped() -> None:
    model = attached()
    assert "test_replay.py" in model.why
    assert "if input_ids.shape[1] > 99:" in model.why


def test_only_what_needs_a_warning_is_announced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttachWarning)
        attached(at=[0.25, 0.5, 0.75])
    with pytest.warns(AttachWarning, match=r"requested at 0.1 of the MACs is at 0.25"):
        attached(at=[0.1])


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@torch.no_grad()
def test_tokens_of_a_mask_are_pooled_as_if_there_were_no_others(mix: float) -> None:
    pool, x = TokenPool(), torch.randn(2, 5, 3)
    pool.pool.mix.fill_(mix)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    wanted = torch.cat((pool(x[:1, :3]), pool(x[1:, 1:])))
    x[mask == 0] = torch.nan
    torch.testing.assert_close(pool(x, mask), wanted)
    assert pool(x[:1], torch.zeros(1, 5)).shape == (1, 3)
