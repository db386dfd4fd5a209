"""Networks by name and in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anytime.artifacts import read_bundle, tensors_from_bytes, tensors_to_bytes, write_bundle
from anytime.errors import (
    DtypeError,
    FileError,
    FormatError,
    InputError,
    IntegrityError,
    MissingFileError,
    OptionError,
    ShapeError,
)
from anytime.models import MSDNet, create, load, load_weights, names, save

SMALL: dict[str, Any] = {"exits": 2, "base": 2, "step": 1, "channels": 4, "growth": 4}


def small(classes: int = 3, **options: Any) -> MSDNet:
    torch.manual_seed(0)
    network = create("msdnet-cifar", classes=classes, **{**SMALL, **options})
    assert isinstance(network, MSDNet)
    return network.eval()


def test_every_name_creates_a_network() -> None:
    assert {"msdnet-cifar", "msdnet-cifar-linear", "msdnet-imagenet-4", "msdnet-imagenet-6", "msdnet-imagenet-7"} <= set(
        names()
    )
    with torch.device("meta"):
        assert [create(name, classes=10).num_exits for name in names()][:5] == [7, 5, 5, 5, 5]


def test_an_unknown_name_suggests_close_ones() -> None:
    with pytest.raises(OptionError, match="did you mean 'msdnet-cifar'"):
        create("msdnet-cifer", classes=10)
    with pytest.raises(OptionError, match="pass one of those"):
        create("zzzz", classes=10)


def test_an_unknown_option_suggests_close_ones() -> None:
    with pytest.raises(OptionError, match="did you mean 'growth'"):
        create("msdnet-cifar", classes=10, grwth=6)


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(OptionError, match="growth is 'six'"):
        create("msdnet-cifar", classes=10, growth="six")


def test_a_saved_network_loads_equal(tmp_path: Path) -> None:
    network = small(prune="min", reduction=0.75, init="he")
    images = torch.randn(2, 3, 32, 32)
    save(network, tmp_path / "net")
    again = load(tmp_path / "net", classes=3)
    assert isinstance(again, MSDNet)
    assert again.config == network.config
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert {path.name for path in (tmp_path / "net").iterdir()} == {"config.json", "manifest.json", "model.safetensors"}
    with torch.no_grad():
        torch.testing.assert_close(again(images), network(images))


def test_the_dtype_survives(tmp_path: Path) -> None:
    save(small().bfloat16(), tmp_path)
    assert next(load(tmp_path).parameters()).dtype == torch.bfloat16


def test_a_loaded_network_can_be_saved_over_itself(tmp_path: Path) -> None:
    save(small(), tmp_path)
    before = read_bundle(tmp_path)
    save(load(tmp_path), tmp_path)
    assert read_bundle(tmp_path) == before


def test_loading_does_not_change_the_random_state(tmp_path: Path) -> None:
    save(small(), tmp_path)
    state = torch.get_rng_state()
    load(tmp_path)
    assert torch.equal(state, torch.get_rng_state())


def test_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    save(small(classes=3), tmp_path)
    with pytest.raises(FormatError, match="for 3 classes"):
        load(tmp_path, classes=10)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    save(small(), tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(IntegrityError):
        load(tmp_path)
    (tmp_path / name).write_bytes(data[:-7])
    with pytest.raises(IntegrityError):
        load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileError):
        load(tmp_path)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the config of a saved network, manifest and all."""
    save(small(), folder)
    files = read_bundle(folder)
    document = json.loads(files["config.json"])
    document["config"].update(changes.pop("config", {}))
    write_bundle(folder, {**files, "config.json": json.dumps({**document, **changes}).encode()})


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"classes": 4}},
        {"config": {"growth": 6}},
        {"config": {"growth": -1}},
        {"config": {"colour": "red"}},
        {"config": {"exits": 10**6}},
        {"config": {"channels": 2**20, "growth": 2**20, "growth_factors": [2**20] * 3}},
        {"architecture": "other"},
        {"architecture": ["msdnet"]},
        {"version": 2},
        {"further": 1},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    rewrite(tmp_path, **changes)
    with pytest.raises(FormatError):
        load(tmp_path)


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"version": 1, "architecture": "msdnet", "config": 1}']
)
def test_a_config_that_is_something_else_is_refused(tmp_path: Path, config: bytes) -> None:
    save(small(), tmp_path)
    write_bundle(tmp_path, {**read_bundle(tmp_path), "config.json": config})
    with pytest.raises(FormatError):
        load(tmp_path)


def test_a_bundle_of_something_else_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path, {"notes.txt": b"hello"})
    with pytest.raises(FormatError, match=r"notes\.txt"):
        load(tmp_path)


def test_weights_under_unknown_names_are_refused(tmp_path: Path) -> None:
    save(small(), tmp_path)
    files = read_bundle(tmp_path)
    weights = tensors_from_bytes(files["model.safetensors"])
    weights["surprise"] = torch.zeros(1)
    write_bundle(tmp_path, {**files, "model.safetensors": tensors_to_bytes(weights)})
    with pytest.raises(FormatError, match="1 unknown: surprise"):
        load(tmp_path)


def test_a_network_of_another_kind_is_not_saved(tmp_path: Path) -> None:
    class Mine(MSDNet):
        pass

    with pytest.raises(OptionError, match="Mine"):
        save(Mine(small().config), tmp_path / "net")
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_weights_load_under_the_names_of_wrappers(prefix: str) -> None:
    source, target = small(init="he"), small()
    load_weights(target, {prefix + name: tensor for name, tensor in source.state_dict().items()})
    assert all(torch.equal(tensor, target.state_dict()[name]) for name, tensor in source.state_dict().items())


def test_weights_without_counts_of_batches_load() -> None:
    source, target = small(init="he"), small()
    load_weights(target, {name: tensor for name, tensor in source.state_dict().items() if "num_batches" not in name})
    assert all(torch.equal(tensor, target.get_parameter(name)) for name, tensor in source.named_parameters())


def test_reference_weights_load(shared: Path) -> None:
    weights = load_file(shared / "reference" / "msdnet-cifar10.safetensors")
    load_weights(create("msdnet-cifar", classes=10), weights)
    with pytest.raises(ShapeError, match=r"classifier\.0\.linear\.weight has shape \(10, 128\)"):
        load_weights(create("msdnet-cifar", classes=100), weights)
    with pytest.raises(InputError, match="unknown: blocks"):
        load_weights(create("msdnet-cifar", classes=10, exits=6), weights)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.pop("classifier.1.linear.bias"), InputError, r"1 missing: classifier\.1\.linear\.bias"),
        (lambda w: w.update(extra=torch.zeros(1)), InputError, "1 unknown: extra"),
        (lambda w: w.update({"module.classifier.1.linear.bias": torch.zeros(3)}), InputError, "equal without their prefixes"),
        (lambda w: w.update({"classifier.1.linear.bias": torch.zeros(4)}), ShapeError, r"shape \(4,\)"),
        (lambda w: w.update({"classifier.1.linear.bias": torch.zeros(3, dtype=torch.int64)}), DtypeError, "int64"),
        (lambda w: w.update({"classifier.1.linear.bias": [0.0] * 3}), InputError, "values that are not tensors"),
    ],
    ids=["missing", "unknown", "twice", "shape", "kind", "no tensor"],
)
def test_weights_that_do_not_fit_change_nothing(change: Any, error: type[Exception], message: str) -> None:
    network = small()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    weights = {name: tensor + 1 for name, tensor in before.items()}
    change(weights)
    with pytest.raises(error, match=message):
        load_weights(network, weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
