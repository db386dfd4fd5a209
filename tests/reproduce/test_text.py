"""The studies of texts: which runs they use, how they name missing ones, and numbers by plain loops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from anytime.combine import Powers
from anytime.errors import LabelError, MissingFileError
from anytime.reproduce import Finding, Plot, find
from anytime.reproduce.needs import SINGLE_HEAD, TEXT
from anytime.reproduce.runs import Run, Runs
from anytime.reproduce.studies.out_of_scope import DOUBT, LOGIT, RAPS, SUPPORT, auroc
from anytime.reproduce.studies.text import FITTED, NAMES, SHIFTED, text_rules


def rows(classes: int, seed: int, *, count: int = 90, exits: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    noise = 1.5 * torch.randn(exits, count, classes, generator=generator)
    return noise + 2.5 * torch.nn.functional.one_hot(labels, classes) - 0.5, labels


def run_of(data: str, classes: int, *, seed: int = 0, exits: int = 3, network: str = "minilm") -> Run:
    parts = {"test": rows(classes, 2 * seed, exits=exits), "val": rows(classes, 2 * seed + 1, exits=exits)}
    outside = 1.5 * torch.randn(exits, 70, classes, generator=torch.Generator().manual_seed(9)) - 0.5
    return Run(f"{network}-{data}-seed{seed}", network, data, seed, stored=parts, outside=outside)


def runs_of(*every: Run) -> Runs:
    return Runs(every, "a test")


@pytest.fixture(scope="module")
def found() -> Finding:
    some = [run_of(f"clinc150-{classes}", classes) for classes in (2, 5)]
    draws = [replace(run_of("clinc150-2", 2, seed=1), name="another draw")]
    single = run_of("sst2", 2, exits=1, network="minilm-single")
    every = (run_of("sst2", 2), run_of("trec", 6), run_of("clinc150", 12), single, *some, *draws)
    return find("text").run(runs_of(*every))


def test_every_set_is_measured_under_every_rule(found: Finding) -> None:
    assert list(dict.fromkeys(row[0] for row in found.table)) == ["SST-2 (2)", "TREC (6)", "CLINC150 (12)"]
    assert [row[1] for row in found.table if row[0].startswith("TREC")] == list(NAMES)
    assert set(found.numbers) == {"sst2", "trec", "clinc150", "clinc150-2", "clinc150-5"}
    logits, labels = rows(6, 0)
    accuracy = (logits.argmax(-1) == labels).double().mean(-1).tolist()
    assert found.numbers["trec"]["latest"]["accuracy"][0] == pytest.approx(accuracy)


def test_the_shifted_product_and_collapse_are_those_of_a_plain_loop(found: Finding) -> None:
    values = rows(2, 0)[0].double().numpy()
    labels = rows(2, 0)[1].numpy()
    for name, shift in (("product", 0.0), (SHIFTED, 0.5)):
        right, lost = np.zeros((3, 90), bool), np.zeros((3, 90), bool)
        for row in range(90):
            total = np.ones(2)
            for exit in range(3):
                total = total * np.maximum(values[exit, row] + shift, 0) ** ((exit + 1) / 3)
                lost[exit, row] = not total.any()
                answer = values[exit, row] if lost[exit, row] else total
                right[exit, row] = answer.argmax() == labels[row]
        metrics = found.numbers["sst2"][name]
        assert metrics["collapsed_percent"][0] == pytest.approx(100 * lost.mean(1))
        assert metrics["accuracy"][0] == pytest.approx(right.mean(1))


def test_the_last_exit_is_compared_with_a_single_head_in_the_table_and_as_a_bound(found: Finding) -> None:
    single = run_of("sst2", 2, exits=1, network="minilm-single").accuracy()[0]
    last = found.numbers["sst2"]["latest"]["accuracy"][0][-1]
    (row,) = found.comparisons
    assert row.what.startswith("SST-2")
    assert row.ours.mean == pytest.approx(100 * (single - last))
    assert row.at_most == 2
    assert [cells[1] for cells in found.table[:2]] == ["single head", "latest"]
    assert float(found.table[1][4].replace("−", "-")) == pytest.approx(100 * (last - single), abs=0.01)
    assert found.table[-1][4] == "–"  # CLINC150 has no such run


def test_the_plots_over_classes_join_one_data_set_and_show_the_others_as_points(found: Finding) -> None:
    gained, left, *_ = found.plots
    assert isinstance(gained, Plot)
    assert isinstance(left, Plot)
    assert gained.x_marks == ((pytest.approx(np.log10(2)), "2"), (pytest.approx(np.log10(3)), "3"), *gained.x_marks[2:])  # type: ignore[index]
    joined, *others = [line for line in gained.lines if line.name == "product"]
    assert [round(10**x) for x in joined.x] == [2, 5, 12]
    assert joined.spread[0]  # two draws of two classes
    assert [[round(10**x) for x in line.x] for line in others] == [[2], [6]]
    mean = {name: np.mean(found.numbers["trec"][name]["accuracy"][0]) for name in ("product", "latest")}
    assert others[1].y[0] == pytest.approx(100 * (mean["product"] - mean["latest"]))
    assert {line.name for line in left.lines} == set(NAMES)
    drops = {name: found.numbers["trec"][name]["label_drop_percent"][0]["0.1"] for name in ("caching", "latest")}
    (left_over,) = [line.y for line in left.lines if line.name == "caching"][2]
    assert left_over == pytest.approx(100 * drops["caching"] / drops["latest"])
    assert "Of CLINC150's classes 2, 5, 12 were used" in found.note


def test_numbers_of_classes_without_drops_are_named() -> None:
    def confident(classes: int) -> Run:
        labels = torch.arange(90) % classes
        logits = 9.0 * torch.nn.functional.one_hot(labels, classes).expand(3, -1, -1)
        return replace(run_of(f"clinc150-{classes}", classes), stored={"test": (logits, labels), "val": (logits, labels)})

    found = find("text").run(runs_of(confident(2), confident(5), run_of("clinc150", 12)))
    assert "With 2, 5 no input drops by .1 under any of the three rules" in found.note
    left = next(plot for plot in found.plots if plot.title == "Label drops by .1 that are left")
    assert isinstance(left, Plot)
    assert left.lines[1].y[:2] == (None, None)
    assert left.lines[1].y[2] is not None


@pytest.mark.parametrize(("past", "now", "named"), [(1.0, 1e-3, True), (1e-3, 1.0, False)], ids=["first exit", "each exit"])
def test_a_fitted_product_that_keeps_to_the_first_exit_is_named(
    past: float, now: float, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The powers are given, not fitted: what an optimiser makes of exits that hardly differ depends on the processor.
    rule = Powers((past,) * 3, (1.0, now, now))
    monkeypatch.setattr("anytime.reproduce.studies.text.fit_product", lambda *_, **__: SimpleNamespace(rule=rule))
    labels = torch.arange(600) % 6
    later = 6.0 * torch.nn.functional.one_hot(labels, 6)
    first = later.clone()
    first[:12] = later[:12].roll(1, -1)  # the first exit is wrong there, the others are right
    logits = torch.stack((first, later, later))
    run = replace(run_of("trec", 6), stored={"test": (logits, labels), "val": (logits, labels)})
    found = find("text").run(runs_of(run))
    accuracy = found.numbers["trec"][FITTED]["accuracy"][0]
    assert accuracy == pytest.approx([588 / 600] * 3 if named else [588 / 600, 1, 1])
    words = "The fitted product hardly uses the exits after the first, whose gain is within that point, on TREC, 6 classes."
    assert (words in found.note) == named
    assert ("hardly uses" in found.note) == named


def test_what_is_missing_is_named(found: Finding) -> None:
    assert "no run of IMDB, AG News, Banking77;" in found.note
    assert "no run of TREC, CLINC150 with a single head" in found.note
    assert "no run with 3, 10, 20, 50, 100 of CLINC150's classes" in found.note


def test_one_run_is_enough_and_none_is_not() -> None:
    alone = find("text").run(runs_of(run_of("trec", 6)))
    assert alone.plots
    assert not alone.comparisons
    assert "were used" not in alone.note
    with pytest.raises(MissingFileError, match="anytime train trec-minilm"):
        find("text").run(runs_of())
    assert runs_of(run_of("trec", 6)).by_data(SINGLE_HEAD, optional=True) == {}


def test_the_fitted_product_is_fitted_on_validation_rows_alone() -> None:
    one = run_of("trec", 6)
    shuffled = replace(one, stored={**one.stored, "test": rows(6, 50)})
    before, after = (find("text").run(runs_of(run)).numbers["trec"] for run in (one, shuffled))
    assert before[FITTED]["accuracy"] != after[FITTED]["accuracy"]
    other = replace(one, stored={**one.stored, "val": rows(6, 51)})
    changed = find("text").run(runs_of(other)).numbers["trec"]
    assert changed["product"] == before["product"]
    assert changed[FITTED]["nll"] != before[FITTED]["nll"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_the_area_is_that_of_scikit_learn(outside: list[int], inside: list[int]) -> None:
    wanted = roc_auc_score([1] * len(outside) + [0] * len(inside), outside + inside)
    assert float(auroc(torch.tensor([outside]), torch.tensor([inside]))[0]) == pytest.approx(wanted)


def test_out_of_scope_queries_are_detected_where_they_can_be() -> None:
    inside = rows(12, 0)
    run = replace(
        run_of("clinc150", 12),
        stored={"test": inside, "val": rows(12, 1)},
        outside=torch.full((3, 40, 12), 0.25) + 0.01 * torch.eye(12)[0],
    )
    found = find("out-of-scope").run(runs_of(run))
    exits = found.numbers
    assert exits[f"product, {SUPPORT}"][-1] > 0.9  # all classes stay, as they do for rows that collapsed
    assert exits[f"latest, {DOUBT}"][-1] > 0.95
    heights = inside[0][-1].max(-1).values
    assert exits[f"latest, {LOGIT}"][-1] == pytest.approx(float((heights > 0.26).double().mean()))
    assert exits[f"product, {RAPS}"][-1] > 0.9
    assert all(len(row) == 4 for row in found.table)
    alike = replace(run, outside=rows(12, 7)[0])
    assert find("out-of-scope").run(runs_of(alike)).numbers[f"latest, {DOUBT}"][-1] == pytest.approx(0.5, abs=0.1)


def test_runs_without_out_of_scope_queries_are_named() -> None:
    with pytest.raises(MissingFileError, match="no logits of out-of-scope queries"):
        find("out-of-scope").run(runs_of(replace(run_of("clinc150", 12), outside=None)))
    with pytest.raises(MissingFileError, match="no run of minilm on clinc150"):
        find("out-of-scope").run(runs_of(run_of("trec", 6)))


def test_stand_ins_have_what_the_studies_ask_for(smoke: Runs) -> None:
    (run,) = smoke.need(TEXT)
    assert run.classes() == 8
    outside = run.outside_logits()
    assert outside is not None
    assert outside.shape[2] == 8
    (single,) = smoke.need(SINGLE_HEAD)
    assert single.logits()[0].shape[0] == 1
    assert len(single.accuracy()) == 1


def test_a_single_validation_row_fits_nothing() -> None:
    with pytest.raises(LabelError, match="1 validation rows"):
        text_rules(torch.randn(3, 1, 4), torch.zeros(1, dtype=torch.int64))
