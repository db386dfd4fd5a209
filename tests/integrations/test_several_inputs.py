"""Batch inference for a model that takes several tensors: a column for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytime.combine import Latest
from anytime.errors import FormatError, InputError
from anytime.integrations.ray_data import Predictor, predict_files
from anytime.run.export import export


@pytest.fixture(scope="module")
def folder(two: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    made: Path = export(two.TwoInputs().eval(), tmp_path_factory.mktemp("out") / "stages", rule="latest", example=two.texts())
    return made


def wanted(two: Any, x: dict[str, Any]) -> list[int]:
    with torch.no_grad():
        return Latest()(two.TwoInputs().eval()(x)).labels[-1].tolist()


def test_each_tensor_is_the_column_of_its_name(folder: Path, two: Any) -> None:
    x = two.texts(5)
    predictor = Predictor(folder)
    try:
        found = predictor({**{name: each.numpy().astype(np.int32) for name, each in x.items()}, "id": np.arange(5)})
        with pytest.raises(InputError, match="the batch has the columns input_ids"):
            predictor({"input_ids": x["input_ids"].numpy()})
    finally:
        predictor.close()
    assert found["labels"].tolist() == wanted(two, x)
    assert found["id"].tolist() == [0, 1, 2, 3, 4]
    assert not set(x) & set(found)


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_files_have_an_array_or_column_for_each(suffix: str, folder: Path, two: Any, tmp_path: Path) -> None:
    x, file = two.texts(11), tmp_path / f"texts.{suffix}"
    if suffix == "npz":
        np.savez(file, **{name: each.numpy() for name, each in x.items()})
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({name: each.tolist() for name, each in x.items()}), file, row_group_size=6)
    found = predict_files([file], folder, rows=4, column="input_ids")
    assert found["labels"].tolist() == wanted(two, x)
    with pytest.raises(FormatError, match="attention_mask"):
        predict_files([file], folder)
