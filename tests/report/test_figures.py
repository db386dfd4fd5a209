from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anytime.evaluation import Evaluation
from anytime.evaluation.figures import figures
from anytime.evaluation.tables import at_each_exit, over_all
from anytime.report.pages.inputs import GROUP, answers, drop_class, input_section, worst
from anytime.report.svg.chart import draw

Make = Callable[..., Evaluation]
Change = Callable[..., Evaluation]

NEEDING_LABELS = {
    *("accuracy", "label_probability", "accuracy_cost", "label_drop", "ece", "nll", "brier", "oracle_accuracy"),
    *("learned", "forgot", "hindsight_improvability_percent", "support_coverage", "reliability_1", "reliability_4"),
}
WITHOUT_LABELS = {"entropy", "entropy_rise", "final_drop", "agreement", "support_size", "collapsed_percent"}
SETS = {"set_size", "set_size_rise"}


def ids(evaluation: Evaluation) -> set[str]:
    return {figure.id for figure in figures(evaluation)}


def test_every_figure_is_drawn_once(plain: Evaluation) -> None:
    found = [figure.id for figure in figures(plain)]
    assert len(set(found)) == len(found)
    assert set(found) == NEEDING_LABELS | WITHOUT_LABELS | SETS


def test_figures_that_need_labels_or_sets_are_left_out_without_them(make: Make) -> None:
    assert ids(make(labelled=False, sets=None)) == WITHOUT_LABELS
    assert not ids(make(sets=None)) & SETS


def test_accuracy_over_cost_needs_costs(make: Make) -> None:
    assert "accuracy_cost" not in ids(make())


def test_every_figure_has_a_text_one_line_per_rule_and_a_table(plain: Evaluation) -> None:
    for figure in figures(plain):
        assert figure.title
        assert figure.reading.endswith((".", "?"))
        assert draw(figure.chart).startswith("<svg")
        assert len(figure.table.rows) >= len(figure.chart.series) >= 1
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)


def test_the_axis_of_drops_includes_zero(plain: Evaluation) -> None:
    curve = next(figure for figure in figures(plain) if figure.id == "label_drop").chart
    assert curve.y.scale.ticks()[0] == 0
    assert [(guide.start[1], guide.end[1]) for guide in curve.guides] == [(0, 0)]


def test_a_chart_shows_the_numbers_of_the_evaluation(plain: Evaluation) -> None:
    chart = next(figure for figure in figures(plain) if figure.id == "accuracy").chart
    for line, found in zip(chart.series, plain.rules.values(), strict=True):
        assert line.y == pytest.approx([100 * value for value in found.accuracy])


def test_support_is_drawn_only_for_rules_that_exclude_classes(plain: Evaluation) -> None:
    support = next(figure for figure in figures(plain) if figure.id == "support_size")
    assert [line.name for line in support.chart.series] == ["Product"]


def test_the_table_of_set_sizes_has_the_coverage(plain: Evaluation) -> None:
    rows = next(figure for figure in figures(plain) if figure.id == "set_size").table.rows
    assert [row[0] for row in rows][3:] == ["Latest, coverage", "Caching, coverage", "Product, coverage"]


@pytest.mark.parametrize("exits", [2, 12, 40])
def test_few_and_many_exits_are_drawn(make: Make, exits: int) -> None:
    found = figures(make(exits=exits, samples=30))
    assert all(len(figure.chart.x.ticks()) <= 15 for figure in found)
    assert all("nan" not in draw(figure.chart) for figure in found)


def test_all_numbers_are_in_the_tables(plain: Evaluation) -> None:
    rows = {row[0]: row[1:] for row in over_all(plain).rows}
    drops = [figures.label_drop_percent["0.5"] for figures in plain.rules.values()]
    assert rows["The true class's probability drops by ≥ 0.5"] == tuple(f"{value:.2f} %" for value in drops)
    tables = [at_each_exit(plain, rule) for rule in plain.rules]
    assert [table.caption for table in tables] == ["Latest at each exit", "Caching at each exit", "Product at each exit"]
    assert {"Accuracy", "Confidence", "Coverage of the support", "Cumulative cost"} <= {row[0] for row in tables[2].rows}


def test_tables_leave_out_missing_metrics(make: Make) -> None:
    found = make(labelled=False, sets=None)
    words = " ".join(
        row[0] for table in (over_all(found), *(at_each_exit(found, rule) for rule in found.rules)) for row in table.rows
    )
    assert "true class" not in words
    assert "prediction set" not in words


def test_inputs_show_the_first_ten_under_latest_and_product(plain: Evaluation) -> None:
    found = input_section(plain)
    assert found is not None
    assert [panel.rule for panel in found.panels] == ["latest", "product"]
    assert all(panel.svg.count("data-line") == GROUP for panel in found.panels)
    assert found.groups == 20
    assert len(found.table.rows) == 2 * GROUP
    assert len(found.data["inputs"]) == 200
    assert found.data["rules"][found.data["panels"][1]] == "Product"


def test_few_inputs_one_rule_or_no_inputs(make: Make, plain: Evaluation) -> None:
    few = input_section(make(samples=7, rules=("latest",), sets=None))
    assert few is not None
    assert (few.groups, len(few.panels), len(few.table.rows)) == (1, 1, 7)
    assert few.count.startswith("Inputs 1 to 7 of 7 sampled inputs. Drops of 0.5 or more: ")
    assert input_section(replace(plain, examples=[])) is None


def test_the_style_of_a_line_shows_its_drop() -> None:
    assert [drop_class(drop) for drop in (0.0, 0.09, 0.1, 0.49, 0.5)] == [
        "no-drop",
        "no-drop",
        "small-drop",
        "small-drop",
        "large-drop",
    ]


def test_the_worst_inputs_have_one_line_per_rule(plain: Evaluation) -> None:
    rows = worst(plain)
    assert [row.row for row in rows] == [str(example.row) for example in plain.worst]
    assert all(len(row.rules) == 3 for row in rows)
    drops = [float(row.rules[0][1]) for row in rows]
    assert drops == sorted(drops, reverse=True)


def test_equal_consecutive_answers_are_merged(plain: Evaluation) -> None:
    example: Any = replace(plain.worst[0], label=5, answers={"latest": [5, 5, 3, 5]})
    assert answers(example, "latest") == [("5 ×2", True), ("3", False), ("5", True)]
