"""Training on a caller's own data: any loader, any structure of inputs, any module with exits."""

from __future__ import annotations

import copy
import csv
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from anytime.data import ImageData, normalise
from anytime.models import MLP, AttachedExits, MLPConfig, MultiExit, attach_exits
from anytime.train import DivergedError, FitOptions, Hardware, TrainConfig, exit_accuracy, fit, joint_cross_entropy
from anytime.train.loop import Progress
from anytime.train.options import Settings

Pair = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def rows(digits: dict[str, ImageData]) -> dict[str, Pair]:
    return {name: (normalise(part.images, part.mean, part.std), part.labels) for name, part in digits.items()}


def backbone() -> nn.Sequential:
    """A small network with batch norms, as a user writes it."""

    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())

    return nn.Sequential(block(1, 8), block(8, 8), nn.MaxPool2d(2), block(8, 16), nn.Flatten(), nn.Linear(256, 10))


def attached(rows: dict[str, Pair], *, frozen: bool = False) -> AttachedExits:
    torch.manual_seed(0)
    return attach_exits(backbone(), at=["0", "1"], example=rows["train"][0][:2], frozen=frozen)


class Stream(IterableDataset[Any]):
    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.pair, strict=True))


class PerEpoch:
    """Iterable once per epoch, and nothing else."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*(part.split(64) for part in self.pair), strict=True))


class Dicts(Dataset[Any]):
    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"pixel_values": self.pair[0][row], "label": int(self.pair[1][row])}


KINDS: dict[str, tuple[Callable[[Pair], Any], dict[str, Any]]] = {
    "a loader": (lambda pair: DataLoader(TensorDataset(*pair), 64, shuffle=True), {}),
    "a data set": (lambda pair: TensorDataset(*pair), {}),
    "tensors": (lambda pair: pair, {}),
    "arrays": (lambda pair: tuple(part.numpy() for part in pair), {}),
    "batches": (lambda pair: list(PerEpoch(pair)), {}),
    "samples": (lambda pair: list(Stream(pair)), {}),
    "dicts": (lambda pair: Dicts(pair), {}),
    "a stream": (lambda pair: DataLoader(Stream(pair), 64), {"steps_per_epoch": 19}),
    "an iterable": (PerEpoch, {"steps_per_epoch": 19}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_trains_every_exit(rows: dict[str, Pair], kind: str) -> None:
    make, settings = KINDS[kind]
    outcome = fit(attached(rows), make(rows["train"]), val=make(rows["val"]), epochs=2, lr=5e-3, **settings)
    assert outcome.finished
    assert outcome.steps == 2 * 19 - 2 * (kind in ("a data set", "tensors", "arrays", "samples", "dicts"))
    assert min(outcome.history[-1].val_accuracy or ()) > 0.6  # chance is 0.1


@pytest.mark.parametrize("objective", ["joint", "product", "joint-then-product", "distillation", "sdn"])
def test_every_objective_trains_every_exit_under_its_rule(rows: dict[str, Pair], objective: Any) -> None:
    outcome = fit(attached(rows), rows["train"], val=rows["val"], epochs=4, lr=5e-3, objective=objective)
    assert min(outcome.history[-1].val_accuracy or ()) > 0.7  # chance is 0.1


def test_the_steps_are_those_of_a_plain_loop(rows: dict[str, Pair]) -> None:
    batches = list(PerEpoch(rows["train"]))[:4]
    ours = attached(rows)
    theirs = copy.deepcopy(ours).train()
    config = TrainConfig(epochs=1, lr=1e-3, optimizer="adam", weight_decay=0.0, schedule="step", milestones=(), clip_norm=0.5)
    outcome = fit(ours, batches, config)
    optimizer = torch.optim.Adam(theirs.parameters(), 1e-3)
    losses = torch.zeros(3)
    for x, y in batches:
        terms = joint_cross_entropy(theirs(x), y)
        optimizer.zero_grad()
        terms.sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        losses += terms.detach() / len(batches)
    torch.testing.assert_close(torch.tensor(outcome.history[0].losses), losses, rtol=1e-3, atol=1e-4)
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3, msg=name)


def test_a_frozen_backbone_stays_and_its_heads_learn(rows: dict[str, Pair]) -> None:
    model = attached(rows, frozen=True)
    before = copy.deepcopy(model.state_dict())
    fit(model, rows["train"], epochs=1)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]) == name.startswith("backbone."), name


class TwoPaths(MultiExit):
    """A user's own model with exits on a backbone that the user froze."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Flatten())
        self.norm = nn.BatchNorm1d(288)
        self.heads = nn.ModuleList((nn.Linear(288, 10), nn.Linear(288, 10)))

    def exits(self, x: Any) -> Iterator[Tensor]:
        features = self.body(x)
        yield self.heads[0](features)
        yield self.heads[1](self.norm(features))


