"""Exported ONNX files in the hands of other tools: the checker and the quantisers of ONNX Runtime take every kind of stage."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anytime
from anytime.combine import Cached, Rule
from anytime.models import MLP, MLPConfig, MultiExit, ResNet, ResNetConfig, create
from anytime.run.export import export

onnx = pytest.importorskip("onnx", reason="the extra 'engines' is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")


def networks(name: str) -> tuple[MultiExit, Tensor]:
    """A network of three stages or more, and inputs for it."""
    torch.manual_seed(0)
    if name == "perceptron":
        model: MultiExit = MLP(MLPConfig(classes=5, width=8, exits=3)).requires_grad_(False)
        for head in model.get_submodule("heads").children():
            head.get_parameter("weight").mul_(8)  # logits well apart: the product loses classes and collapses
        return model.eval(), torch.randn(40, 2)
    if name == "images":
        config = ResNetConfig(classes=4, depth=8, width=4, channels=2, image_size=8, at=(0.3, 0.6))
        return ResNet(config).eval(), torch.randn(4, 2, 8, 8)
    ids = torch.randint(1, 40, (4, 12))
    ids[0, 8:] = 0  # padding
    return create("encoder-tiny", classes=5, vocabulary=40).eval(), ids


CASES: list[tuple[str, Rule[Any]]] = [
    ("perceptron", anytime.Product()),
    ("perceptron", anytime.Latest()),
    ("perceptron", Cached(anytime.Product(anytime.combine.Softplus()))),
    ("perceptron", anytime.Mixture()),
    ("images", anytime.Product()),
    ("texts", anytime.Product()),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} {case[1]!r}")
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, MultiExit, Rule[Any], Tensor]:
    name, rule = request.param
    model, x = networks(name)
    return export(model, tmp_path_factory.mktemp("stages"), rule=rule, example=x[:1]), model, rule, x


def stages(folder: Path, x: Tensor) -> Iterator[tuple[Path, dict[str, Any], list[Any]]]:
    """Each stage's file, what it is given for these inputs, and what it gives."""
    values = [x.numpy()]
    for stage in json.loads((folder / "exported.json").read_text())["stages"]:
        given = dict(zip((each["name"] for each in stage["inputs"]), values, strict=True))
        gives = runtime.InferenceSession(folder / stage["file"], providers=["CPUExecutionProvider"]).run(None, given)
        yield folder / stage["file"], given, gives
        values = gives[4:]


def test_every_stage_passes_the_full_check_and_imports_the_operators_once(
    exported: tuple[Path, MultiExit, Rule[Any], Tensor],
) -> None:
    folder, model, _, x = exported
    files = [file for file, _, _ in stages(folder, x)]
    assert [file.name for file in files] == [f"stage_{number}.onnx" for number in range(1, model.num_exits + 1)]
    for file in files:
        proto = onnx.load(file)
        onnx.checker.check_model(proto, full_check=True)
        assert [(each.domain, each.version) for each in proto.opset_import] == [("", 18)]


def test_every_stage_can_be_quantised_and_the_rule_inside_stays_exact(
    exported: tuple[Path, MultiExit, Rule[Any], Tensor], tmp_path: Path
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, given: dict[str, Any]) -> None:
            self.rows = iter([given])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.rows, None)

    folder, _, _, x = exported
    for file, given, gives in stages(folder, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # masked attention has no finite range, which the quantiser says
            quantize_dynamic(file, tmp_path / "dynamic.onnx")
            quantize_static(file, tmp_path / "static.onnx", Reader(given), quant_format=QuantFormat.QDQ)
        for name in ("dynamic.onnx", "static.onnx"):
            session = runtime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"])
            for rows in (1, len(x)):
                found = session.run(None, {key: value[:rows] for key, value in given.items()})
                assert [each.shape for each in found] == [(rows, *each.shape[1:]) for each in gives]
                np.testing.assert_allclose(found[0].sum(-1), 1, atol=1e-5)
                np.testing.assert_allclose(found[0], np.exp(found[1]), atol=1e-6)
                assert np.isfinite(found[0]).all()


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_files_do_not_hold_the_paths_of_the_machine_they_were_made_on(format: Any, tmp_path: Path) -> None:
    model, x = networks("perceptron")
    export(model, tmp_path, rule="product", example=x[:1], format=format)
    source = str(Path(anytime.__file__).parent)
    for file in tmp_path.iterdir():
        assert source.encode() not in file.read_bytes()


def test_quantised_stages_in_a_bundle_run_like_the_exported_ones(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    from anytime.artifacts import read_bundle, write_bundle

    model, x = networks("perceptron")
    folder = export(model, tmp_path / "stages", rule="product", example=x[:1])
    files = read_bundle(folder)
    for name in [name for name in files if name.endswith(".onnx")]:
        quantize_dynamic(folder / name, tmp_path / name)
        files[name] = (tmp_path / name).read_bytes()
    write_bundle(tmp_path / "small", files)
    with anytime.Runner.load(folder) as exact, anytime.Runner.load(tmp_path / "small") as small:
        for one, other in zip(exact.stream(x), small.stream(x), strict=True):
            assert one.exit == other.exit
            assert other.probs.shape == one.probs.shape
