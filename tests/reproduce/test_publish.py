"""Published runs on texts have what the studies need, no machine names or paths, and no large file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from anytime.artifacts import read_bundle, write_json
from anytime.reproduce import find
from anytime.reproduce.runs import Runs, data_of, network_of
from anytime.reproduce.studies.text import NAMES
from anytime.train.settings import Source, read_recipe, resolve

SCRIPT = Path(__file__).parents[2] / "results" / "publish.py"
SINGLE = {"layers": [6], "head": "plain"}

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="no results/publish.py beside the tests")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("publish", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(folder: Path, *, data: str = "clinc150", classes: int = 12, rows: int = 200, **settings: Any) -> Path:
    """A folder as a run on texts leaves it, sorted by class; its logits are made up."""
    exits = 1 if "options" in settings else 6
    flags = {"root": str(folder), "init": str(folder / "some_package" / "model"), **settings}
    config = resolve(read_recipe(f"{data}-minilm"), Source("a test", flags))
    folder.mkdir(parents=True)
    config.save(folder / "config.yaml")
    (folder / "log.csv").write_text("epoch\n1\n")
    write_json(folder / "summary.json", {"seed": 0})
    write_json(folder / "data.json", {"name": data, "class_names": [str(label) for label in range(classes)]})
    (folder / "vocab.txt").write_text("[PAD]\n" * 1000)
    rng = np.random.default_rng(0)
    for split, count in (("test", rows), ("val", rows // 2), ("oos", rows // 2)):
        labels = np.sort(rng.integers(0, classes, count))
        logits = (2 * rng.normal(size=(exits, count, classes)) + 3 * np.eye(classes)[labels]).astype(np.float16)
        known = {} if split == "oos" else {"labels": labels}
        arrays: dict[str, Any] = {"logits": logits, "indices": np.arange(count), **known}
        np.savez(folder / f"{split}.npz", **arrays)
    return folder


def test_a_run_of_texts_is_published_for_the_studies(script: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "results"
    script.main([str(trained(tmp_path / "a")), str(place / "minilm-clinc150-seed0")])
    script.main([str(trained(tmp_path / "b", options=SINGLE)), str(place / "minilm-clinc150-single-seed0")])
    script.main([str(trained(tmp_path / "c", classes=5)), str(place / "minilm-clinc150-classes5-seed0")])
    config = json.loads((place / "minilm-clinc150-classes5-seed0" / "config.json").read_text())
    assert config["classes"] is None  # trained on five classes, published as all: its settings decide
    runs = Runs.open(place)
    whole = next(run for run in runs.every if run.name == "minilm-clinc150-seed0")
    assert (whole.network, whole.data, whole.rows(), whole.classes()) == ("minilm", "clinc150", 200, 12)
    assert set(whole.metrics()) == set(NAMES)
    assert set(whole.metrics(split="val")) == {"latest", "caching", "product"}
    outside = whole.outside_logits()
    assert outside is not None
    assert outside.shape == (6, 100, 12)
    single = next(run for run in runs.every if run.name == "minilm-clinc150-single-seed0")
    assert (single.network, len(single.accuracy())) == ("minilm-single", 1)
    assert sorted(single.files) == [
        "config.json",
        "data.json",
        "log.csv",
        "summary.json",
        "test-metrics.json",
        "val-metrics.json",
    ]
    only = Runs((whole, single), "a test")
    found = find("text").run(only)
    assert found.comparisons[0].ours.mean == pytest.approx(100 * (single.accuracy()[0] - whole.accuracy()[-1]))
    assert find("out-of-scope").run(only).table


def test_nothing_of_the_machine_is_kept_but_what_it_was(script: ModuleType, tmp_path: Path) -> None:
    files = script.publish(trained(tmp_path / "run"))
    assert str(tmp_path).encode() not in b"".join(files.values())
    assert json.loads(files["config.json"])["init"] == "some_package"
    assert "vocab.txt" not in files


@pytest.mark.parametrize(("lost", "flags"), [("test.npz", []), ("model.safetensors", ["--weights"])])
def test_a_run_that_lacks_what_is_asked_for_is_refused_and_nothing_is_written(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str, flags: list[str]
) -> None:
    run = trained(tmp_path / "run")
    (run / lost).unlink(missing_ok=True)
    with pytest.raises(SystemExit) as caught:
        script.main([str(run), str(tmp_path / "out"), *flags])
    assert caught.value.code == 2
    assert f"has no {lost}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rows_are_a_random_sample_and_files_stay_small(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_SAMPLE", 2 * 6 * 12 * 40)
    files = script.publish(trained(tmp_path / "run"))
    (tmp_path / "sample.npz").write_bytes(files["test-sample.npz"])
    stored = np.load(tmp_path / "sample.npz")
    assert stored["logits"].shape == (6, 40, 12)
    assert len(set(stored["labels"].tolist())) > 6  # the first forty rows have three
    whole = np.load(tmp_path / "run" / "test.npz")
    assert np.array_equal(stored["logits"], whole["logits"][:, stored["indices"]])
    assert json.loads(files["test-metrics.json"])["samples"] == 200
    assert max(map(len, files.values())) < 3_000_000


def test_some_classes_are_a_data_set_of_their_own_without_out_of_scope_queries(script: ModuleType, tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("classes: null", "classes: 12"))
    files = script.publish(run)
    config = json.loads(files["config.json"])
    assert (network_of(config), data_of(config)) == ("minilm", "clinc150-12")
    assert "oos-sample.npz" not in files


def test_runs_on_images_keep_rows_of_which_a_longer_sample_has_all(script: ModuleType, tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    for name in ("oos.npz", "data.json", "config.yaml"):
        (run / name).unlink()
    (run / "config.json").write_text(json.dumps({"model": "msdnet-cifar", "data": "cifar100", "recipe": {}}))
    kept = []
    for rows in (50, 20):
        files = script.publish(run, rows=(rows, 20), costs=[1, 2, 3, 4, 5, 6])
        (tmp_path / "sample.npz").write_bytes(files["test-sample.npz"])
        kept.append(np.load(tmp_path / "sample.npz")["indices"].tolist())
    assert [len(rows) for rows in kept] == [50, 20]
    assert set(kept[1]) <= set(kept[0])
    document = json.loads(files["test-metrics.json"])
    assert document["costs"] == [1, 2, 3, 4, 5, 6]
    assert set(document["rules"]) == {"latest", "caching", "product"}


@pytest.mark.parametrize("folder", sorted(SCRIPT.parent.glob("minilm-*")), ids=lambda folder: folder.name)
def test_what_is_published_of_texts_is_whole_small_and_names_no_folder(folder: Path) -> None:
    files = read_bundle(folder)
    assert set(files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert max(map(len, files.values())) < 3_000_000
    config = json.loads(files["config.json"])
    assert "root" not in config
    assert "/" not in config["init"]
    summary, metrics = json.loads(files["summary.json"]), json.loads(files["test-metrics.json"])
    assert metrics["rules"]["latest"]["accuracy"] == pytest.approx(summary["test_accuracy"], abs=1e-4)
