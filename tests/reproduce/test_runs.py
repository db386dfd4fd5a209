"""Runs are found by their settings, and damaged ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytime.errors import FormatError, IntegrityError, MissingFileError, NonFiniteError, ShapeError
from anytime.reproduce.group import ECE, SET_SIZE, Group
from anytime.reproduce.needs import FINETUNED, MSDNET, MSDNET_100, SEEDS_100, Need
from anytime.reproduce.runs import Runs, network_of, on_shared_rows, read_run

Publish = Callable[..., Path]
RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    ("model", "objective", "network"),
    [
        ("msdnet-cifar", "joint", "msdnet"),
        ("msdnet-cifar", "joint-then-product", "msdnet-finetuned"),
        ("msdnet-cifar", "product", "msdnet-product"),
        ("msdnet-cifar", "equilibrium", "imta-stage1"),
        ("msdnet-cifar", "one-for-all", "imta"),
        ("msdnet-cifar-linear", "l2w", "l2w"),
        ("sdn-resnet-cifar-56", "sdn", "sdn"),
        ("ztw-resnet-cifar-56", "joint", "ztw"),
        ("dvit-cifar", "joint", "dvit"),
    ],
)
def test_the_network_follows_from_model_and_objective(model: str, objective: str, network: str) -> None:
    assert network_of({"model": model, "recipe": {"objective": objective}}) == network


def test_runs_are_found_by_network_and_data_in_the_order_of_seeds(publish: Publish) -> None:
    publish("b", seed=1)
    publish("a", seed=2)
    publish("c", seed=0)
    publish("ten", data="cifar10")
    folder = publish("tuned", objective="joint-then-product")
    runs = Runs.open(folder)
    assert [run.name for run in runs.find("msdnet", "cifar100")] == ["c", "b", "a"]
    assert set(runs.by_data(MSDNET)) == {"cifar10", "cifar100"}
    assert [run.name for run in runs.need(FINETUNED)] == ["tuned"]


def test_logits_metrics_and_rows_come_from_the_bundle(publish: Publish) -> None:
    run = Runs.open(publish("a")).every[0]
    logits, labels = run.logits()
    assert logits.shape == (7, 60, 10)
    assert logits.dtype == torch.float32
    assert run.rows() == 60
    assert run.rows("val") == 40
    accuracy = (logits.argmax(-1) == labels).double().mean(1)
    assert run.metrics()["latest"].accuracy == pytest.approx(accuracy.tolist())
    assert run.accuracy() == run.metrics()["latest"].accuracy
    assert run.indices().tolist() == list(range(60))
    assert not run.has_weights


def test_costs_are_those_of_the_network(publish: Publish) -> None:
    assert Runs.open(publish("a")).every[0].macs()[0] == pytest.approx(15.14e6, rel=1e-3)


@pytest.mark.parametrize("name", ["test-sample.npz", "test-metrics.json", "config.json"])
def test_a_damaged_run_is_refused(publish: Publish, name: str) -> None:
    folder = publish("a")
    path = folder / "a" / name
    path.write_bytes(path.read_bytes() + b" ")
    run = Runs.open(folder).every[0]
    with pytest.raises(IntegrityError, match=name):
        run.metrics()


def test_a_run_without_logits_is_named(publish: Publish) -> None:
    run = Runs.open(publish("a")).every[0]
    del run.files["test-sample.npz"]
    with pytest.raises(FormatError, match=r"run a has no test-sample\.npz"):
        run.logits()


def test_missing_weights_are_named(publish: Publish) -> None:
    with pytest.raises(FormatError, match="weights"):
        Runs.open(publish("a")).every[0].load()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "x", "data": "y", "recipe": {"objective": "z"}}'])
def test_settings_that_cannot_be_read_are_named(publish: Publish, text: str) -> None:
    folder = publish("a")
    (folder / "a" / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        Runs.open(folder)


def test_settings_that_are_a_folder_are_named(publish: Publish) -> None:
    folder = publish("a")
    (folder / "b" / "config.json").mkdir(parents=True)
    with pytest.raises(FormatError, match=r"config\.json"):
        Runs.open(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        {"rules": []},
        {"rules": {"latest": [1, 2]}},
        {"rules": {"latest": {"accuracy": [float("nan")]}}},
        {"samples": "many"},
        {"classes": 0},
        {"exits": None},
        {"rules": {"latest": {}}},
    ],
    ids=str,
)
def test_metrics_that_are_not_an_evaluation_are_refused(publish: Publish, spoil: dict[str, Any]) -> None:
    run = Runs.open(publish("a", change=lambda _, document: document.update(spoil))).every[0]
    with pytest.raises(FormatError, match=r"test-metrics\.json"):
        run.metrics()


def test_a_rule_or_metric_that_was_not_measured_is_named(publish: Publish) -> None:
    def spoil(arrays: dict[str, Any], document: dict[str, Any]) -> None:
        del document["rules"]["caching"]
        del document["rules"]["product"]["ece"]
        document["rules"]["product"]["set_size"] = None

    run = Runs.open(publish("a", change=spoil)).every[0]
    assert set(run.metrics()) == {"latest", "product"}
    with pytest.raises(FormatError, match=r"run a has no caching in test-metrics\.json"):
        run.metrics(["caching"])
    group = Group.published([run], ("product",))
    for metric in (ECE, SET_SIZE):
        with pytest.raises(FormatError, match=rf"run a has no {metric.name} for product in test-metrics\.json"):
            group.curve("product", metric)


def test_nan_logits_are_refused_with_the_name_of_the_run(publish: Publish) -> None:
    def spoil(arrays: dict[str, Any], document: dict[str, Any]) -> None:
        arrays["logits"][1, 2, 3] = np.nan

    run = Runs.open(publish("some-run", change=spoil)).every[0]
    with pytest.raises(NonFiniteError, match="the test logits of run some-run hold 1 values"):
        run.logits()


@pytest.mark.parametrize("indices", [None, np.arange(3), np.arange(60.0)], ids=["none", "few", "fractions"])
def test_kept_rows_without_one_index_per_row_are_refused(publish: Publish, indices: Any) -> None:
    def spoil(arrays: dict[str, Any], document: dict[str, Any]) -> None:
        arrays["indices"] = indices
        if indices is None:
            del arrays["indices"]

    run = Runs.open(publish("a", change=spoil)).every[0]
    with pytest.raises(FormatError, match=r"run a has no index per row in test-sample\.npz"):
        run.indices()


def test_rows_are_shared_by_networks_with_as_many_exits(publish: Publish) -> None:
    publish("a")
    runs = Runs.open(publish("b", objective="joint-then-product", exits=4)).every
    with pytest.raises(ShapeError, match="a has 7 exits; b has 4 exits"):
        on_shared_rows(runs)


def test_a_folder_that_is_a_run_is_the_one_run(publish: Publish) -> None:
    assert [run.name for run in Runs.open(publish("a") / "a").every] == ["a"]


def test_a_missing_run_says_how_to_get_it(publish: Publish) -> None:
    runs = Runs.open(publish("a"))
    with pytest.raises(MissingFileError, match="no run of msdnet-finetuned") as caught:
        runs.need(FINETUNED)
    assert "anytime train cifar100-msdnet-finetuned" in caught.value.fix
    with pytest.raises(MissingFileError, match="1 of 2 runs"):
        runs.need(SEEDS_100)
    with pytest.raises(MissingFileError, match="no recipe"):
        runs.need(Need("dvit"))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no folder"):
        Runs.open(tmp_path / "nowhere")


def test_folders_that_are_not_runs_are_ignored(publish: Publish) -> None:
    folder = publish("a")
    (folder / "notes").mkdir()
    (folder / "README.md").write_text("hello")
    assert len(Runs.open(folder).every) == 1


def test_stand_ins_are_made_once_and_only_where_a_run_is_missing(publish: Publish) -> None:
    asked: list[Need] = []
    runs = Runs.open(publish("a"))
    run = runs.every[0]

    def make(need: Need) -> tuple[object, ...]:
        asked.append(need)
        return (run, run)

    helped = runs.with_stand_in(make)  # type: ignore[arg-type]
    assert helped.need(MSDNET_100) == (run,)
    assert helped.need(SEEDS_100) == helped.need(SEEDS_100) == (run, run)
    assert asked == [SEEDS_100]


def test_the_sample_is_split_into_disjoint_rows(smoke: Runs) -> None:
    run = smoke.every[0]
    (test, labels), (val, _) = run.logits("test"), run.logits("val")
    assert test.shape == (7, 600, 100)
    assert val.shape == (7, 400, 100)
    assert not {row.tobytes() for row in test[0].numpy()} & {row.tobytes() for row in val[0].numpy()}
    assert run.rows() == len(labels) == 600


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no folder results beside the tests")
def test_the_published_runs_can_be_read() -> None:
    runs = Runs.open(RESULTS)
    found = runs.find("msdnet", "cifar100")
    assert [run.seed for run in found] == [0, 1, 2, 3, 4]
    for run in found:
        logits, labels = run.logits()
        assert logits.shape[0] == 7
        assert np.isclose(run.accuracy()[-1], (logits[-1].argmax(-1) == labels).double().mean(), atol=0.03)


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no folder results beside the tests")
def test_the_rows_held_out_follow_from_the_settings(publish: Publish) -> None:
    run = read_run(RESULTS / "msdnet-cifar100-49500-seed0")
    split = run.split(50_000)
    assert torch.equal(split.held_out, torch.from_numpy(np.sort(np.random.RandomState(0).permutation(50_000)[:500])))
    kept = read_run(RESULTS / "msdnet-cifar100-seed0")
    assert set(kept.indices("val").tolist()) <= set(kept.split(50_000).held_out.tolist())
    with pytest.raises(FormatError, match="cannot be read as the settings of a run"):
        Runs.open(publish("a")).every[0].split(50_000)
