"""Exported stages: a driver that knows only their description gets the rule's answers."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anytime
from anytime.artifacts import read_bundle, write_bundle
from anytime.combine import Arithmetic, Cached, Geometric, Powers, Prediction, Rule, Scaled, Tempered
from anytime.errors import (
    DtypeError,
    FormatError,
    InputError,
    IntegrityError,
    MissingExtraError,
    OptionError,
    ShapeError,
    StateError,
)
from anytime.models import MLP, MLPConfig, MultiExit, create
from anytime.run.export import ExportedModel, export, load_exported
from anytime.run.export import writing as export_module
from anytime.run.export.description import NAME as DESCRIPTION

RULES: list[Rule[Any]] = [
    anytime.Latest(),
    anytime.Caching(),
    anytime.Caching(ties="later"),
    anytime.Product(),
    anytime.Product(anytime.combine.Softplus()),
    anytime.Product(anytime.combine.Sigmoid()),
    anytime.Product(anytime.combine.Exponential()),
    anytime.Product(anytime.combine.Heaviside()),
    anytime.Product(anytime.combine.ClippedReLU(2.0)),
    anytime.Product(anytime.combine.ThresholdReLU(0.5)),
    anytime.Product(anytime.combine.ThresholdReLU(0.5, mode="clamp")),
    anytime.Product(anytime.combine.AdaptiveReLU(1.0, (0.1, 0.2, 0.1), 0.3)),
    anytime.Product(weights="ones", shift="1/K"),
    anytime.Product(weights=(0.0, 1.0)),
    anytime.Mixture(),
    anytime.Mixture(anytime.combine.Softplus(), weights="linear"),
    Powers(past=(1.0, 0.5), now=(1.0, 0.7)),
    Powers(past=(1.0, 0.5), now=(1.0, 0.7), margin=0.5),
    Scaled(anytime.Product(), (2.0, 0.5)),
    Tempered(anytime.Product(), (2.0, 0.5)),
    Cached(anytime.Product()),
    Cached(Tempered(anytime.Mixture(), (2.0, 0.5))),
    Geometric.plain(2),
    Geometric(((0.1,), (0.2, -0.3)), biases=((0.1,) * 5, (0.0, 0.5, 0.0, -0.5, 0.0))),
    Arithmetic.plain(2),
]


def mostly_long(*fast: int) -> list[Any]:
    """All rules; those whose indices are not given are marked as long."""
    return [rule if number in fast else pytest.param(rule, marks=pytest.mark.long) for number, rule in enumerate(RULES)]


def mlp(exits: int = 2) -> MLP:
    """A perceptron with large logits of both signs, so that products lose classes and collapse."""
    torch.manual_seed(0)
    model = MLP(MLPConfig(classes=5, width=8, exits=exits)).requires_grad_(False)
    for head in model.heads:
        head.get_parameter("weight").mul_(8)
    return model.eval()


def points(rows: int = 40) -> Tensor:
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(1))


def wanted(model: MultiExit, rule: Rule[Any], x: Tensor) -> Prediction:
    with torch.no_grad():
        return rule(torch.stack(list(model.eval().exits(x))))


def check_same(found: list[Prediction], expected: Prediction) -> None:
    log_probs = torch.stack([each.log_probs for each in found])
    torch.testing.assert_close(log_probs.exp(), expected.probs, rtol=1e-4, atol=1e-4)
    assert torch.equal(log_probs.isinf(), expected.log_probs.isinf())
    assert torch.equal(torch.stack([each.fell_back for each in found]), expected.fell_back)
    assert torch.equal(torch.stack([each.labels for each in found]), expected.labels)


def drive(folder: Path, x: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """A driver as in any language: it knows only the description, not the method."""
    runtime = pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    description = json.loads((folder / "exported.json").read_text())
    values, answers = [x], []
    for stage in description["stages"]:
        session = runtime.InferenceSession(folder / stage["file"], providers=["CPUExecutionProvider"])
        names = [given["name"] for given in stage["inputs"]]
        probs, log_probs, fell_back, labels, *values = session.run(None, dict(zip(names, values, strict=True)))
        answers.append((probs, log_probs, fell_back, labels))
    return answers


NAMES = ["ant", "bee", "cat", "dog", "eel"]
RULE = Cached(anytime.Product())


@pytest.fixture(scope="module")
def onnx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The perceptron with caching on top of the product, as ONNX."""
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    folder = tmp_path_factory.mktemp("exported")
    return export(mlp(), folder, rule=RULE, example=points(1), macs=(1, 3), class_names=NAMES)


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model and rule as files of torch.export."""
    return export(mlp(), tmp_path_factory.mktemp("exported"), rule=RULE, example=points(1), format="torch-export")


@pytest.fixture(scope="module", params=["onnx", "torch-export"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[MultiExit, ExportedModel]:
    """A text model, and the same exported."""
    if request.param == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    torch.manual_seed(0)
    model = create("encoder-tiny", classes=5, vocabulary=40, layers=(1, 2), width=16, heads=2, intermediate=32).eval()
    folder = tmp_path_factory.mktemp("texts")
    export(model, folder, rule="caching", example=torch.randint(1, 40, (2, 12)), format=request.param)
    return model, load_exported(folder, trusted=request.param == "torch-export")


def check_driven(folder: Path, model: MultiExit, rule: Rule[Any], x: Tensor) -> None:
    expected = wanted(model, rule, x)
    for exit, (probs, log_probs, fell_back, labels) in enumerate(drive(folder, x.numpy())):
        np.testing.assert_allclose(probs, expected.probs[exit], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(probs, np.exp(log_probs), rtol=1e-5)
        assert np.array_equal(fell_back, expected.fell_back[exit])
        assert np.array_equal(labels, expected.labels[exit])


def test_plain_calls_of_onnx_runtime_give_the_rules_answers(onnx_folder: Path) -> None:
    for rows in (1, 2, 40):
        check_driven(onnx_folder, mlp(), RULE, points(rows))


@pytest.mark.long
def test_plain_calls_of_onnx_runtime_give_the_rules_answers_for_the_published_msdnet(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create("msdnet-cifar", classes=10).eval()
    export(model, tmp_path, rule="product", example=torch.randn(1, 3, 32, 32))
    for rows in (1, 6):
        check_driven(tmp_path, model, anytime.Product(), torch.randn(rows, 3, 32, 32))


def test_the_description_is_true_of_the_files(onnx_folder: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    document = json.loads((onnx_folder / DESCRIPTION).read_text())
    assert document["class_names"] == NAMES
    assert document["macs"] == [1.0, 3.0]
    assert (document["exits"], document["classes"], len(document["how_to_drive"])) == (2, 5, 5)
    assert anytime.parse_rule(document["rule"]) == RULE
    for stage in document["stages"]:
        session = runtime.InferenceSession(onnx_folder / stage["file"], providers=["CPUExecutionProvider"])
        for described, real in ((stage["inputs"], session.get_inputs()), (stage["outputs"], session.get_outputs())):
            assert [each["name"] for each in described] == [each.name for each in real]
            assert [each["shape"][1:] for each in described] == [each.shape[1:] for each in real]
            kinds = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(bool)": "bool", "tensor(int64)": "int64"}
            assert [each["dtype"] for each in described] == [kinds[each.type] for each in real]
            assert not any(isinstance(each.shape[0], int) for each in real)
    first, second = document["stages"]
    assert [each["name"] for each in first["inputs"]] == ["x"]
    assert [each["name"].removeprefix("next_") for each in first["outputs"][4:]] == [each["name"] for each in second["inputs"]]
    assert [each["name"] for each in second["outputs"]] == ["probs", "log_probs", "fell_back", "labels"]


@pytest.mark.parametrize("rule", mostly_long(3, 20, 22), ids=repr)
def test_every_rule_in_torch_export_gives_its_answers(rule: Rule[Any], tmp_path: Path) -> None:
    export(mlp(), tmp_path, rule=rule, example=points(), format="torch-export")
    exported = load_exported(tmp_path, trusted=True)
    for rows in (1, 2, 40):
        check_same(list(exported.run(points(rows))), wanted(mlp(), rule, points(rows)))


@pytest.mark.parametrize("rule", mostly_long(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, 17, 18, 19), ids=repr)
def test_every_rule_in_onnx_gives_its_answers(rule: Rule[Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    export(mlp(), tmp_path, rule=rule, example=points())
    exported = load_exported(tmp_path)
    for rows in (1, 2, 40):
        check_same(list(exported.run(points(rows))), wanted(mlp(), rule, points(rows)))


def test_the_reference_perceptron_collapses_so_that_the_tests_above_mean_something() -> None:
    expected = wanted(mlp(), anytime.Product(), points())
    assert 0 < int(expected.fell_back.sum()) < expected.fell_back.numel()


def check_run(exported: ExportedModel) -> None:
    x = points(6)
    expected = wanted(mlp(), RULE, x)
    assert (exported.num_exits, exported.classes, exported.rule) == (2, 5, repr(RULE))
    run = exported.begin(x)
    run.advance()
    run.keep(torch.tensor([4, 0]))
    torch.testing.assert_close(run.advance().probs, expected.probs[1, [4, 0]], rtol=1e-4, atol=1e-5)
    with pytest.raises(StateError, match="after the last"):
        run.advance()
    stream = exported.run(x)
    torch.testing.assert_close(next(stream).probs, expected.probs[0], rtol=1e-4, atol=1e-5)
    stream.close()  # type: ignore[attr-defined]


def test_rows_may_leave_an_exported_model_in_onnx(onnx_folder: Path) -> None:
    exported = load_exported(onnx_folder)
    assert (exported.class_names, exported.macs) == (NAMES, [1.0, 3.0])
    check_run(exported)


def test_rows_may_leave_an_exported_model_of_torch(torch_folder: Path) -> None:
    exported = load_exported(torch_folder, trusted=True)
    assert (exported.class_names, exported.macs) == (None, None)
    check_run(exported)


def test_inputs_of_another_kind_are_refused(torch_folder: Path) -> None:
    exported = load_exported(torch_folder, trusted=True)
    with pytest.raises(ShapeError, match=r"expected: \(batch, 2\)"):
        exported.begin(torch.zeros(1, 3))
    with pytest.raises(DtypeError, match="float32"):
        exported.begin(torch.zeros(1, 2, dtype=torch.int64))


def test_a_damaged_bundle_is_refused(torch_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(torch_folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "stage_2.pt2"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="SHA-256"):
        load_exported(tmp_path, trusted=True)
    file.unlink()
    with pytest.raises(anytime.AnytimeError, match="does not exist"):
        load_exported(tmp_path, trusted=True)


def test_a_torch_file_holds_the_weights_of_its_stage_alone(torch_folder: Path) -> None:
    weights = 0
    for exit in (1, 2):
        with zipfile.ZipFile(torch_folder / f"stage_{exit}.pt2") as zipped:
            weights += sum(each.file_size for each in zipped.infolist() if "/weights/weight_" in each.filename)
    assert weights == sum(4 * parameter.numel() for parameter in mlp().parameters())


def test_wrong_calls_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyExits(MultiExit):
        num_exits = 1

        def exits(self, x: Tensor) -> Any:
            yield x

    x = points()
    with pytest.raises(OptionError, match="format is 'tflite'"):
        export(mlp(), tmp_path, rule="latest", example=x, format="tflite")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="OnlyExits cannot be run stage by stage"):
        export(OnlyExits(), tmp_path, rule="latest", example=x)
    with pytest.raises(OptionError, match="did you mean 'product'"):
        export(mlp(), tmp_path, rule="prodct", example=x)
    with pytest.raises(OptionError, match="was fitted for 2 exits"):
        export(mlp(3), tmp_path, rule=Powers((1.0, 1.0), (1.0, 1.0)), example=x)
    with pytest.raises(OptionError, match="5 names, one per class"):
        export(mlp(), tmp_path, rule="latest", example=x, class_names=["a"], format="torch-export")
    with pytest.raises(ShapeError, match="cumulative cost"):
        export(mlp(), tmp_path, rule="latest", example=x, macs=[1.0], format="torch-export")
    monkeypatch.setattr(export_module, "LARGEST_STAGE", 100)
    with pytest.raises(OptionError, match="at most 100, the limit of ONNX files"):
        export(mlp(), tmp_path, rule="latest", example=x, format="torch-export")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[engines\]"):
        export(mlp(), tmp_path, rule="latest", example=points())


def test_a_model_in_training_is_exported_as_it_answers_and_stays_in_training(tmp_path: Path) -> None:
    model = mlp().train()
    export(model, tmp_path, rule="latest", example=points(), format="torch-export")
    assert model.training


def test_exported_texts_may_have_any_length(texts: tuple[MultiExit, ExportedModel]) -> None:
    model, stages = texts
    assert stages.description["stages"][0]["inputs"][0]["shape"] == ["batch", "length"]
    for length in (3, 20):
        ids = torch.randint(1, 40, (2, length))
        with torch.inference_mode():
            expected = anytime.Caching()(model(ids))
        for exit, found in enumerate(stages.run(ids)):
            torch.testing.assert_close(found.log_probs, expected.log_probs[exit], atol=1e-5, rtol=1e-4)


def test_inputs_that_a_stage_cannot_take_are_named(texts: tuple[MultiExit, ExportedModel]) -> None:
    with pytest.raises(InputError, match="stage 1 of 2 failed"):
        next(texts[1].run(torch.full((1, 4), 10**6)))


def test_a_folder_of_another_version_is_refused(onnx_folder: Path, tmp_path: Path) -> None:
    files = read_bundle(onnx_folder)
    old = json.loads(files[DESCRIPTION]) | {"version": 1}
    write_bundle(tmp_path, {**files, DESCRIPTION: json.dumps(old).encode()})
    with pytest.raises(FormatError, match="this release reads version 2"):
        load_exported(tmp_path)


def test_a_description_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    data = {"name": "points", "mean": (0.5, 0.5), "std": (1.0, 2.0)}
    export(mlp(), tmp_path / "good", rule="latest", example=points(), format="torch-export", data=data)
    stored = load_exported(tmp_path / "good", trusted=True).description["data"]
    assert stored == {"name": "points", "mean": [0.5, 0.5], "std": [1.0, 2.0]}
    for wrong in ({**data, "std": (0.0, 1.0)}, {"mean": (1.0,)}, {**data, "mean": (float("nan"), 0.0)}):
        with pytest.raises(OptionError, match="the description of these stages"):
            export(mlp(), tmp_path / "bad", rule="latest", example=points(), data=wrong)
    assert not (tmp_path / "bad").exists()
