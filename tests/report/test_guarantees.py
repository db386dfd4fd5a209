from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from anytime.combine import parse_rule
from anytime.display.chart import look
from anytime.display.numbers import rounded_down, rounded_up
from anytime.evaluation import Evaluation, Guarantees
from anytime.report import render
from anytime.report.pages.guarantees import at_cost, budget, diagrams, dropped, section
from anytime.report.svg.chart import draw
from anytime.report.svg.reliability import BOTTOM, SIDE, TOP, ReliabilityDiagram, draw_reliability

Measured = Callable[..., tuple[Guarantees, Evaluation]]
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def found(measured: Measured) -> Guarantees:
    return measured(costs=[1.0, 2.5, 4.0, 7.0])[0]


def test_each_rule_has_one_sentence_with_both_bounds(found: Guarantees) -> None:
    shown = section(found, source="cal.npz")
    assert [name for name, _ in shown.sentences] == ["Latest", "Caching", "Product", "scaled caching", "fitted product"]
    for (_, words), each in zip(shown.sentences, found.rules.values(), strict=True):
        assert words.count(".") - len(re.findall(r"\d\.\d", words)) == 1
        assert rounded_up(each.certificate.joint_drop_bound) in words
        assert rounded_down(each.certificate.joint_monotone_bound) in words
    strict = replace(found.rules["latest"].certificate, strict=True, confidence=0.9)
    assert "With 90 % confidence" in strict.joint_sentence
    assert "lose more than 0.1 of" in strict.joint_sentence


@pytest.mark.parametrize("fraction", [0.0, 0.00314, 0.01, 0.1371, 0.5, 0.8608, 0.99, 0.99999, 1.0])
def test_a_bound_is_never_rounded_to_the_wrong_side(fraction: float) -> None:
    assert float(rounded_up(fraction).removesuffix(" %")) >= 100 * fraction - 1e-9
    assert float(rounded_down(fraction).removesuffix(" %")) <= 100 * fraction + 1e-9


def test_the_facts_state_how_rows_were_used(found: Guarantees) -> None:
    words = " ".join(section(found, source="cal.npz").facts)
    assert "80 random rows" in words
    assert "All 200 inputs" in words
    assert "left out" not in words
    assert dropped(replace(found, dropped_rows=2), "cal.npz") in section(replace(found, dropped_rows=2), source="cal.npz").facts


def test_figures_show_the_numbers_that_were_found(found: Guarantees) -> None:
    figures = {figure.id: figure for figure in section(found, source="").figures}
    assert list(figures) == ["scaled_ece", "scaled_nll", "set_coverage", "budget"]
    ece = {line.name: line.y for line in figures["scaled_ece"].chart.series}
    assert list(ece) == ["Latest", "Caching", "Product", "fitted product"]
    after = found.rules["product"].after
    assert after is not None
    assert ece["Product"] == after.ece
    assert ece["fitted product"] == found.rules["fitted product"].before.ece
    coverage = figures["set_coverage"].chart
    assert coverage.series[0].y == pytest.approx([100 * fraction for fraction in found.rules["latest"].before.set_coverage])
    assert coverage.guides[0].start[1] == pytest.approx(95)
    assert [row[0] for row in figures["set_coverage"].table.rows][:2] == ["Latest, coverage", "Latest, size"]
    for figure in figures.values():
        assert "nan" not in draw(figure.chart)
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)
        ElementTree.fromstring(draw(figure.chart))


def test_without_sets_there_is_no_coverage(measured: Measured) -> None:
    ids = [figure.id for figure in section(measured(sets=None)[0], source="").figures]
    assert ids == ["scaled_ece", "scaled_nll", "budget"]


def test_the_budget_has_one_line_marks_and_one_legend_entry_per_rule(found: Guarantees) -> None:
    chart = budget(found).chart
    assert len(chart.series) == 2 * len(found.rules)
    assert [name for name, _ in chart.legend] == ["Latest", "Caching", "Product", "scaled caching", "fitted product"]
    assert all(look.marker for _, look in chart.legend)
    curve, marks = chart.series[0], chart.series[len(found.rules)]
    assert curve.look.marker is None
    assert [x for _, x, _ in marks.points()] == list(found.evaluation.costs)
    assert chart.x.ticks()[0][0] >= found.evaluation.costs[0]