def test_norms_of_a_frozen_part_keep_their_statistics_and_others_do_not(rows: dict[str, Pair]) -> None:
    model = TwoPaths()
    model.body.requires_grad_(False)
    fit(model, rows["train"], epochs=1)
    assert float(model.body[1].running_mean.abs().max()) == 0  # type: ignore[union-attr, operator]
    assert float(model.norm.running_mean.abs().max()) > 0  # type: ignore[union-attr]


def test_modes_gradients_and_random_state_are_the_callers_again(rows: dict[str, Pair]) -> None:
    model = attached(rows)
    model.eval()
    model.heads[0].train()
    modes = [module.training for module in model.modules()]
    parameters = list(model.parameters())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with torch.no_grad():
        fit(model, rows["train"], epochs=1, frozen=("backbone",), hold_statistics=True)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_bfloat16_computes_in_bfloat16_and_trains_float32_weights(rows: dict[str, Pair]) -> None:
    model, seen = TwoPaths(), set()
    model.heads[0].register_forward_hook(lambda module, args, output: seen.add((output.dtype, module.training)))
    before = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)  # its bfloat16 kernels need instructions that some machines lack
    try:
        fit(model, tuple(part[:64] for part in rows["train"]), epochs=1, precision="bfloat16")
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert (torch.bfloat16, True) in seen
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_validation_is_that_of_all_logits_at_once(rows: dict[str, Pair]) -> None:
    model = attached(rows)
    outcome = fit(model, rows["train"], val=DataLoader(TensorDataset(*rows["val"]), 77), epochs=1)
    x, y = rows["val"]
    with torch.no_grad():
        assert outcome.history[0].val_accuracy == pytest.approx(exit_accuracy(model.eval()(x), y))


class Words(nn.Module):
    """A text model with inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.layers(self.embed(input_ids))
        logits: Tensor = self.out((tokens * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))
        return logits


@pytest.mark.parametrize("kind", ["dicts", "tuples"])
def test_inputs_of_several_tensors(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 9, (256, 6), generator=generator)
    labels = ids[:, 0] % 3
    ids[:, 1:] = ids[:, :1]
    named = {"input_ids": ids, "attention_mask": torch.ones(256, 6)}
    inputs: Any = named if kind == "dicts" else tuple(named.values())
    model = attach_exits(Words(), at=["layers.1"], example=inputs, method="thread")
    batches: list[Any] = []
    for rows in torch.arange(256).split(32):
        x = {name: tensor[rows] for name, tensor in named.items()}
        batches.append({**x, "labels": labels[rows]} if kind == "dicts" else (*x.values(), labels[rows]))
    outcome = fit(model, batches, val=batches, epochs=5, lr=1e-2)
    assert min(outcome.history[-1].val_accuracy or ()) > 0.9  # chance is 0.33


def run(rows: dict[str, Pair], tiny: ModuleType, folder: Path, **settings: Any) -> tuple[MultiExit, int]:
    """With dropout and a loader that shuffles by torch's random state: the state must come from seed and step alone."""
    torch.manual_seed(0)
    model: MultiExit = tiny.Tiny(dropout=0.2)
    data = DataLoader(TensorDataset(*(part[:320] for part in rows["train"])), 64, shuffle=True)
    return model, fit(model, data, epochs=3, folder=folder, checkpoint_every=1, **settings).step


@pytest.mark.parametrize("after", [2, 5, 8])
def test_an_interrupted_run_resumes_to_the_same_bits(
    rows: dict[str, Pair], tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole, steps = run(rows, tiny, tmp_path / "whole")

    def interrupt(self: Progress, step: int) -> None:
        if step == after:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "show", interrupt)
        assert run(rows, tiny, tmp_path / "parts")[1] == after < steps
    torch.manual_seed(99)
    resumed, _ = run(rows, tiny, tmp_path / "parts", resume=True)
    for (name, mine), other in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name


