"""Logits from any model and loader, in memory and in files; every row once, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anytime
from anytime.errors import FileError, FormatError, LockedError, NonFiniteError, OverwriteError, ShapeError, StateError
from anytime.evaluation import collect
from anytime.models import MLP, MLPConfig
from anytime.outputs import lock_run

X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 4
ENDINGS = [".npz", ".safetensors", ".npy"]


@pytest.fixture
def model() -> MLP:
    return MLP(MLPConfig(classes=4, exits=3)).eval()


def loader(rows: int = 50, batch: int = 8) -> Any:
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), batch_size=batch)


def expected(model: MLP) -> Tensor:
    with torch.no_grad():
        return model(X)


def pairs() -> Iterator[Any]:
    yield from zip(X.split(7), Y.split(7), strict=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


LOADERS = {
    "a DataLoader": (loader, True),
    "a list": (lambda: [(X, Y)], True),
    "a generator": (pairs, True),
    "an iterable data set": (lambda: DataLoader(Stream(), batch_size=9), True),
    "tensors": (lambda: list(X.split(20)), False),
    "lists of one": (lambda: DataLoader(TensorDataset(X), batch_size=9), False),
    "arrays": (lambda: [(X.numpy(), Y.numpy())], True),
    "labels as a list": (lambda: [(X, Y.tolist())], True),
    "dicts": (lambda: [{"x": x, "labels": y} for x, y in pairs()], True),
    "dicts with label": (lambda: [{"x": x, "label": y} for x, y in pairs()], True),
    "dicts without labels": (lambda: [{"x": x} for x, _ in pairs()], False),
    "dicts of inputs in a pair": (lambda: [({"x": x}, y) for x, y in pairs()], True),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader_gives_the_logits_of_all_rows_in_order(kind: str, model: MLP) -> None:
    make, labelled = LOADERS[kind]
    found = anytime.collect_logits(model, make())
    torch.testing.assert_close(found.logits, expected(model))
    assert (found.labels is None) == (not labelled)
    assert not labelled or torch.equal(found.labels, Y)


def test_modes_are_restored_and_nothing_needs_a_gradient(model: MLP) -> None:
    model.train()
    found = anytime.collect_logits(model, loader())
    assert model.training
    assert not found.logits.requires_grad
    torch.testing.assert_close(found.logits, expected(model.eval()))


MODELS = {
    "a function that returns a list": lambda model: lambda x: list(model(x)),
    "a function that returns a tensor": lambda model: lambda x: model(x),
    "a module that returns a tensor": lambda model: nn.Sequential(model),
    "from_outputs": lambda model: anytime.models.from_outputs(lambda x: model(x).transpose(0, 1), exits=3, exits_dim=1),
}


@pytest.mark.parametrize("kind", MODELS)
def test_modules_and_functions_without_exits_are_run(kind: str, model: MLP) -> None:
    torch.testing.assert_close(anytime.collect_logits(MODELS[kind](model), loader()).logits, expected(model))


def test_structures_reach_the_model_by_name() -> None:
    class Pair(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
            return [a, a + b]

    found = anytime.collect_logits(Pair(), [({"b": X, "a": 2 * X}, Y % 2)])
    torch.testing.assert_close(found.logits, torch.stack([2 * X, 3 * X]))
    assert torch.equal(anytime.collect_logits(lambda a, b: [a, a + b], [((2 * X, X), Y % 2)]).logits, found.logits)
    for columns in ({"b": X, "a": 2 * X}, (2 * X, X)):  # as one pair of inputs and labels, without a loader
        whole = anytime.collect_logits(Pair(), (columns, Y % 2))
        assert torch.equal(whole.logits, found.logits)
        assert torch.equal(whole.labels, Y % 2)


def test_inputs_go_to_the_type_of_the_model(model: MLP) -> None:
    found = anytime.collect_logits(model.half(), [(X.double(), Y)])
    assert found.logits.dtype == torch.float16
    assert anytime.collect_logits(lambda x: [x.bfloat16()] * 2, [X]).logits.dtype == torch.float32


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("labelled", [True, False])
def test_files_hold_what_memory_holds(ending: str, labelled: bool, model: MLP, tmp_path: Path) -> None:
    out = tmp_path / "new" / f"logits{ending}"
    found = anytime.collect_logits(model, loader() if labelled else [*X.split(7)], out)
    torch.testing.assert_close(found.logits, expected(model))
    assert torch.equal(found.labels, Y) if labelled else found.labels is None
    separate = {"logits.labels.npy"} if labelled and ending == ".npy" else set()
    assert {path.name for path in out.parent.iterdir()} == {out.name} | separate
    found.logits[0] = 0.0  # of this process alone: the file is mapped privately
    again = anytime.open_logits(out, out.with_suffix(".labels.npy") if separate else None)
    torch.testing.assert_close(again.logits[:], expected(model))
    assert not labelled or torch.equal(again.labels, Y)


def test_other_libraries_read_the_files(model: MLP, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    for ending in ENDINGS:
        anytime.collect_logits(model, loader(), tmp_path / f"a{ending}")
    for found in (np.load(tmp_path / "a.npz"), load_file(tmp_path / "a.safetensors")):
        np.testing.assert_allclose(found["logits"], expected(model).numpy(), rtol=1e-5, atol=1e-6)
        assert found["labels"].tolist() == Y.tolist()
    assert np.load(tmp_path / "a.npy").shape == (3, 50, 4)
    arrays = [anytime.open_logits(tmp_path / f"a{ending}").logits.array for ending in ENDINGS]
    assert all(isinstance(array, np.memmap) and array.offset % 8 == 0 for array in arrays)


def test_evaluate_takes_what_was_collected(model: MLP, tmp_path: Path) -> None:
    for found in (anytime.collect_logits(model, loader()), anytime.collect_logits(model, loader(), tmp_path / "a.npz")):
        evaluation = anytime.evaluate(found)
        assert (evaluation.samples, evaluation.labelled) == (50, True)
    assert "50 rows" in repr(found)


class Counting(nn.Module):
    """A model that counts its rows, and raises an error or ends the process at some batch."""

    def __init__(self, model: MLP, stop: int | None = None) -> None:
        super().__init__()
        self.model, self.stop, self.rows, self.calls = model, stop, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        self.rows += len(x)
        logits: Tensor = self.model(x)
        return logits


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_interrupted_collection_continues_with_every_row_once(ending: str, model: MLP, tmp_path: Path) -> None:
    out = tmp_path / f"logits{ending}"
    with pytest.raises(KeyboardInterrupt):
        anytime.collect_logits(Counting(model, stop=5), loader(), out)
    assert not out.exists()
    for file in (tmp_path / f"logits{ending}.partial").glob("exit-*"):
        file.write_bytes(file.read_bytes() + b"half a row")  # as a kill during a write leaves it
    rest = Counting(model)
    found = anytime.collect_logits(rest, loader(), out)
    assert rest.rows == 50 - 3 * 8  # four batches were done, and the last of them is run again
    torch.testing.assert_close(found.logits, expected(model))
    assert found.labels is not None
    assert torch.equal(found.labels, Y)
    assert not (tmp_path / f"logits{ending}.partial").exists()


PROGRAM = """
import os, signal, sys, torch
import anytime
from anytime.evaluation import collect
from anytime.models import MLP, MLPConfig
collect._BLOCK_BYTES = 1
torch.manual_seed(0)
model = MLP(MLPConfig(classes=4, exits=3)).eval()
x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
calls = 0
def run(x):
    global calls
    calls += 1
    if calls == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return model(x)