def test_accuracy_at_a_cost_never_exceeds_the_cost(found: Guarantees) -> None:
    each = found.rules["latest"]
    assert at_cost(each, 0.5) is None
    assert at_cost(each, 100.0) == each.budget.accuracy[-1]


def test_each_rule_has_one_diagram_per_exit(found: Guarantees) -> None:
    drawn = diagrams(found)
    assert [figure.compared for figure in drawn] == [True, True, True, False]
    assert all([diagram.title for diagram in figure.diagrams] == [f"exit {exit}" for exit in range(1, 5)] for figure in drawn)
    assert sum(count for _, _, count in drawn[0].diagrams[0].bins) == 200
    for figure in drawn:
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)
        for svg in figure.svgs:
            ElementTree.fromstring(svg)


def test_many_exits_have_some_diagrams_including_the_last(measured: Measured) -> None:
    drawn = diagrams(measured(exits=31, rules=["latest"])[0])
    titles = [diagram.title for diagram in drawn[0].diagrams]
    assert len(titles) <= 14
    assert titles[0] == "exit 1"
    assert titles[-1] == "exit 31"


def test_a_bar_is_as_high_as_the_accuracy() -> None:
    diagram = ReliabilityDiagram("exit 1", "ECE 0", [(0.0, 0.0, 0), (0.75, 0.5, 40)], [(0.25, 1.0, 3), (0.9, 0.25, 37)])
    root = ElementTree.fromstring(draw_reliability(diagram, look(2), name=EVIL))
    bars = [path.get("d") for path in root.iter("path") if path.get("class") == "bar"]
    assert bars[0] is not None
    assert f"v{-SIDE / 2:.1f}" in bars[0]
    strokes = [path for path in root.iter("path") if path.get("class") == "tick-mark"]
    assert f",{BOTTOM - SIDE / 4:.1f}h" in (strokes[0].get("d") or "")
    assert any("few" in (path.get("class") or "") and f",{TOP:.1f}h" in (path.get("d") or "") for path in root.iter("path"))
    tips = [title.text for title in root.iter("title")]
    assert (
        tips[1] == "after: confidence 75.0 %, accuracy 50.0 %, 40 inputs; before: confidence 90.0 %, accuracy 25.0 %, 37 inputs"
    )


@pytest.mark.parametrize(("exits", "classes"), [(2, 2), (4, 8)])
def test_the_page_has_the_section_and_is_well_formed(measured: Measured, exits: int, classes: int) -> None:
    found, evaluation = measured(exits, classes)
    options = {"title": "A model", "source": "test.npz"}
    text = render(evaluation, guarantees=found, calibration="cal.npz", **options)
    assert '<section id="guarantees">' in text
    assert 'href="#guarantees"' in text
    assert "cal.npz" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert len(text.encode()) < 700_000
    assert text == render(evaluation, guarantees=found, calibration="cal.npz", **options)
    assert "guarantees" not in re.findall(r'<section id="(\w+)"', render(evaluation, **options))
    levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", text)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_contents_name_the_sections_in_their_order(measured: Measured) -> None:
    found, evaluation = measured()
    html = render(evaluation, title="A model", source="test.npz", guarantees=found, calibration="cal.npz")
    sections = re.findall(r'<section id="(\w+)"', html)
    assert re.findall(r'<li><a href="#(\w+)">', html) == [id for id in sections if id != "verdict"]


def test_external_names_are_escaped_in_the_section(measured: Measured) -> None:
    found, evaluation = measured(rules={"latest": parse_rule("latest"), EVIL: parse_rule("product")})
    text = render(evaluation, title="A model", source="test.npz", guarantees=found, calibration=EVIL)
    assert EVIL not in text
    assert "<img" not in text
