"""Texts: the published data sets, classes, token ids, and batches by length."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.data import (
    TextData,
    TokenData,
    WordPiece,
    draw_classes,
    hold_out,
    load_text,
    plan_batches,
    take_classes,
    tokenize,
)
from anytime.errors import (
    DtypeError,
    FileError,
    FormatError,
    IntegrityError,
    LabelError,
    MissingExtraError,
    MissingFileError,
    OptionError,
    ShapeError,
)

WORDS = WordPiece({name: at for at, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c"])})


def texts(*lines: str, labels: list[int] | None = None, classes: int = 3, split: str = "train") -> TextData:
    wanted = torch.tensor(labels or [at % classes for at in range(len(lines))])
    names = tuple(f"class {label}" for label in range(classes))
    return TextData("toy", split, lines, wanted, names, torch.arange(len(lines)))


# The published data sets.

PUBLISHED = {
    "imdb": (2, {"train": 25_000, "test": 25_000}),
    "sst2": (2, {"train": 60_614, "val": 6_735, "test": 872}),
    "trec": (6, {"train": 5_452, "test": 500}),
    "banking77": (77, {"train": 10_003, "test": 3_080}),
    "clinc150": (150, {"train": 15_000, "val": 3_000, "test": 4_500, "oos_train": 100, "oos_val": 100, "oos_test": 1_000}),
}


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    pytest.importorskip("pyarrow", reason="pyarrow reads the texts")
    place = shared / "data" / "text"
    if not (place / "imdb.parquet").is_file():
        pytest.skip(f"no texts in {place}")
    return place


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_data_sets_have_their_sizes(name: str, folder: Path) -> None:
    classes, sizes = PUBLISHED[name]
    found = load_text(name, folder)
    assert {split: len(data) for split, data in found.items()} == sizes
    for split, data in found.items():
        assert data.split == split
        assert data.classes == (1 if split.startswith("oos") else classes)
        assert data.labels.unique().tolist() == list(range(data.classes))


def test_trec_has_fine_classes(folder: Path) -> None:
    fine, coarse = load_text("trec", folder, fine=True), load_text("trec", folder)
    assert fine["train"].classes == 50
    for split, data in fine.items():
        names = [data.class_names[label].partition(":")[0] for label in data.labels.tolist()]
        assert names == [coarse[split].class_names[label] for label in coarse[split].labels.tolist()]


def test_texts_in_both_splits_of_imdb_are_found_and_can_be_removed(folder: Path) -> None:
    whole = load_text("imdb", folder)
    test = set(whole["test"].texts)
    assert sum(text in test for text in whole["train"].texts) == 123
    alone = load_text("imdb", folder, distinct=True)
    assert len(alone["test"]) == 25_000
    assert not test.intersection(alone["train"].texts)
    assert len(set(alone["train"].texts)) == len(alone["train"]) == 24_904 - 123


def test_labels_mean_what_their_names_say(folder: Path) -> None:
    data = load_text("banking77", folder)["train"]
    assert data.class_names[data.labels[0]] == "card_arrival"
    assert data.texts[0] == "I am still waiting on my card?"
    reviews = load_text("sst2", folder)["train"]
    good = [label for text, label in zip(reviews.texts, reviews.labels.tolist(), strict=True) if "masterpiece" in text]
    assert reviews.class_names[Counter(good).most_common(1)[0][0]] == "positive"


def test_the_folder_comes_from_the_environment(shared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTIME_SHARED", str(shared))
    assert len(load_text("trec")["test"]) == 500
    monkeypatch.delenv("ANYTIME_SHARED")
    with pytest.raises(OptionError, match="root is not set"):
        load_text("trec")


# Wrong files.


def write(path: Path, **columns: list[Any]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow writes the texts")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow writes the texts")
    parquet.write_table(arrow.table(columns), path)


def test_splits_of_a_small_file(tmp_path: Path) -> None:
    write(
        tmp_path / "clinc150.parquet",
        split=["train", "oos_test", "test", "train", "dev"],
        text=["x", "y", "z", "x", "z"],
        label=["b", "oos", "a", "a", "b"],
    )
    found = load_text("clinc150", tmp_path)
    assert found["train"].class_names == ("a", "b")
    assert found["train"].labels.tolist() == [1, 0]
    assert found["val"].texts == ("z",)
    assert found["oos_test"].class_names == ("oos",)
    alone = load_text("clinc150", tmp_path, distinct=True)
    assert [alone[split].texts for split in ("train", "val", "test")] == [("x",), (), ("z",)]
    assert alone["train"].rows.tolist() == [0]


@pytest.mark.parametrize(
    "columns",
    [
        {"split": ["train", "test"], "text": ["x", "y"]},
        {"split": ["train", "test"], "text": ["x", None], "label": ["a", "a"]},
        {"split": ["train", "test"], "text": ["x", "y"], "label": ["a", "b"]},
        {"split": ["train", "test"], "text": ["x", "y"], "label": [0.5, 0.5]},
        {"split": ["train", "train"], "text": ["x", "y"], "label": ["a", "b"]},
        {"split": ["test"], "text": ["x"], "label": ["a"]},
    ],
    ids=["no labels", "no text", "new label", "numbers", "no test", "no train"],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    write(tmp_path / "trec.parquet", **columns)
    with pytest.raises(FormatError) as caught:
        load_text("trec", tmp_path)
    assert caught.value.path == tmp_path / "trec.parquet"


def test_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow reads the texts")
    with pytest.raises(MissingFileError, match=r"trec\.parquet"):
        load_text("trec", tmp_path)
    (tmp_path / "trec.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(IntegrityError):
        load_text("trec", tmp_path)


def test_any_bit_of_a_parquet_file_may_be_wrong(tmp_path: Path) -> None:
    columns = {"split": ["train", "train", "test"], "text": ["a é", "b", "c"], "label": ["x", "y", "x"]}
    write(tmp_path / "trec.parquet", **columns)
    whole, refused = (tmp_path / "trec.parquet").read_bytes(), 0
    for place in range(0, len(whole), 5):
        (tmp_path / "trec.parquet").write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            load_text("trec", tmp_path)
        except FileError:
            refused += 1
    assert refused > 20


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow"):
        load_text("trec", tmp_path)


def test_unknown_sets_and_classes_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'yelp'"):
        load_text("yelp", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="fine=True with 'imdb'"):
        load_text("imdb", tmp_path, fine=True)


# Classes.


@given(st.integers(1, 40), st.data())
def test_a_smaller_sample_of_classes_is_a_subset_of_a_larger_one(classes: int, data: st.DataObject) -> None:
    small, large = sorted(data.draw(st.tuples(st.integers(1, classes), st.integers(1, classes))))
    assert set(draw_classes(classes, small)) <= set(draw_classes(classes, large))
    assert len(draw_classes(classes, large)) == large
    assert draw_classes(classes, classes) == tuple(range(classes))


def test_taken_classes_are_relabelled() -> None:
    data = texts("p", "q", "r", "s", labels=[2, 0, 1, 2])
    for some in (data, tokenize(data, WORDS, length=4)):
        taken = take_classes(some, (0, 2))
        assert taken.labels.tolist() == [1, 0, 1]
        assert taken.class_names == ("class 0", "class 2")
        assert taken.rows.tolist() == [0, 1, 3]
        assert take_classes(some, (2, 0)).labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize("classes", [(), (0, 0), (3,), (-1,)], ids=str)
def test_classes_that_do_not_exist_are_refused(classes: tuple[int, ...]) -> None:
    with pytest.raises(OptionError):
        take_classes(texts("p", "q"), classes)
    with pytest.raises(OptionError):
        draw_classes(3, 4)


# Token ids.


def test_tokens_follow_their_texts() -> None:
    data = tokenize(texts("a b", "c", "a b c a b c"), WORDS, length=5)
    assert data.ids.tolist() == [[2, 4, 5, 3, 0], [2, 6, 3, 0, 0], [2, 4, 5, 6, 3]]
    assert data.lengths.tolist() == [4, 3, 5]
    assert (len(data), data.length, data.classes, data.pad) == (3, 5, 3, 0)
    taken = data.take(torch.tensor([2, 0]), split="val")
    assert taken.split == "val"
    assert taken.lengths.tolist() == [5, 4]
    assert taken.rows.tolist() == [2, 0]
    assert torch.equal(data.to("cpu").ids, data.ids)


def test_a_split_holds_rows_out() -> None:
    data = tokenize(texts(*"abcabc"), WORDS, length=4)
    kept, held = hold_out(6, 2).apply(data)
    assert sorted([*kept.rows.tolist(), *held.rows.tolist()]) == list(range(6))
    assert held.split == "val"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ids": torch.zeros(2, 4)}, DtypeError),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, ShapeError),
        ({"lengths": torch.tensor([1, 5])}, ShapeError),
        ({"lengths": torch.tensor([0, 4])}, ShapeError),
        ({"lengths": torch.tensor([4])}, ShapeError),
        ({"labels": torch.tensor([0, 3])}, LabelError),
        ({"labels": torch.tensor([0])}, LabelError),
        ({"rows": torch.arange(3)}, ShapeError),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_together_are_refused(change: dict[str, torch.Tensor], error: type[Exception]) -> None:
    parts = {
        "ids": torch.ones(2, 4, dtype=torch.int64),
        "lengths": torch.tensor([4, 4]),
        "labels": torch.tensor([0, 1]),
        "rows": torch.arange(2),
    }
    with pytest.raises(error):
        TokenData("toy", "train", class_names=("x", "y", "z"), **{**parts, **change})


# Batches by length.


@given(st.lists(st.integers(1, 32), max_size=60), st.integers(1, 9), st.sets(st.integers(1, 31)), st.booleans())
def test_batches_fit_their_rows(sizes: list[int], batch: int, some: set[int], training: bool) -> None:
    lengths, widths = torch.tensor(sizes, dtype=torch.int64), (*sorted(some), 32)
    generator = torch.Generator().manual_seed(0) if training else None
    plan = plan_batches(lengths, batch, widths=widths, generator=generator)
    rows = [row for part in plan for row in part.rows.tolist()]
    assert len(set(rows)) == len(rows)
    assert len(rows) == (len(sizes) // batch * batch if training else len(sizes))
    for part in plan:
        longest = int(lengths[part.rows].max())
        assert part.length == min(width for width in widths if width >= longest)
        assert len(part.rows) == batch or not training
    if not training:
        assert lengths[torch.tensor(rows, dtype=torch.int64)].tolist() == sorted(sizes)
        assert all(len(part.rows) == batch for part in plan[:-1])


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60), st.integers(1, 9))
def test_at_most_one_batch_per_width_has_shorter_rows(sizes: list[int], batch: int) -> None:
    lengths, widths = torch.tensor(sizes), (4, 8, 16, 32)
    fitting = [min(width for width in widths if width >= size) for size in sizes]
    plan = plan_batches(lengths, batch, widths=widths, generator=torch.Generator().manual_seed(0))
    mixed = [part.length for part in plan if len({fitting[row] for row in part.rows.tolist()}) > 1]
    assert len(mixed) == len(set(mixed))


def test_a_plan_depends_on_its_generator_only_and_drops_every_row_equally_often() -> None:
    lengths = torch.arange(1, 12)

    def plan(seed: int) -> list[tuple[list[int], int]]:
        made = plan_batches(lengths, 4, widths=(8, 16), generator=torch.Generator().manual_seed(seed))
        return [(part.rows.tolist(), part.length) for part in made]

    assert plan(0) == plan(0)
    assert plan(0) != plan(1)
    left_out = Counter(row for seed in range(300) for row in set(range(11)) - {row for rows, _ in plan(seed) for row in rows})
    assert sorted(left_out) == list(range(11))
    assert min(left_out.values()) > 40  # 900 left out of 11 rows: 82 each, five deviations below


@pytest.mark.parametrize(("batch", "widths"), [(0, (8,)), (2, ()), (2, (8, 8)), (2, (0, 8)), (2, (4,)), (True, (8,))], ids=str)
def test_a_wrong_plan_is_named(batch: int, widths: tuple[int, ...]) -> None:
    with pytest.raises(OptionError):
        plan_batches(torch.tensor([3, 8]), batch, widths=widths)


def test_the_rows_of_ag_news_are_split_and_keep_their_labels(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow writes the texts")
    path = Path(__file__).parents[2] / "tools" / "ag_news.py"
    spec = importlib.util.spec_from_file_location("ag_news", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    source = tmp_path / "test.csv"
    source.write_text("".join(f'"{row % 4 + 1}","Title {row}","first \\second ""{row}"""\n' for row in range(40)))
    tool.pack(source, tmp_path, test_rows=12)
    found = load_text("agnews", tmp_path)
    assert {split: len(data) for split, data in found.items()} == {"train": 28, "test": 12}
    for data in found.values():
        for text, label in zip(data.texts, data.labels.tolist(), strict=True):
            row = int(text.split(".")[0].removeprefix("Title "))
            assert text == f'Title {row}. first  second "{row}"'
            assert label == row % 4