class PressesCtrlC(Dataset[Any]):
    """While it loads a row, a terminal sends Ctrl-C to this process and to the one that waits for the row."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if row == 40:
            # A forked process has the trainer's handler, which ends after one signal; a spawned one has Python's own.
            for process in (os.getpid(), os.getpid(), os.getppid()):
                os.kill(process, signal.SIGINT)
        return self.pair[0][row], self.pair[1][row]


def test_ctrl_c_stops_with_processes_that_load_data(rows: dict[str, Pair], tmp_path: Path) -> None:
    data = DataLoader(PressesCtrlC(rows["train"]), 16, num_workers=1, multiprocessing_context="fork")
    outcome = fit(attached(rows), data, epochs=1, folder=tmp_path)
    assert outcome.stopped == "Ctrl-C was pressed"
    assert 0 < outcome.step < outcome.steps
    assert (tmp_path / "checkpoint").is_dir()


def test_a_diverged_loss_stops_the_run(rows: dict[str, Pair]) -> None:
    with pytest.raises(DivergedError, match="lower lr"):
        fit(attached(rows), rows["train"], epochs=3, optimizer="sgd", lr=1e12, warmup=0.0)


def test_fabrics_loggers_get_the_loss_and_the_accuracy_of_each_exit(rows: dict[str, Pair], tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning_fabric.loggers")
    pytest.importorskip("tensorboard")
    used = [loggers.CSVLogger(tmp_path, name="csv", version=0), loggers.TensorBoardLogger(tmp_path, name="board", version=0)]
    outcome = fit(attached(rows), rows["train"], val=rows["val"], epochs=2, loggers=used, evaluate_every=2)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss/exit_3"]) for line in lines] == pytest.approx([epoch.losses[2] for epoch in outcome.history])
    assert [bool(line["val_accuracy/exit_1"]) for line in lines] == [False, True]
    assert list((tmp_path / "board" / "version_0").iterdir())
    used[1].finalize("success")


def test_keywords_are_the_fields_of_the_settings() -> None:
    kinds = (TrainConfig, Hardware, FitOptions)
    names = [part.name for kind in kinds for part in fields(kind)]
    assert sorted(get_type_hints(Settings)) == sorted(names)


def test_keywords_change_the_objects(rows: dict[str, Pair], tmp_path: Path) -> None:
    recipe, lines = TrainConfig(epochs=5, lr=1e-3, optimizer="adam", schedule="step"), []
    options = FitOptions(on_epoch=lines.append)
    fit(attached(rows), rows["train"], recipe, options=options, epochs=1, lr=2e-3, folder=tmp_path)
    assert [line.lr for line in lines] == [2e-3]
    assert (tmp_path / "log.csv").is_file()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_floating_point_inputs_get_the_type_of_the_weights(dtype: torch.dtype) -> None:
    x, y = torch.randn(16, 2, dtype=dtype), torch.arange(16) % 3
    outcome = fit(MLP(MLPConfig(classes=3, exits=2)), (x, y), val=(x, y), epochs=1, batch=8, device="cpu")
    assert outcome.finished


def test_an_outcome_is_short_to_read() -> None:
    outcome = fit(MLP(MLPConfig(classes=3, exits=2)), (torch.randn(16, 2), torch.arange(16) % 3), epochs=30, batch=8)
    assert len(repr(outcome)) < 200
    assert "epochs=30" in repr(outcome)


class _LateNaN(nn.Module):
    """Its loss is finite, and the gradient of its second exit NaN."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def exits(self, x: torch.Tensor) -> Any:
        yield self.first(x)
        yield self.second(x) + (0 * self.second.weight.sum()).abs().sqrt()


def test_weights_that_become_nan_are_not_kept(tmp_path: Path) -> None:
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
    with pytest.raises(DivergedError, match="the weights are NaN"):
        fit(_LateNaN(), data, epochs=1, batch=64, folder=tmp_path)
    assert not (tmp_path / "checkpoint").exists()


def test_training_within_inference_mode_trains() -> None:
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
    model = MLP(MLPConfig(classes=2, exits=2))
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.inference_mode():
        assert fit(model, data, epochs=1, batch=16).finished
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