anytime.collect_logits(run, list(zip(x.split(8), (torch.arange(50) % 4).split(8))), sys.argv[1])
"""


def test_a_killed_process_is_continued_with_every_row_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(classes=4, exits=3)).eval()
    out = tmp_path / "logits.npz"
    done = subprocess.run([sys.executable, "-c", PROGRAM, out], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == -signal.SIGKILL
    rest = Counting(model)
    found = anytime.collect_logits(rest, list(zip(X.split(8), Y.split(8), strict=True)), out)
    assert rest.rows == 50 - 2 * 8
    torch.testing.assert_close(found.logits, expected(model))


@pytest.fixture
def interrupted(model: MLP, tmp_path: Path) -> Path:
    out = tmp_path / "logits.npz"
    with pytest.raises(KeyboardInterrupt):
        anytime.collect_logits(Counting(model, stop=4), loader(), out)
    return out


def test_a_shuffled_loader_another_model_and_fewer_batches_are_refused(interrupted: Path, model: MLP) -> None:
    shuffled = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
    other = MLP(MLPConfig(classes=4, exits=3))
    for given, batches in ((model, shuffled), (other, loader()), (model, loader(rows=16)), (model.double(), loader())):
        with pytest.raises(StateError, match="resume=False"):
            anytime.collect_logits(given, batches, interrupted)
    found = anytime.collect_logits(other, shuffled, interrupted, resume=False)
    assert found.logits.shape[1] == 50


def test_damaged_progress_is_refused_with_the_folder_to_remove(interrupted: Path, model: MLP) -> None:
    folder = interrupted.with_name("logits.npz.partial")
    (folder / "exit-2").write_bytes(b"")
    with pytest.raises(FormatError, match="resume=False"):
        anytime.collect_logits(model, loader(), interrupted)
    (folder / "progress.json").write_text('{"rows": 8, "type": "O"}')
    with pytest.raises(FormatError, match="resume=False"):
        anytime.collect_logits(model, loader(), interrupted)


def test_two_processes_do_not_write_one_file(model: MLP, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom anytime.outputs import lock_run\n"
        "with lock_run(sys.argv[1], doing='collecting logits'):\n    print('in', flush=True)\n    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "a.npz.partial"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(LockedError, match="is collecting logits in"):
            anytime.collect_logits(model, loader(), tmp_path / "a.npz")
        other.communicate(b"")
    with lock_run(tmp_path / "a.npz.partial"):
        pass


def test_logits_without_labels_are_not_written_beside_labels_of_others(model: MLP, tmp_path: Path) -> None:
    anytime.collect_logits(model, loader(), tmp_path / "a.npy")
    before = (tmp_path / "a.npy").read_bytes()
    with pytest.raises(OverwriteError, match=r"a\.labels\.npy exists"):
        anytime.collect_logits(model, [(X,)], tmp_path / "a.npy")
    assert (tmp_path / "a.npy").read_bytes() == before
    (tmp_path / "a.labels.npy").unlink()
    anytime.collect_logits(model, [(X,)], tmp_path / "a.npy")
    assert not anytime.evaluate(tmp_path / "a.npy").labelled


def test_a_last_batch_with_as_many_rows_as_exits_is_read_as_those_before(model: MLP) -> None:
    """A stacked tensor of 3 exits and 3 rows alone could have either first."""
    found = anytime.collect_logits(lambda x: model(x), [X[:8], X[8:11]], progress=False)
    torch.testing.assert_close(found.logits, expected(model)[:, :11])
    with pytest.raises(ShapeError, match="as many exits as inputs"):
        anytime.collect_logits(lambda x: model(x), [X[8:11]])


def test_two_threads_do_not_write_one_file(model: MLP, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as other, lock_run(tmp_path / "a.npz.partial", doing="collecting logits"):
        found = other.submit(anytime.collect_logits, model, loader(), tmp_path / "a.npz")
        with pytest.raises(LockedError, match="is collecting logits in"):
            found.result()


def test_files_that_hold_something_else_are_not_replaced(model: MLP, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": X}, tmp_path / "model.safetensors")
    np.savez(tmp_path / "data.npz", x=X.numpy())
    (tmp_path / "c.npy").write_text("text")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(OverwriteError):
            anytime.collect_logits(model, loader(), tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "d.npz.partial").mkdir()
    (tmp_path / "d.npz.partial" / "thesis.tex").write_text("text")
    with pytest.raises(OverwriteError, match=r"thesis\.tex"):
        anytime.collect_logits(model, loader(), tmp_path / "d.npz")


def test_an_earlier_file_is_replaced(model: MLP, tmp_path: Path) -> None:
    anytime.collect_logits(model, loader(rows=16), tmp_path / "a.npz")
    assert anytime.collect_logits(model, loader(), tmp_path / "a.npz").logits.shape[1] == 50
    anytime.collect_logits(model, [X], tmp_path / "a.safetensors")
    assert anytime.collect_logits(model, loader(), tmp_path / "a.safetensors").labels is not None
    assert anytime.collect_logits(model, [X], tmp_path / "a.safetensors").labels is None


def test_half_precision_files_with_an_odd_number_of_values_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    x = X[:5, :1].half()
    found = anytime.collect_logits(lambda x: [x.repeat(1, 3)] * 3, [(x, Y[:5] % 3)], tmp_path / "a.safetensors")
    assert found.logits.dtype == torch.float16
    assert torch.equal(load_file(tmp_path / "a.safetensors")["logits"], found.logits)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["labels"], Y[:5] % 3)


def test_a_bad_batch_is_named_and_what_was_done_is_kept(model: MLP, tmp_path: Path) -> None:
    def diverges(x: Tensor) -> Tensor:
        return model(x) / (0.0 if x[0, 0] == X[24, 0] else 1.0)

    with pytest.raises(NonFiniteError, match="row 24") as caught:
        anytime.collect_logits(diverges, loader(), tmp_path / "a.npz")
    assert caught.value.row == 24
    found = anytime.collect_logits(model, loader(), tmp_path / "a.npz")
    torch.testing.assert_close(found.logits, expected(model))


def test_memory_is_bounded_by_the_block(model: MLP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    append = collect.LogitsStore.append
    monkeypatch.setattr(collect, "_BLOCK_BYTES", 2 * 8 * 3 * 4 * 4)  # two batches
    monkeypatch.setattr(collect, "_BLOCK_SECONDS", float("inf"))  # on a slow machine too
    monkeypatch.setattr(
        collect.LogitsStore,
        "append",
        lambda self, logits, *rest, **more: (written.append(logits.shape[1]), append(self, logits, *rest, **more)),
    )
    anytime.collect_logits(model, loader(), tmp_path / "a.npz")
    assert written == [16, 16, 16, 2]


def test_an_interruption_between_two_lines_counts_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MLP(MLPConfig(classes=3, exits=2)).eval(), torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    batches, calls = [(x, torch.zeros(10, dtype=torch.long))] * 4, 0
    real = collect._Batch.without_inputs

    def interrupted(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(batch)

    monkeypatch.setattr(collect._Batch, "without_inputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        anytime.collect_logits(model, batches, out=tmp_path / "a.npz")
    monkeypatch.undo()
    assert anytime.collect_logits(model, batches, out=tmp_path / "a.npz", resume=True).logits.shape[1] == 40


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe")
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    (tmp_path / "gone.npz").symlink_to(tmp_path / "nowhere" / "a.npz")
    for name in ("pipe.npz", "loop.npz", "gone.npz"):
        with pytest.raises(FileError):
            anytime.collect_logits(lambda x: pytest.fail("ran"), [torch.zeros(2, 2)], out=tmp_path / name)
