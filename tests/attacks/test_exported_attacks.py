"""Folders of exported stages made by an enemy, with a manifest that is right: no code runs, no other file is read."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import anytime
from anytime.artifacts import read_bundle, write_bundle
from anytime.cli import run
from anytime.errors import FileError, FormatError, IntegrityError, OptionError, UntrustedError
from anytime.models import MLP, MLPConfig
from anytime.run.export import export, load_exported

EXITS, CLASSES = 2, 5


def model() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=CLASSES, width=8, exits=EXITS)).eval()


@pytest.fixture(scope="module")
def torch_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("torch")
    return read_bundle(export(model(), folder, rule="latest", example=torch.zeros(1, 2), format="torch-export"))


@pytest.fixture(scope="module")
def onnx_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    return read_bundle(export(model(), tmp_path_factory.mktemp("onnx"), rule="latest", example=torch.zeros(1, 2)))


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def edited(file: bytes, **changes: bytes) -> bytes:
    """A zip archive with members replaced or added; names are given without the archive's root, with _ for /."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as old, zipfile.ZipFile(result, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        members = {name: old.read(name) for name in old.namelist()}
        members |= {f"{root}/{name}": data for name, data in changes.items()}
        for name, data in members.items():
            new.writestr(name, data)
    return result.getvalue()


def member(file: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return archive.read(f"{archive.namelist()[0].partition('/')[0]}/{name}")


def sample_inputs(file: bytes, marker: Path) -> bytes:
    return edited(file, **{"data/sample_inputs/model.pt": pickle.dumps(Payload(marker))})


def pickled_weight(file: bytes, marker: Path) -> bytes:
    name = "data/weights/model_weights_config.json"
    config = json.loads(member(file, name))
    next(iter(config["config"].values()))["use_pickle"] = True
    compact = json.dumps(config, separators=(",", ":")).encode()
    return edited(file, **{name: compact, "data/weights/weight_0": pickle.dumps(Payload(marker))})


def legacy_weights(file: bytes, marker: Path) -> bytes:
    return edited(file, **{"data/weights/model.pt": pickle.dumps(Payload(marker))})


def legacy_constants(file: bytes, marker: Path) -> bytes:
    return edited(file, **{"data/constants/model.pt": pickle.dumps(Payload(marker))})


def opaque_object(file: bytes, marker: Path) -> bytes:
    config = {"config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}}
    return edited(
        file,
        **{
            "data/constants/model_constants_config.json": json.dumps(config).encode(),
            "data/constants/opaque_obj_0": pickle.dumps(Payload(marker)),
        },
    )


def symbolic_expression(file: bytes, marker: Path) -> bytes:
    graph = json.loads(member(file, "models/model.json"))
    code = f"__import__('os').mkdir({str(marker)!r})"

    def poison(value: Any) -> None:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
            if key == "expr_str":
                value[key] = code
            else:
                poison(part)

    poison(graph)
    return edited(file, **{"models/model.json": json.dumps(graph).encode()})


CODE = [sample_inputs, pickled_weight, legacy_weights, legacy_constants, opaque_object, symbolic_expression]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of torch's readers were called."""
    called: list[str] = []
    for home, name in ((torch.export, "load"), (torch, "load"), (torch.jit, "load")):
        monkeypatch.setattr(home, name, lambda *_, name=f"{home.__name__}.{name}", **__: called.append(name))
    return called


def arrays(folder: Path) -> str:
    import numpy as np

    path = folder / "input.npy"
    np.save(path, np.zeros((1, 2), np.float32))
    return str(path)


@pytest.mark.parametrize("attack", CODE)
def test_code_in_stages_of_torch_does_not_run(
    attack: Callable[[bytes, Path], bytes], torch_files: dict[str, bytes], tmp_path: Path, no_torch: list[str]
) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "stages"
    write_bundle(folder, {**torch_files, "stage_1.pt2": attack(torch_files["stage_1.pt2"], marker)})
    for load in (load_exported, anytime.Runner.load):
        with pytest.raises(UntrustedError, match=r"trusted=True"):
            load(folder)
    for words in (["predict", str(folder), arrays(tmp_path)], ["profile", str(folder)], ["export", str(folder), "--out", "x"]):
        assert run(words) == 2
    assert not marker.exists()
    assert no_torch == []


def test_torch_s_files_under_another_name_or_kind_are_not_read_by_torch(
    torch_files: dict[str, bytes], tmp_path: Path, no_torch: list[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    marker = tmp_path / "marker"
    description = json.loads(torch_files["exported.json"])
    files = {"stage_1.onnx": sample_inputs(torch_files["stage_1.pt2"], marker), "stage_2.onnx": torch_files["stage_2.pt2"]}
    for stage, name in zip(description["stages"], files, strict=True):
        stage["file"] = name
    write_bundle(tmp_path / "stages", {**files, "exported.json": json.dumps({**description, "kind": "onnx"}).encode()})
    with pytest.raises(FormatError, match="not an ONNX file"):
        load_exported(tmp_path / "stages")
    assert not marker.exists()
    assert no_torch == []


@pytest.mark.parametrize("trusted", ["false", 1, None, "no", 0])
def test_trust_is_true_or_false(trusted: Any, torch_files: dict[str, bytes], tmp_path: Path, no_torch: list[str]) -> None:
    write_bundle(tmp_path, torch_files)
    with pytest.raises(OptionError, match="trusted is"):
        load_exported(tmp_path, trusted=trusted)
    assert no_torch == []


def test_stages_of_torch_run_for_who_trusts_them(torch_files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    write_bundle(folder, torch_files)
    with anytime.Runner.load(folder, trusted=True) as runner:
        assert runner.predict(torch.zeros(1, 2)).exit == EXITS
    assert run(["predict", str(folder), arrays(tmp_path), "--trust"]) == 0


# What an ONNX file may try.


def first_tensor(proto: Any) -> Any:
    from anytime.run.export.onnx_safety import messages

    return next(each for each in messages(proto) if each.DESCRIPTOR.name == "TensorProto" and len(each.dims) == 2)


def point_outside(tensor: Any, location: str) -> None:
    count = 4 * tensor.dims[0] * tensor.dims[1]
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = 1
    for key, value in (("location", location), ("offset", "0"), ("length", str(count))):
        tensor.external_data.add(key=key, value=value)


def external(proto: Any) -> None:
    point_outside(first_tensor(proto), "secret.bin")


def external_outside(proto: Any) -> None:
    point_outside(first_tensor(proto), "../secret.bin")


def external_absolute(proto: Any) -> None:
    point_outside(first_tensor(proto), "/etc/hostname")


def external_memory(proto: Any) -> None:
    point_outside(first_tensor(proto), "*/_ORT_MEM_ADDR_/*")


def external_without_saying_so(proto: Any) -> None:
    first_tensor(proto).external_data.add(key="location", value="secret.bin")


def in_constant(proto: Any) -> None:
    import onnx

    tensor = onnx.helper.make_tensor("c", onnx.TensorProto.FLOAT, [2, 2], [0.0] * 4)
    point_outside(tensor, "secret.bin")
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["unused"], value=tensor))


def in_subgraph(proto: Any) -> None:
    import onnx

    tensor = onnx.helper.make_tensor("c", onnx.TensorProto.FLOAT, [2, 2], [0.0] * 4)
    point_outside(tensor, "secret.bin")
    out = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [2, 2])
    branch = onnx.helper.make_graph([], "branch", [], [out], initializer=[tensor])
    yes = onnx.helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True])
    proto.graph.initializer.append(yes)
    proto.graph.node.insert(0, onnx.helper.make_node("If", ["yes"], ["unused"], then_branch=branch, else_branch=branch))


