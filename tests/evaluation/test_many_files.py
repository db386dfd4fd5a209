"""Evaluation of many files: the numbers of one file, the same bytes however it runs, and every row once."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import anytime
from anytime.artifacts import write_bundle
from anytime.calibrate import tune
from anytime.cli import run
from anytime.errors import AnytimeError, IntegrityError, MissingExtraError, NonFiniteError, OptionError, OverlapError
from anytime.evaluation import files as listing
from anytime.evaluation.blocks import rows_for_sets, some_rows, uniforms
from anytime.evaluation.files import cut, paths_of

PROGRAM = Path(__file__).with_name("resume_program.py")
EXITS, ROWS, CLASSES = 3, 700, 6
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, CLASSES, ROWS)
LOGITS = (RANDOM.normal(size=(EXITS, ROWS, CLASSES)) + 2 * np.eye(CLASSES)[LABELS]).astype("f4")
CUTS = (0, 150, 151, 400, 700)


def part(number: int) -> tuple[np.ndarray, np.ndarray]:
    rows = slice(CUTS[number], CUTS[number + 1])
    return LOGITS[:, rows], LABELS[rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The rows in four files of different kinds and lengths, and a file without rows."""
    made = tmp_path / "logits"
    made.mkdir()
    for number, save in enumerate((save_npz, save_npy, save_safetensors, save_compressed)):
        save(made / str(number), *part(number))
    np.savez(made / "4-empty.npz", logits=np.zeros((EXITS, 0, CLASSES), "f4"), labels=np.zeros(0, int))
    return made


def save_npz(path: Path, logits: np.ndarray, labels: np.ndarray) -> None:
    np.savez(path.with_suffix(".npz"), logits=logits, labels=labels)


def save_npy(path: Path, logits: np.ndarray, labels: np.ndarray) -> None:
    np.save(path.with_suffix(".npy"), logits)
    np.save(path.with_suffix(".labels.npy"), labels)


def save_safetensors(path: Path, logits: np.ndarray, labels: np.ndarray) -> None:
    save_file({"logits": np.ascontiguousarray(logits), "labels": labels}, path.with_suffix(".safetensors"))


def save_compressed(path: Path, logits: np.ndarray, labels: np.ndarray) -> None:
    np.savez_compressed(path.with_suffix(".npz"), logits=logits, labels=labels)


def text(found: anytime.evaluation.Evaluation) -> str:
    return json.dumps(found.to_json())


