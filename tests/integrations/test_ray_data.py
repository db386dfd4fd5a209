from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.errors import AnytimeError, FormatError, MissingExtraError
from anytime.integrations.ray_data import Predictor, evaluate_files, predict_files
from anytime.loading.blocks import cut_files
from anytime.models import load
from anytime.run import Runner
from anytime.samples import cifar100_msdnet, digits_model

PROGRAMS = Path(__file__).with_name("ray_programs.py")
SHAPE = (1, 16, 16)


@pytest.fixture(scope="module")
def inputs() -> Any:
    return np.random.default_rng(0).normal(size=(45, *SHAPE)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, inputs: Any) -> Path:
    """The same inputs in every format, and the sample model."""
    made = tmp_path_factory.mktemp("files")
    shutil.copytree(digits_model()[0], made / "model")
    np.save(made / "inputs.npy", inputs)
    np.savez_compressed(made / "inputs.npz", x=inputs, labels=np.zeros(45, np.int64))
    if (pyarrow := _pyarrow()) is not None:
        from pyarrow import parquet

        table = pyarrow.table({"x": list(inputs.reshape(45, -1)), "labels": list(range(45))})
        parquet.write_table(table, made / "inputs.parquet", row_group_size=20)
    return made


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        return None
    return pyarrow


@pytest.mark.parametrize("name", ["inputs.npy", "inputs.npz", "inputs.parquet"])
def test_answers_are_those_of_the_model(folder: Path, inputs: Any, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    found = predict_files([folder / name], folder / "model", rows=8, probabilities=True)
    model = load(folder / "model")
    with torch.inference_mode(), Runner(model) as runner:
        expected = runner.predict(torch.from_numpy(inputs))
    torch.testing.assert_close(torch.from_numpy(found["probabilities"]), expected.probs, atol=1e-5, rtol=1e-4)
    assert found["labels"].tolist() == expected.labels.tolist()
    assert found["fell_back"].tolist() == expected.fell_back.tolist()
    assert set(found["exit"].tolist()) == {5}


def test_files_are_answered_in_order_and_no_further_than_asked(folder: Path, inputs: Any) -> None:
    found = predict_files([folder / "inputs.npz", folder / "inputs.npy"], folder / "model", rows=64, exits=2)
    assert len(found["labels"]) == 90
    assert set(found["exit"].tolist()) == {2}
    assert found["labels"][:45].tolist() == found["labels"][45:].tolist()
    assert "probabilities" not in found


def test_blocks_cover_every_row_once(folder: Path) -> None:
    names = ["inputs.npy", *(["inputs.parquet"] if _pyarrow() else [])]
    blocks = cut_files([folder / name for name in names], rows=7)
    rows = [row for block in blocks for row in range(block.first, block.first + block.stop - block.start)]
    assert rows == list(range(45 * len(names)))
    assert all(len(block.read()) == block.stop - block.start <= 7 for block in blocks)


def test_a_batch_keeps_its_other_columns(folder: Path, inputs: Any) -> None:
    predictor = Predictor(folder / "model", column="image")
    found = predictor({"image": inputs[:3], "key": np.arange(3)})
    predictor.close()
    assert set(found) == {"key", "labels", "confidence", "exit", "fell_back"}
    assert found["key"].tolist() == [0, 1, 2]


def test_wrong_files_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "inputs.csv").write_text("1,2")
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    np.save(tmp_path / "empty.npy", np.zeros((0, *SHAPE), np.float32))
    np.save(tmp_path / "one.npy", np.float32(1))
    (tmp_path / "text.parquet").write_text("not Parquet")
    np.save(tmp_path / "shape.npy", np.zeros((4, 7), np.float32))
    for name in ("inputs.csv", "two.npz", "empty.npy", "one.npy", "missing.npy", "text.parquet", "shape.npy"):
        with pytest.raises(AnytimeError):
            predict_files([tmp_path / name], folder / "model")
    with pytest.raises(FormatError, match="expected: one named z"):
        predict_files([folder / "inputs.npz"], folder / "model", column="z")


def test_parquet_columns_that_are_no_inputs_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    from pyarrow import parquet

    for number, column in enumerate(([[1.0], [1.0, 2.0]], [[1.0], None], [[1.0], [None]], [{"a": 1}, {"a": 2}])):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table({"x": column}), path)
        with pytest.raises(AnytimeError):
            cut_files([path])[0].read()


def test_parquet_tensors_and_texts_are_read(tmp_path: Path, inputs: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    from pyarrow import parquet

    tensors = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(inputs[:5])
    parquet.write_table(pyarrow.table({"x": tensors, "text": ["a", "b", "c", "d", "e"]}), tmp_path / "x.parquet")
    assert np.array_equal(cut_files([tmp_path / "x.parquet"])[0].read(), inputs[:5])
    assert cut_files([tmp_path / "x.parquet"], column="text")[0].read().tolist() == ["a", "b", "c", "d", "e"]


def test_without_ray_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[ray\]"):
        predict_files([folder / "inputs.npy"], folder / "model", workers=1)


@pytest.mark.long
def test_ray_evaluates_files_to_the_bytes_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    file = cifar100_msdnet()
    assert file.labels is not None
    files, labels = tmp_path / "logits", tmp_path / "few-labels"
    files.mkdir()
    labels.mkdir()
    for number, (start, stop) in enumerate(((0, 300), (300, 450), (450, 1000))):
        known = file.labels[start:stop].numpy()
        np.savez(files / f"{number}.npz", logits=file.logits.array[:, start:stop], labels=known)
        np.save(labels / f"{number}.npy", known + 100 * (number == 1))
    command = [sys.executable, PROGRAMS, "evaluate", files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"same": True, "rows": 1000, "error": "LabelError"}


def test_without_ray_files_are_not_evaluated_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    np.savez(tmp_path / "a.npz", logits=np.random.default_rng(0).normal(size=(2, 9, 3)))
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[ray\]"):
        evaluate_files(tmp_path)


@pytest.mark.long
def test_ray_gives_the_answers_of_one_process(folder: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    done = subprocess.run([sys.executable, PROGRAMS, "data", folder], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"rows": 135, "same": ["labels", "confidence", "exit", "fell_back", "probabilities"], "mapped": True}


def test_what_was_saved_with_the_model_is_used(folder: Path, inputs: Any, tmp_path: Path) -> None:
    anytime.save(load(folder / "model"), tmp_path / "model", rule="caching")
    predictor = Predictor(tmp_path / "model", probabilities=True)
    with Runner.load(tmp_path / "model") as runner:
        wanted = runner.predict(torch.from_numpy(inputs)).probs.numpy()
    np.testing.assert_array_equal(predictor.predict(inputs)["probabilities"], wanted)
    other = Predictor(tmp_path / "model", rule="product", probabilities=True)
    assert not np.array_equal(other.predict(inputs)["probabilities"], wanted)