def in_function(proto: Any) -> None:
    import onnx

    tensor = onnx.helper.make_tensor("c", onnx.TensorProto.FLOAT, [2, 2], [0.0] * 4)
    point_outside(tensor, "secret.bin")
    node, opset = onnx.helper.make_node("Constant", [], ["y"], value=tensor), onnx.helper.make_opsetid("", 18)
    proto.functions.append(onnx.helper.make_function("mine", "f", [], ["y"], [node], [opset]))


def sparse(proto: Any) -> None:
    import onnx

    values = onnx.helper.make_tensor("values", onnx.TensorProto.FLOAT, [1], [1.0])
    places = onnx.helper.make_tensor("places", onnx.TensorProto.INT64, [1], [0])
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [1 << 20, 1 << 20]))


def foreign_operator(proto: Any) -> None:
    import onnx

    proto.opset_import.append(onnx.helper.make_opsetid("evil", 1))
    proto.graph.node.insert(0, onnx.helper.make_node("Run", [], ["unused"], domain="evil"))


def contributed_operator(proto: Any) -> None:
    import onnx

    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    proto.graph.node.insert(0, onnx.helper.make_node("EPContext", [], ["unused"], domain="com.microsoft", ep_cache_context="a"))


def huge_claim(proto: Any) -> None:
    first_tensor(proto).dims[0] = 1 << 50


def overflowing_claim(proto: Any) -> None:
    first_tensor(proto).dims[:] = [1 << 32, 1 << 32]


def negative_claim(proto: Any) -> None:
    first_tensor(proto).dims[0] = -1


OUTSIDE = [external, external_outside, external_absolute, external_memory, external_without_saying_so, in_constant, in_subgraph]
REFUSED = [in_function, sparse, foreign_operator, contributed_operator, huge_claim, overflowing_claim, negative_claim]


