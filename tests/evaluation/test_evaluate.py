"""Evaluation end to end: reference metrics, file formats, blocks, seeds, custom rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import anytime
from anytime.combine import Prediction
from anytime.errors import AnytimeError, DtypeError, IntegrityError, OptionError
from anytime.evaluation import figures as charts
from anytime.metrics import RuleMetrics


def some(rows: int = 150, classes: int = 6, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    logits = 2 * torch.randn(4, rows, classes, generator=generator, dtype=torch.float64)
    logits += 2 * torch.nn.functional.one_hot(labels, classes)
    return logits.to(dtype), labels


@pytest.mark.parametrize("name", ["msdnet-cifar10-val", "msdnet-cifar100-val"])
def test_metrics_agree_with_an_independent_implementation(name: str, shared: Path) -> None:
    wanted = json.loads((shared / "reference" / "expected.json").read_text())[name]
    found = anytime.evaluate(shared / "reference" / f"{name}.npz")
    for rule, figures in wanted.items():
        for figure, value in figures.items():
            tolerance = 0.02 if "percent" in figure else 0.0002 if figure == "accuracy" else 1e-3
            assert getattr(found.rules[rule], figure) == pytest.approx(value, abs=tolerance), (rule, figure)


def test_prediction_sets_shrink_as_in_the_paper(shared: Path) -> None:
    figures = anytime.evaluate(shared / "reference" / "msdnet-cifar100-val.npz").rules["product"]
    assert figures.set_size[0] == pytest.approx(11, abs=1.5)
    assert figures.set_size[-1] == pytest.approx(5, abs=1.5)
    assert all(abs(share - 0.95) < 0.02 for share in figures.set_coverage)


def assert_same(one: anytime.evaluation.Evaluation, other: anytime.evaluation.Evaluation, tolerance: float) -> None:
    def compare(a, b, where: str) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, list | tuple):
            assert len(a) == len(b)
            for index, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{where}[{index}]")
        elif isinstance(a, float):
            assert a == pytest.approx(b, abs=tolerance), where
        else:
            assert a == b, where

    compare(one.to_json(), other.to_json(), "")


@pytest.fixture(scope="module")
def whole() -> anytime.Evaluation:
    return anytime.evaluate(*some(dtype=torch.float64))


@settings(max_examples=8)
@given(st.integers(1, 200))
def test_results_do_not_depend_on_the_block_size(whole: anytime.Evaluation, block_rows: int) -> None:
    logits, labels = some(dtype=torch.float64)
    assert_same(anytime.evaluate(logits, labels, block_rows=block_rows), whole, 1e-9)


def test_results_do_not_depend_on_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytime.evaluation import blocks

    logits, labels = some(dtype=torch.float64)
    whole = anytime.evaluate(logits, labels)
    monkeypatch.setattr(blocks, "_CHUNK_BYTES", 4 * 4 * 6 * 20)
    assert_same(anytime.evaluate(logits, labels, block_rows=7), whole, 1e-9)


def test_all_file_formats_give_the_same_metrics(tmp_path: Path) -> None:
    logits, labels = some()
    np.savez(tmp_path / "a.npz", logits=logits.numpy(), labels=labels.numpy())
    np.savez_compressed(tmp_path / "b.npz", logits=logits.numpy(), labels=labels.numpy().astype(np.uint8))
    np.save(tmp_path / "c.npy", logits.numpy())
    np.save(tmp_path / "labels.npy", labels.numpy())
    save_file({"logits": logits, "labels": labels}, tmp_path / "d.safetensors")
    np.save(tmp_path / "e.npy", np.asfortranarray(logits.numpy()))
    np.save(tmp_path / "f.npy", logits.numpy().astype(">f4"))
    whole = anytime.evaluate(logits, labels)
    for name in ("a.npz", "b.npz", "d.safetensors"):
        assert_same(anytime.evaluate(tmp_path / name), whole, 1e-6)
    for name in ("c.npy", "e.npy", "f.npy"):
        assert_same(anytime.evaluate(tmp_path / name, tmp_path / "labels.npy"), whole, 1e-6)
    assert_same(anytime.evaluate(str(tmp_path / "c.npy"), labels), whole, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    logits, labels = some(dtype=dtype)
    save_file({"logits": logits, "labels": labels}, tmp_path / "half.safetensors")
    assert_same(anytime.evaluate(tmp_path / "half.safetensors"), anytime.evaluate(logits.float(), labels), 1e-6)


def test_inputs_and_files_are_not_modified(tmp_path: Path) -> None:
    logits, labels = some()
    np.savez(tmp_path / "a.npz", logits=logits.numpy(), labels=labels.numpy())
    before, kept = (tmp_path / "a.npz").read_bytes(), logits.clone()
    anytime.evaluate(logits, labels)
    anytime.evaluate(tmp_path / "a.npz")
    assert torch.equal(logits, kept)
    assert (tmp_path / "a.npz").read_bytes() == before


def test_the_number_of_torch_threads_is_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        anytime.evaluate(*some())
        assert torch.get_num_threads() == 2
        with pytest.raises(anytime.AnytimeError):
            anytime.evaluate(some()[0] * float("nan"), some()[1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_seed_decides_sets_and_samples() -> None:
    logits, labels = some()
    one, same, other = (anytime.evaluate(logits, labels, seed=seed) for seed in (0, 0, 1))
    assert_same(one, same, 1e-6)
    assert one.rules["product"].set_size != other.rules["product"].set_size
    assert [each.row for each in one.examples] != [each.row for each in other.examples]
    assert one.rules["product"].accuracy == other.rules["product"].accuracy


def test_without_labels_final_answers_are_followed() -> None:
    logits, _ = some()
    found = anytime.evaluate(logits)
    figures = found.rules["latest"]
    assert not found.labelled
    assert figures.accuracy is None
    assert figures.set_size is None
    assert figures.final_drop_percent["0.1"] > 0
    assert figures.agreement[-1] == 1.0
    assert found.worst[0].label is None
    json.dumps(found.to_json(), allow_nan=False)


def test_probabilities_are_accepted_with_the_option() -> None:
    logits, labels = some()
    wanted = anytime.evaluate(logits, labels, rules=["latest", "caching"])
    for scores in (logits.softmax(-1), logits.log_softmax(-1)):
        found = anytime.evaluate(scores, labels, probabilities=True)
        assert found.rules["latest"].accuracy == wanted.rules["latest"].accuracy
        assert found.rules["caching"].ece == pytest.approx(wanted.rules["caching"].ece, abs=1e-4)
        assert found.rules["product"].collapsed_percent == pytest.approx([100.0] * 4)


def test_tiny_data_has_no_sets() -> None:
    logits, labels = some(rows=4)
    found = anytime.evaluate(logits, labels)
    assert found.rules["latest"].set_size is None
    assert found.settings["sets"] is None
    few = anytime.evaluate(*some(rows=5))
    assert few.settings["sets"]["calibration_rows"] == 1
    assert few.rules["product"].set_size == (few.classes,) * few.exits
    assert few.rules["product"].set_coverage == (1.0,) * few.exits
    one = anytime.evaluate(logits[:, :1], labels[:1])
    assert one.samples == 1
    json.dumps(one.to_json(), allow_nan=False)


def test_worst_inputs_lose_most() -> None:
    logits, labels = some()
    found = anytime.evaluate(logits, labels)
    drops = [each.drop["latest"] for each in found.worst]
    assert drops == sorted(drops, reverse=True)
    prediction = anytime.Latest()(logits)
    label = prediction.probs.gather(-1, labels.expand(4, -1)[..., None])[..., 0]
    assert drops[0] == pytest.approx(float((label.cummax(0).values - label).amax()))
    assert found.worst[0].label == int(labels[found.worst[0].row])


def test_custom_rules_are_measured() -> None:
    def uniform(logits: torch.Tensor) -> Prediction:
        return Prediction(torch.zeros_like(logits).log_softmax(-1), torch.zeros(logits.shape[:2], dtype=torch.bool))

    logits, labels = some()
    found = anytime.evaluate(logits, labels, rules={"uniform": uniform, "product": anytime.Product()})
    assert found.rules["uniform"].label_probability == pytest.approx([1 / 6] * 4)
    assert list(found.rules) == ["uniform", "product"]


def test_rules_may_be_objects_and_texts() -> None:
    found = anytime.evaluate(
        *some(), rules=[anytime.Latest(), "product(softplus)", anytime.Product(anytime.combine.Heaviside())]
    )
    assert list(found.rules)[:2] == ["latest", "product(softplus)"]
    assert "Heaviside" in list(found.rules)[2]


def test_a_logit_that_is_not_finite_is_named_by_its_row_in_the_file() -> None:
    logits, labels = some(rows=300)
    logits[2, 271, 3] = float("nan")
    with pytest.raises(anytime.AnytimeError, match="exit 3, row 271"):
        anytime.evaluate(logits, labels, block_rows=20)


def test_progress_reaches_the_end() -> None:
    seen = []
    anytime.evaluate(*some(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (150, 150)


def test_tensors_with_gradients_are_accepted() -> None:
    logits, labels = some()
    assert anytime.evaluate(logits.requires_grad_(), labels).samples == 150


def test_a_large_compressed_file_gives_the_same_numbers_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = some()
    np.savez_compressed(tmp_path / "a.npz", logits=logits.numpy(), labels=labels.numpy())
    whole = anytime.evaluate(tmp_path / "a.npz")
    monkeypatch.setattr("anytime.arrays._HELD", 500)
    assert isinstance(anytime.open_logits(tmp_path / "a.npz").logits.array, np.memmap)
    assert_same(anytime.evaluate(tmp_path / "a.npz"), whole, 1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space the way Linux does")
@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_a_file_larger_than_the_memory_allowed_is_evaluated(tmp_path: Path, engine: str) -> None:
    if engine == "compiled":
        pytest.importorskip("numba")
    exits, rows, classes = 4, 60_000, 250
    path = tmp_path / "large.npy"
    logits = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(exits, rows, classes))
    rng = np.random.default_rng(0)
    for exit in range(exits):
        logits[exit] = rng.standard_normal((1, classes), dtype=np.float32)
    logits.flush()
    np.save(tmp_path / "labels.npy", rng.integers(0, classes, rows))
    # 240 MB of logits, and 160 MB of memory beyond what the code takes. Each thread needs some: two are enough.
    script = (
        "import os, re, resource, sys, torch, anytime, anytime.evaluation\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
        "anytime.evaluate(torch.randn(4, 8, 250), torch.arange(8), engine=sys.argv[3])\n"
        "used = int(re.search(r'VmData:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + (160 << 20),) * 2)\n"
        "print(anytime.evaluate(sys.argv[1], sys.argv[2], engine=sys.argv[3]).samples)"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "labels.npy"), engine]
    done = subprocess.run(command, capture_output=True, text=True, env={"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"})
    assert done.stdout.strip() == str(rows), done.stderr[-2000:]


@pytest.mark.parametrize("labelled", [True, False])
def test_metrics_round_trip_through_json(labelled: bool) -> None:
    logits, labels = some()
    for found in anytime.evaluate(logits, labels if labelled else None).rules.values():
        assert RuleMetrics.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_metrics_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(OptionError, match="agreement"):
        RuleMetrics.from_json({"accuracy": [0.5], "ece": [0.1]})
    with pytest.raises(OptionError):
        RuleMetrics.from_json({"consistency": {"slope": 1.0}})


def test_torch_has_one_thread_from_the_first_operation_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its threads would wait for each other after every small operation."""
    threads: list[int] = []

    def note(*args: Any, **options: Any) -> Any:
        threads.append(torch.get_num_threads())

    monkeypatch.setattr("anytime.evaluation.opening.check_scale", note)
    monkeypatch.setattr("anytime.evaluation.evaluating.forget", note)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        anytime.evaluate(torch.randn(3, 40, 5), torch.arange(40) % 5, rules=["product"])
        assert (threads, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("labelled", [True, False])
def test_rules_that_are_added_together_have_the_sums_of_each(monkeypatch: pytest.MonkeyPatch, labelled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(4, 200, 6, generator=generator), torch.randint(0, 6, (200,), generator=generator)
    known, rules = labels if labelled else None, ("latest", "caching", "product")
    apart = anytime.evaluate(logits, known, rules=rules, costs=(1, 2.5, 3, 7)).to_json()
    monkeypatch.setattr("anytime.metrics.summary.is_read_at_once", lambda values: False)  # as on a GPU
    joined = anytime.evaluate(logits, known, rules=rules, costs=(1, 2.5, 3, 7)).to_json()
    assert joined == apart


def test_labels_in_a_file_belong_to_logits_in_any_form(tmp_path: Path) -> None:
    logits, labels = 2 * torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5
    np.save(tmp_path / "logits.npy", logits.numpy())
    np.save(tmp_path / "labels.npy", labels.numpy())
    wanted = anytime.evaluate(logits, labels).to_json()
    for each in (logits, logits.numpy(), tmp_path / "logits.npy", anytime.open_logits(tmp_path / "logits.npy")):
        assert anytime.evaluate(each, tmp_path / "labels.npy").to_json() == wanted


def test_the_table_says_how_drops_are_counted() -> None:
    logits, labels = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5
    for strict, sign in ((False, "≥"), (True, ">")):
        found = anytime.evaluate(logits, labels, strict=strict)
        words = {figure.chart.x.title for figure in charts.figures(found)} & {"drops by at least", "drops by more than"}
        assert words == {"drops by more than" if strict else "drops by at least"}
        names = [row[0] for row in found.table().rows]
        assert {f"label drops by {sign} .1, %", f"final answer drops by {sign} .1, %"} <= set(names)


def test_a_mapped_file_that_changes_is_noticed_on_every_path(tmp_path: Path) -> None:
    logits, labels = 2 * torch.randn(3, 400, 5, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 5
    path = tmp_path / "logits.npy"
    np.save(tmp_path / "labels.npy", labels.numpy())

    def change(done: int, total: int) -> None:
        with path.open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\0")
        os.utime(path, (0, 0))  # a clock may be too coarse to tell this from the first writing

    for opened in (lambda: (path, labels), lambda: (anytime.open_logits(path, tmp_path / "labels.npy"), None)):
        np.save(path, logits.numpy())
        with pytest.raises(IntegrityError, match="has changed"):
            anytime.evaluate(*opened(), progress=change)


@pytest.mark.parametrize(
    "values",
    [np.ma.masked_array(np.ones((2, 3, 4)), mask=False), np.ones((2, 3, 4), np.longdouble), torch.ones(2, 3, 4).to_sparse()],
    ids=["masked", "long double", "sparse"],
)
def test_arrays_without_plain_numbers_are_refused(values: Any) -> None:
    with pytest.raises(DtypeError):
        anytime.evaluate(values)
    with pytest.raises(DtypeError):
        anytime.Product()(values)


def test_trajectories_check_their_labels() -> None:
    prediction = anytime.Product()(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)))
    assert anytime.metrics.follow(prediction, np.array([0, 1, 2, 0], np.uint8)).correct is not None
    for wrong in (torch.tensor([0, 1, 2, 3]), torch.tensor([0.0, 1, 2, 0]), torch.tensor(1)):
        with pytest.raises(AnytimeError):
            anytime.metrics.follow(prediction, wrong)