def check_same(one: Any, other: Any, path: str = "") -> None:
    """Counts are identical, sums differ by 1e-6 at most."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            check_same(value, other[name], f"{path}/{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (value, its) in enumerate(zip(one, other, strict=True)):
            check_same(value, its, f"{path}/{index}")
    elif any(name in path for name in ("percent", "count", "learned", "forgot", "accuracy", "set_", "support", "agreement")):
        assert one == other, path
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7), path
    else:
        assert one == other, path


def rules(found: anytime.evaluation.Evaluation) -> Any:
    return found.to_json()["rules"]


def test_many_files_have_the_metrics_of_one(folder: Path) -> None:
    one, many = anytime.evaluate(LOGITS, LABELS), anytime.evaluate(folder)
    check_same(rules(one), rules(many))
    assert many.settings == one.settings
    starts = dict(zip(("0.npz", "1.npy", "2.safetensors", "3.npz"), CUTS, strict=False))
    assert [starts[str(each.file)] + each.row for each in many.worst] == [each.row for each in one.worst]
    assert [starts[str(each.file)] + each.row for each in many.examples] == [each.row for each in one.examples]


@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_parts_of_large_files_have_the_metrics_of_one(folder: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "compiled":
        pytest.importorskip("numba", reason="compiled code needs numba")
    whole = anytime.evaluate(LOGITS, LABELS, engine=engine)
    monkeypatch.setattr(listing, "_MAPPED_NUMBERS", 64 * EXITS * CLASSES)
    assert len(cut(paths_of(folder) or [], None, probabilities=False)) == 3 + 1 + 4 + 5
    check_same(rules(whole), rules(anytime.evaluate(folder, engine=engine)))


def test_the_published_logits_have_the_same_metrics_in_many_files(tmp_path: Path) -> None:
    shared = os.environ.get("ANYTIME_SHARED", "")
    path = Path(shared) / "reference" / "msdnet-cifar10-check.npz"
    file = anytime.open_logits(path) if shared and path.is_file() else anytime.samples.cifar100_msdnet()
    logits, labels = file.logits.array, file.labels
    assert labels is not None
    for number, (start, stop) in enumerate(((0, 301), (301, 302), (302, logits.shape[1]))):
        np.savez(tmp_path / f"{number}.npz", logits=logits[:, start:stop], labels=labels[start:stop].numpy())
    check_same(rules(anytime.evaluate(file)), rules(anytime.evaluate(tmp_path)))


def test_files_may_be_a_glob_a_list_or_repeated_with_their_labels(folder: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.mkdir()
    for number in (0, 1):
        np.save(labels / f"{number}.npy", part(number)[1])
    expected = text(anytime.evaluate([folder / "0.npz", folder / "1.npy"]))
    assert text(anytime.evaluate(f"{folder}/[01].*")) == expected
    assert text(anytime.evaluate([f"{folder}/0.*", str(folder / "1.npy")])) == expected
    assert text(anytime.evaluate(f"{folder}/[01].*", f"{labels}/*.npy")) == expected


def test_parquet_and_arrow_files_have_the_same_metrics(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    from pyarrow import feather, parquet

    expected = rules(anytime.evaluate(folder))
    kind = pa.list_(pa.list_(pa.float32()))
    for number, name in ((0, "0.npz"), (2, "2.safetensors"), (3, "3.npz")):
        (folder / name).unlink()
        logits, labels = part(number)
        rows = logits.transpose(1, 0, 2)
        if number == 0:
            table = pa.table({"logits": pa.array(rows.tolist(), kind), "label": labels})
            parquet.write_table(table, folder / "0.parquet", row_group_size=40)
        elif number == 2:
            table = pa.table(
                {"logits": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(rows)), "labels": labels}
            )
            parquet.write_table(table, folder / "2.parquet", row_group_size=100)
        else:
            columns = {f"exit_{exit + 1}": pa.array(logits[exit].tolist(), pa.list_(pa.float32())) for exit in range(EXITS)}
            feather.write_feather(pa.table({**columns, "labels": labels}), str(folder / "3.arrow"), chunksize=70)
    check_same(expected, rules(anytime.evaluate(folder)))


def test_ranges_of_parquet_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    from pyarrow import feather, parquet

    logits, labels = part(3)
    table = pa.table(
        {"logits": pa.array(logits.transpose(1, 0, 2).tolist(), pa.list_(pa.list_(pa.float32()))), "labels": labels}
    )
    parquet.write_table(table, folder / "a.parquet", row_group_size=64)
    feather.write_feather(table, str(folder / "a.feather"), chunksize=64)
    whole = rules(anytime.evaluate(folder / "3.npz"))
    monkeypatch.setattr(listing, "_READ_NUMBERS", 37 * EXITS * CLASSES)
    for name in ("a.parquet", "a.feather"):
        assert len(cut([folder / name], None, probabilities=False)) == 9
        check_same(whole, rules(anytime.evaluate(folder / name)))


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.dataset", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[parquet\]"):
        anytime.evaluate(tmp_path)


def test_processes_and_finished_parts_change_no_byte(folder: Path, tmp_path: Path) -> None:
    expected = text(anytime.evaluate(folder))
    work = tmp_path / "work"
    assert text(anytime.evaluate(folder, processes=2)) == expected
    assert text(anytime.evaluate(folder, work=work)) == expected
    assert not work.exists()


@pytest.fixture
def half_done(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Files, and the folder of an evaluation that was interrupted at the last of them."""
    work = tmp_path / "work"

    def stop(done: int, total: int) -> None:
        if done > CUTS[3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        anytime.evaluate(folder, work=work, progress=stop)
    return folder, work


def kept(work: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}


def test_an_interrupted_evaluation_keeps_what_is_done(half_done: tuple[Path, Path]) -> None:
    folder, work = half_done
    assert len(kept(work)) == 3 + 3  # the scores of three files, the fourth has one row, and the sums of three
    assert text(anytime.evaluate(folder, work=work)) == text(anytime.evaluate(folder))
    assert not work.exists()


def test_sums_of_few_rows_take_little_space(half_done: tuple[Path, Path]) -> None:
    _, work = half_done
    assert (
        max(path.stat().st_size for path in work.glob("*.safetensors")) < 300_000
    )  # the histograms alone have two million bytes


def test_damaged_sums_are_computed_again(half_done: tuple[Path, Path]) -> None:
    folder, work = half_done
    for number, path in enumerate(sorted(work.glob("*.safetensors"))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if number % 2 else data)
    assert text(anytime.evaluate(folder, work=work)) == text(anytime.evaluate(folder))


def test_a_changed_file_is_evaluated_again(half_done: tuple[Path, Path]) -> None:
    folder, work = half_done
    before = (folder / "0.npz").stat()
    logits, labels = part(0)
    save_npz(folder / "0", logits[:, ::-1], labels[::-1])
    os.utime(folder / "0.npz", ns=(before.st_atime_ns, before.st_mtime_ns))  # the size and the time are as before
    found = anytime.evaluate(folder, work=work)
    assert text(found) == text(anytime.evaluate(folder))


def test_other_settings_do_not_use_the_sums(half_done: tuple[Path, Path]) -> None:
    folder, work = half_done
    other: dict[str, Any] = {"strict": True, "seed": 3, "rules": ["product"], "costs": [1.0, 2.0, 4.0]}
    assert text(anytime.evaluate(folder, work=work, **other)) == text(anytime.evaluate(folder, **other))


def test_a_file_that_changes_during_the_evaluation_is_refused(folder: Path) -> None:
    def touch(done: int, total: int) -> None:
        save_npz(folder / "0", *part(0))

    with pytest.raises(IntegrityError, match="has changed while it was evaluated"):
        anytime.evaluate(folder, progress=touch)


def test_files_of_one_name_in_several_folders_are_told_apart(folder: Path, tmp_path: Path) -> None:
    for number in (0, 3):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        save_npz(tmp_path / "runs" / str(number) / "test", *part(number))
    found = anytime.evaluate(tmp_path / "runs" / "*" / "test.npz")
    assert {each.file for each in found.examples} == {"0/test.npz", "3/test.npz"}
    (tmp_path / "runs" / "5").mkdir()
    save_npz(tmp_path / "runs" / "5" / "test", *part(0))
    with pytest.raises(OverlapError, match=r"5/test\.npz begins with the same rows as 0/test\.npz"):
        anytime.evaluate(tmp_path / "runs" / "*" / "test.npz")


def test_files_in_float64_beside_others_have_the_metrics_of_float32(tmp_path: Path) -> None:
    """Among classes without probability, whose scores are 1 up to rounding, the type of a file must not decide."""
    logits = LOGITS.copy()
    logits[:, range(0, ROWS, 5), LABELS[::5]] = -1  # so many labels that one of them is the threshold
    for number, (first, last) in enumerate(pairwise(CUTS)):
        values = logits[:, first:last].astype("f8" if number % 2 else "f4")
        save_npz(tmp_path / str(number), values, LABELS[first:last])
    check_same(rules(anytime.evaluate(logits, LABELS)), rules(anytime.evaluate(tmp_path)))


def test_progress_counts_all_rows(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    anytime.evaluate(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (ROWS, ROWS)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {ROWS}


def test_rules_tuned_on_these_rows_are_refused_over_all_files(folder: Path) -> None:
    rule = tune(torch.from_numpy(LOGITS[:, 150:400]), torch.from_numpy(LABELS[150:400])).choose(at_least={})
    with pytest.raises(OverlapError, match="tuned on"):
        anytime.evaluate(folder, rules={"tuned": rule})


def test_random_numbers_and_rows_do_not_depend_on_where_parts_begin() -> None:
    (whole,) = uniforms([50], 3, [7, 2])
    for first in (0, 1, 2, 17):
        (rest,) = uniforms([50 - first], 3, [7, 2], first=first)
        assert torch.equal(rest, whole[:, first:])
    for samples in (4, 1000, 2_000_000):
        chosen = rows_for_sets(samples, 1)
        assert len(chosen.unique()) == len(chosen) == min(samples // 5, 1 << 17)
        assert torch.equal(chosen, chosen.sort().values)
    assert len(some_rows(10**9, 200, np.random.default_rng(0)).unique()) == 200


def test_errors_pass_between_processes() -> None:
    error = NonFiniteError("NaN", expected="numbers", fix="none", exit=2, row=7)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.exit, again.row) == (NonFiniteError, str(error), 2, 7)
    missing = pickle.loads(pickle.dumps(MissingExtraError("a", expected="b", fix="c")))
    assert str(missing) == "a\n  expected: b\n  fix: c"


def test_an_error_in_another_process_is_the_same(folder: Path) -> None:
    save_npz(folder / "0", part(0)[0] * np.nan, part(0)[1])
    messages = []
    for processes in (1, 2):
        with pytest.raises(AnytimeError) as raised:
            anytime.evaluate([folder / "3.npz", folder / "0.npz"], processes=processes)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_the_command_takes_folders_globs_and_several_files(folder: Path, tmp_path: Path, capsys: Any) -> None:
    documents = []
    for files in ([str(folder)], [f"{folder}/*"], [str(path) for path in paths_of(folder) or []]):
        assert run(["evaluate", *files, "--json", "--processes", "1"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1] == documents[2] == json.loads(text(anytime.evaluate(folder)))
    assert run(["evaluate", str(folder), "--out", str(tmp_path / "report")]) == 0
    assert "5 files" in (tmp_path / "report" / "report.html").read_text()
    assert not (tmp_path / "report.partial").exists()


def test_a_folder_of_a_run_is_its_test_logits(folder: Path, capsys: Any) -> None:
    save_npz(folder / "test", *part(3))
    assert text(anytime.evaluate(folder)) == text(anytime.evaluate(folder / "3.npz"))


def test_the_weights_of_a_saved_model_beside_its_logits_are_no_logits(tmp_path: Path) -> None:
    anytime.save(anytime.create_model("mlp-toy", classes=CLASSES), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    save_safetensors(tmp_path / "logits", *part(3))
    assert paths_of(tmp_path) == [tmp_path / "logits.safetensors"]


def test_logits_that_a_command_wrote_into_a_folder_count(folder: Path, tmp_path: Path) -> None:
    logits = (folder / "3.npz").read_bytes()
    write_bundle(tmp_path / "demo", {"logits.npz": logits, "metrics.json": b"{}"}, kind="demo")
    assert paths_of(tmp_path / "demo") == [tmp_path / "demo" / "logits.npz"]


def test_a_manifest_of_another_program_does_not_matter(folder: Path) -> None:
    before = text(anytime.evaluate(folder))
    (folder / "manifest.json").write_text('{"name": "an app"}')
    assert text(anytime.evaluate(folder)) == before


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_kills_lose_no_row_and_change_no_byte(kills: int) -> None:
    done = subprocess.run([sys.executable, PROGRAM, str(kills), "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] >= 0.9 * kills
    assert found["status"] == found["lost"] == 0
    assert found["same"]
    assert found["counted"] == [found["rows"]]
    assert not found["left"]


def test_a_mapper_that_ends_early_is_named(folder: Path) -> None:
    with pytest.raises(OptionError, match="the mapper returned nothing for"):
        anytime.evaluate(folder, mapper=lambda work, tasks: iter(()))