def changed(file: bytes, attack: Callable[[Any], None]) -> bytes:
    import onnx

    proto = onnx.load_from_string(file)
    attack(proto)
    data: bytes = proto.SerializeToString()
    return data


@pytest.mark.parametrize("attack", [*OUTSIDE, *REFUSED])
def test_an_onnx_stage_that_reaches_outside_or_claims_too_much_never_gets_to_the_runtime(
    attack: Callable[[Any], None], onnx_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    (tmp_path / "here").mkdir()
    for place in (tmp_path, tmp_path / "here"):
        (place / "secret.bin").write_bytes(bytes(1 << 12))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: pytest.fail("the runtime saw the file"))
    write_bundle("stages", {**onnx_files, "stage_1.onnx": changed(onnx_files["stage_1.onnx"], attack)})
    with pytest.raises(FormatError, match="external data" if attack in OUTSIDE else "operator|holds|claims"):
        load_exported("stages")
    assert run(["predict", "stages", arrays(tmp_path)]) == 2


def test_bytes_that_look_like_the_runtime_s_own_format_are_taken_as_onnx_or_refused(
    onnx_files: dict[str, bytes], tmp_path: Path
) -> None:
    """ONNX Runtime tells its own format, which is not checked, by four letters that a protobuf may hold too."""
    write_bundle(tmp_path / "own", {**onnx_files, "stage_1.onnx": b"\x18\x00\x00\x00ORTM" + bytes(64)})
    with pytest.raises(FormatError, match="not an ONNX file"):
        load_exported(tmp_path / "own")
    field = b"\x82\x7d\x88\x00ORTM" + bytes(4)  # an unknown field of eight bytes, the letters where they are looked for
    write_bundle(tmp_path / "both", {**onnx_files, "stage_1.onnx": field + onnx_files["stage_1.onnx"]})
    assert len(list(load_exported(tmp_path / "both").run(torch.zeros(1, 2)))) == EXITS


def test_settings_hidden_in_a_stage_do_not_reach_the_runtime(
    onnx_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attack(proto: Any) -> None:
        settings = {"session_options": {"enable_profiling": 1}}
        proto.metadata_props.add(key="ort_config", value=json.dumps(settings))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    write_bundle("stages", {**onnx_files, "stage_1.onnx": changed(onnx_files["stage_1.onnx"], attack)})
    assert len(list(load_exported("stages").run(torch.zeros(1, 2)))) == EXITS
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]


