"""Exits on modules as people bring them: sequences of channels, recurrent layers, autocast inside, branches on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime import Budget, Runner, load, save
from anytime.errors import AttachWarning, NonFiniteError, OptionError, StateError
from anytime.models import attach_cascade, attach_exits, measure_cost
from anytime.models.attach.heads import MixedPool, PooledHead

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Blocks(nn.Module):
    """A stem, three blocks and an end; subclasses have another forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Skips(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if x.sum() > 0:
                x = block(x)
        return self.last(x)


def skips() -> Skips:
    """Runs all blocks for positive inputs, and none for negative ones."""
    network = Skips()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(weight.abs() if weight.ndim > 1 else torch.zeros_like(weight))
    return network


class ChoosesRows(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.where(x.sum(1, keepdim=True) > 0, block(x), x)
        return self.last(x)


class Autocasts(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Recurrent(nn.Module):
    """Layers whose output is a tuple with a state, `(layers, batch, width)`."""

    def __init__(self, *, kind: Any = nn.LSTM, passes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last = nn.ModuleList(kind(8, 8, batch_first=True) for _ in range(3)), nn.Linear(8, 3)
        self.passes = passes

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state if self.passes else None)
        return self.last(x[:, -1])


def same_everywhere(model: Any, x: Any, engines: tuple[str, ...] = ("eager", "folded", "onnxruntime")) -> None:
    """Every engine gives what the exits give, for all rows and for one."""
    with torch.no_grad():
        logits = model(x)
    for engine in engines:
        with Runner(model, "latest", engine=engine, example=x) as runner:
            for exit in range(model.num_exits):
                for rows in (len(x), 1):
                    answer = runner.predict(x[:rows], budget=Budget(exits=exit + 1))
                    torch.testing.assert_close(answer.probs, logits[exit, :rows].softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(14, 14), (7, 7), (6, 9), (3, 30)])
def test_windows_of_unequal_sizes_are_those_of_adaptive_pooling(size: tuple[int, int]) -> None:
    pool, x = MixedPool(), torch.randn(2, 3, *size)
    to = min(4, size[0]), min(4, size[1])
    wanted = pool.mix * F.adaptive_max_pool2d(x, to) + (1 - pool.mix) * F.adaptive_avg_pool2d(x, to)
    torch.testing.assert_close(pool(x), wanted)


def test_exits_on_maps_of_fourteen_and_seven_pixels_run_in_onnx() -> None:
    first, second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
    network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(3, 3, 28, 28)
    same_everywhere(attach_exits(network, at=["1", "3"], example=x).eval(), x)


@pytest.mark.parametrize("end", ["0", "1", "2"])
def test_heads_on_one_dimensional_convolutions_pool_over_the_length(end: str) -> None:
    layers = nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3)
    x = torch.randn(4, 2, 20)
    model = attach_exits(nn.Sequential(*layers), at=[end], example=x).eval()
    head = model.heads[0]
    assert isinstance(head, PooledHead)
    assert head.linear.in_features == 6
    features = torch.randn(4, 6, 18)
    torch.testing.assert_close(head(features), head(features[..., torch.randperm(18)]))
    same_everywhere(model, x)
    cascade = attach_cascade(nn.Sequential(*layers), at=[end], example=x, classes=3).eval()
    torch.testing.assert_close(cascade.heads[0](features), cascade.heads[0](features[..., torch.randperm(18)]))
    same_everywhere(cascade, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_state_that_nobody_reads_is_not_carried(kind: Any) -> None:
    x = torch.randn(4, 6, 8)
    model = attach_exits(Recurrent(kind=kind), at=[0.33, 0.67], example=x).eval()
    assert (model.method, model.exit_names) == ("replay", ("layers.0", "layers.1"))
    assert [model.carry_size(exit) for exit in range(3)] == [1, 1, 1]
    assert [round(fraction, 1) for fraction in model.exit_fractions] == [0.3, 0.7]
    assert measure_cost(model, x).macs[1] < measure_cost(model, x).macs[2]
    same_everywhere(model, x)


def test_a_state_that_the_next_layer_reads_keeps_the_module_in_a_thread() -> None:
    x = torch.randn(4, 6, 8)
    with pytest.warns(match="runs in a thread"):
        model = attach_exits(Recurrent(passes=True), at=["layers.0", "layers.1"], example=x).eval()
    same_everywhere(model, x, engines=("eager",))


def test_a_branch_on_values_is_not_fixed_in_an_onnx_file() -> None:
    x = X.abs()
    model = attach_exits(skips(), at=["blocks.0"], example=x).eval()
    with pytest.raises(OptionError, match=r"test_unusual_modules.py:\d+: `if x.sum\(\) > 0:`.*values of the inputs"):
        Runner(model, engine="onnxruntime", example=x)
    with Runner(model, engine="auto", example=x) as runner:
        assert "onnxruntime is left out" in str(runner)
        with pytest.raises(StateError, match=r"did not pass 'blocks\.0'"):
            runner.predict(-x)


def test_a_failed_export_prints_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from anytime.run.export import export

    model = attach_exits(skips(), at=["blocks.0"], example=X.abs()).eval()
    for format in ("onnx", "torch-export"):
        with pytest.raises(OptionError, match=r"torch\.where"):
            export(model, tmp_path / format, rule="latest", example=X.abs(), format=format)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")


def test_booleans_between_stages_are_carried_by_every_engine() -> None:
    same_everywhere(attach_exits(ChoosesRows(), at=["blocks.0", "blocks.1"], example=X).eval(), X)


def test_heads_of_a_module_with_autocast_inside_have_its_own_dtype() -> None:
    model = attach_exits(Autocasts(), at=["blocks.0"], example=X).eval()
    assert {weight.dtype for weight in model.heads.parameters()} == {torch.float32}
    assert torch.equal(model(X)[-1], model.backbone(X))
    same_everywhere(model, X, engines=("eager", "folded"))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.dropout(self.first(x).relu()))


class NamedBlocks(nn.Module):
    """Blocks that are attributes, not members of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.layer1, self.layer2, self.layer3 = Residual(), Residual(), Residual()

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.last(self.layer3(self.layer2(self.layer1(self.stem(x))))), "features": x}


def test_fractions_select_ends_of_blocks_that_are_attributes() -> None:
    model = attach_exits(NamedBlocks(), at=[0.4, 0.6], example=X)
    assert (model.exit_names, model.method) == (("layer1", "layer2"), "trace")
    assert "3 exits: layer1 (0.37), layer2 (0.67), the end; method='trace'" in repr(model)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(16, 16), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Pair(nn.Module):
    """Two parts of one type, and a sum around them."""

    def __init__(self, part: Callable[[], nn.Module], *, sums: bool = False) -> None:
        super().__init__()
        self.b1, self.b2, self.sums = part(), part(), sums

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b2(self.b1(x)) if self.sums else self.b2(self.b1(x))


def test_fractions_select_blocks_of_stages_and_not_parts_of_blocks() -> None:
    def block() -> nn.Module:
        return Pair(Activated, sums=True)

    network: Any = NamedBlocks()
    network.layer1, network.layer2, network.layer3 = Pair(block), Pair(block), Pair(block)
    model = attach_exits(network, at=[0.2, 0.35, 0.5, 0.7], example=X)
    assert model.exit_names == ("layer1.b1", "layer1.b2", "layer2.b1", "layer2.b2")


@pytest.mark.parametrize("method", ["trace", "replay", "thread"])
def test_a_dict_with_logits_is_an_output(method: Any) -> None:
    network = NamedBlocks().eval()
    model = attach_exits(network, at=["layer1"], example=X, method=method).eval()
    assert torch.equal(model(X)[-1], network(X)["logits"])
    same_everywhere(model, X, engines=("eager",))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda module: torch.compile(module, backend="eager")])
def test_exits_are_attached_inside_of_a_wrapper(wrap: Any, tmp_path: Any) -> None:
    network = Blocks().eval()
    with pytest.warns(AttachWarning, match="attached to the Blocks inside of the"):
        model = attach_exits(wrap(network), at=["blocks.0"], example=X).eval()
    assert model.backbone is network
    assert model.exit_names == ("blocks.0",)
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", build=lambda: wrap(Blocks()))(X), model(X))


class NeedsEnd(Blocks):
    """Token ids, one of which must be the end of the sequence, 2, as for BART and T5."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not (x == 2).any():
            raise ValueError("a sequence without an end")
        return super().forward(self.words(x).mean(1))


def test_a_model_that_needs_an_end_token_is_loaded(tmp_path: Any) -> None:
    ids = torch.tensor([[5, 9, 2, 0], [7, 8, 9, 2]])
    model = attach_exits(NeedsEnd(), at=["blocks.0"], example=ids).eval()
    assert model.input_specs[0].fill == 2
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", build=NeedsEnd)(ids), model(ids))


class LongSkip(Blocks):
    """Adds the output of the first block again before the last one, for more than twenty tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = first = self.blocks[0](self.stem(self.words(ids)))
        x = self.blocks[1](x)
        x = self.blocks[2](x + first if ids.shape[1] > 20 else x)
        return self.last((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize(("length", "carried"), [(8, 3), (40, 4)])
def test_what_only_long_sequences_read_is_carried(length: int, carried: int) -> None:
    ids, mask = torch.randint(20, (3, length)), torch.ones(3, length, dtype=torch.int64)
    network = LongSkip().eval()
    model = attach_exits(network, at=["blocks.0", "blocks.1"], example=(ids, mask)).eval()
    assert (model.method, model.carry_size(2)) == ("replay", carried)
    assert torch.equal(model(ids, mask)[-1], network(ids, mask))


def test_a_longer_sequence_that_reads_what_was_not_carried_is_an_error_and_not_an_answer() -> None:
    ids, mask = torch.randint(20, (3, 40)), torch.ones(3, 40, dtype=torch.int64)
    model = attach_exits(LongSkip(), at=["blocks.0", "blocks.1"], example=(ids[:, :8], mask[:, :8])).eval()
    with Runner(model) as runner, pytest.raises(NonFiniteError, match="exit 3"):
        runner.predict((ids, mask))


class Gated(Blocks):
    """What the blocks get depends on the size of the stem's output, by a branch or by a choice of values."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        nn.init.zeros_(self.stem.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        large = x.abs().mean() > 0.3
        for block in self.blocks:
            x = block(-x if large else x) if self.branches else block(torch.where(large, -x, x))
        return self.last(x)


@pytest.mark.parametrize("branches", [True, False])
def test_a_comparison_that_is_false_for_the_example_is_right_for_other_inputs(branches: bool) -> None:
    network = Gated(branches=branches).eval()
    model = attach_exits(network, at=["blocks.0", "blocks.1"], example=X / 1000, method="replay").eval()
    for factor in (10, 0.001):
        assert torch.equal(model(X * factor)[-1], network(X * factor))
    assert model.carry_size(2) == 2  # with the stem's output, which is compared in every stage