def test_a_stage_that_gives_other_shapes_than_it_declares_is_named(onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    import onnx

    def attack(proto: Any) -> None:
        """Twice as many rows as inputs."""
        for node in proto.graph.node:
            for place, name in enumerate(node.output):
                if name == "log_probs":
                    node.output[place] = "once"
        proto.graph.node.append(onnx.helper.make_node("Concat", ["once", "once"], ["log_probs"], axis=0))

    write_bundle(tmp_path, {**onnx_files, "stage_1.onnx": changed(onnx_files["stage_1.onnx"], attack)})
    with pytest.raises(FormatError, match="stage 1 gives tensors of the shapes"):
        list(load_exported(tmp_path).run(torch.zeros(3, 2)))


@pytest.mark.parametrize("file", [b"", b"\x00" * 64, b"PK\x03\x04", b"\x0a" * 1000, b"\x3a\x02" * 500])
def test_what_is_not_an_onnx_file_is_named(file: bytes, onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    write_bundle(tmp_path, {**onnx_files, "stage_2.onnx": file})
    with pytest.raises(FormatError, match=r"stage_2\.onnx cannot be used"):
        load_exported(tmp_path)


# What the folder and its description may try.


def test_a_stage_that_is_a_link_is_refused(onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    write_bundle(tmp_path / "stages", onnx_files)
    (tmp_path / "stages" / "stage_1.onnx").rename(tmp_path / "elsewhere")
    (tmp_path / "stages" / "stage_1.onnx").symlink_to("../elsewhere")
    with pytest.raises(IntegrityError, match="symbolic link"):
        load_exported(tmp_path / "stages")


def test_a_stage_of_many_gigabytes_is_refused_before_it_is_read(onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    write_bundle(tmp_path, onnx_files)
    size = 1 << 36  # a sparse file: it takes no room on the disk
    os.truncate(tmp_path / "stage_1.onnx", size)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"]["stage_1.onnx"]["bytes"] = size
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=f"has {size} bytes"):
        load_exported(tmp_path)


def test_files_that_no_stage_names_are_not_read(onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    write_bundle(tmp_path, {**onnx_files, "other.bin": b"x"})
    (tmp_path / "other.bin").unlink()
    assert load_exported(tmp_path).num_exits == EXITS


WILD: list[tuple[tuple[str | int, ...], Any]] = [
    *((("exits",), value) for value in (0, -1, 3, 1.0, True, "2", None, 10**9, 10**400)),
    *((("classes",), value) for value in (0, -1, 4, 1.0, True, "5", None, 10**12)),
    *((("macs",), value) for value in ([1.0], [2.0, 1.0], [0.0, 1.0], [1.0, float("nan")], ["1", "2"], [1, 10**400], {}, 3)),
    *((("class_names",), value) for value in ([], ["a"], "abcde", [1, 2, 3, 4, 5], {"a": 1})),
    *((("rule",), value) for value in (None, 3, ["product"], {})),
    *((("kind",), value) for value in ("coreml", None, ["onnx"], {}, "ONNX")),
    *((("data",), value) for value in (3, [], {"name": "x"}, {"name": 1, "mean": [0.5], "std": [1.0]})),
    *((("data",), {"name": "x", "mean": [0.5], "std": std}) for std in ([0.0], [-1.0], [1.0, 1.0], ["1"], [float("inf")])),
    *((("version",), value) for value in (0, 3, "2", None, [2], 1e400)),
    *((("format",), value) for value in ("", None, 3)),
    *((("stages",), value) for value in ({}, None, [], [{}], [{}, {}], [None, None], ["stage_1.onnx", "stage_2.onnx"])),
    *(
        (("stages", 0, "file"), value)
        for value in ("../secret", "/etc/passwd", "stage_2.onnx", "manifest.json", "", None, 3, ["a"])
    ),
    *((("stages", 0, "file"), value) for value in ("absent.onnx", "exported.json", "a\0b", "x" * 10_000)),
    *((("stages", 0, "inputs"), value) for value in (None, {}, [], [{}], [3], [None])),
    *((("stages", 1, "outputs"), value) for value in (None, {}, [], [{}], [3])),
    *((("stages", 0, "inputs", 0, "name"), value) for value in ("y", None, 3, "")),
    *(
        (("stages", 0, "inputs", 0, "dtype"), value)
        for value in ("load", "float64", "int64", None, 3, "__class__", ["float32"])
    ),
    *(
        (("stages", 0, "inputs", 0, "shape"), value)
        for value in ([], ["batch"], ["batch", 3], [1, 2], ["batch", -2], ["batch", 2.0])
    ),
    *(
        (("stages", 0, "inputs", 0, "shape"), value)
        for value in (None, "batch", ["batch", True], ["batch", 10**30], ["batch"] * 1000)
    ),
    *((("stages", 0, "outputs", 1, "shape"), value) for value in (["batch", 6], ["batch"], [])),
    *((("stages", 0, "outputs", 0, "name"), value) for value in ("log_probs", "p")),
]


@pytest.mark.parametrize(("place", "value"), WILD, ids=lambda value: repr(value)[:40])
def test_a_description_with_wild_values_is_refused(
    place: tuple[str | int, ...], value: Any, onnx_files: dict[str, bytes], tmp_path: Path
) -> None:
    document = json.loads(onnx_files["exported.json"])
    *way, last = place
    inner = document
    for step in way:
        inner = inner[step]
    inner[last] = value
    write_bundle(tmp_path, {**onnx_files, "exported.json": json.dumps(document).encode()})
    with pytest.raises(FileError) as caught:
        load_exported(tmp_path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b"null", b"[" * 100_000, b'{"format": NaN}', b"\xff\xfe", b"9" * 10_000]
)
def test_a_description_that_is_not_one_is_refused(data: bytes, onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    write_bundle(tmp_path, {**onnx_files, "exported.json": data})
    with pytest.raises(FormatError):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    "name", ["kind", "exits", "classes", "class_names", "macs", "data", "rule", "stages", "format", "version"]
)
def test_a_description_that_lacks_a_value_is_refused(name: str, onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    document = json.loads(onnx_files["exported.json"])
    del document[name]
    write_bundle(tmp_path, {**onnx_files, "exported.json": json.dumps(document).encode()})
    with pytest.raises(FormatError):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    "rule", ["__import__('os').mkdir('marker')", "Cached(" * 10_000, "product(weights=(1,2,3,4))", "", "\0"]
)
def test_the_rule_of_a_description_is_parsed_and_not_run(rule: str, onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    document = json.loads(onnx_files["exported.json"]) | {"rule": rule}
    write_bundle(tmp_path / "stages", {**onnx_files, "exported.json": json.dumps(document).encode()})
    with pytest.raises(anytime.AnytimeError):
        anytime.Runner.load(tmp_path / "stages")
    assert not Path("marker").exists()


def test_a_folder_without_a_description_is_refused(onnx_files: dict[str, bytes], tmp_path: Path) -> None:
    write_bundle(tmp_path, {name: data for name, data in onnx_files.items() if name != "exported.json"})
    with pytest.raises(FormatError, match=r"does not name 'exported\.json'"):
        load_exported(tmp_path)
