"""What results look like: short reprs, tables as text and HTML, plots with the numbers of the reports, a report in one call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import anytime
from anytime.calibrate import Certificate, Frontier
from anytime.combine import Interval, Prediction
from anytime.display.brief import brief
from anytime.display.palette import LIGHT
from anytime.display.plot import plot_chart
from anytime.display.table import Table
from anytime.errors import MissingExtraError
from anytime.evaluation import Evaluation, measure_guarantees
from anytime.evaluation.figures import figures
from anytime.models import MLP, MLPConfig
from anytime.run import Answer, Profile, profile_model
from anytime.run.engines import make_engine


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return anytime.evaluate(anytime.samples.cifar100_msdnet())


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    labels = torch.arange(200) % 5
    logits = torch.nn.functional.one_hot(labels, 5) * 2.0 + torch.randn(3, 200, 5, generator=torch.Generator().manual_seed(0))
    return anytime.tune(logits, labels, penalties=(3.0,))


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    sample = anytime.samples.cifar100_msdnet()
    return anytime.certify(sample.logits[:], sample.labels)


@pytest.fixture(scope="module")
def profile() -> Profile:
    engine = make_engine(MLP(MLPConfig(classes=5, exits=3)), "eager")
    return profile_model(engine, torch.zeros(1, 2), batch_sizes=(1, 4), repeats=3)


def answer(rows: int = 1, *positions: int) -> Answer:
    log_probs = torch.randn(rows, 7, *positions, generator=torch.Generator().manual_seed(2)).log_softmax(1)
    size = (rows, *positions)
    given = Prediction(log_probs, torch.zeros(size, dtype=torch.bool), log_probs.argmax(1), 1 - log_probs.ndim)
    return Answer(given, 2, 4, 0.0031, True, "forecast")


@pytest.fixture
def pyplot() -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def html(shown: Any) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")


def test_reprs_are_short(evaluation: Evaluation, frontier: Frontier, certificate: Certificate, profile: Profile) -> None:
    assert "rules=('latest', 'caching', 'product')" in repr(evaluation)
    fitted = anytime.fit_temperature(torch.randn(9, 30, 4), torch.arange(30) % 4)
    for shown in (evaluation, evaluation.rules["product"], frontier, certificate, profile, fitted, answer(), answer(8)):
        assert len(repr(shown)) < 400
        assert "\n" not in repr(shown)


def test_an_answer_names_its_label_or_its_inputs() -> None:
    assert repr(answer()).startswith("Answer(label=")
    assert repr(answer(8)) == "Answer(inputs=8, exit=2 of 4, elapsed=3.1 ms, deadline_met=True, reason=forecast)"
    interval = Interval(torch.tensor([0.25]), torch.tensor([0.5]), torch.tensor([False]))
    same = replace(answer(8), exit=torch.full((8,), 2))
    assert "exit=2 of 4" in repr(same)
    assert "lower=0.25, upper=0.5" in repr(Answer(interval, 1, 2, 0.1, None, None))


def test_tables_show_the_numbers(
    evaluation: Evaluation, frontier: Frontier, certificate: Certificate, profile: Profile
) -> None:
    metrics = evaluation.rules["product"]
    assert metrics.accuracy is not None
    first = dict(zip(*(evaluation.table().columns, evaluation.table().rows[0]), strict=True))
    assert first == {"": "accuracy, first exit %", **dict.fromkeys(evaluation.rules, "64.50")}
    each = {row[0]: row[1:] for row in evaluation.table("product").rows}
    assert each["Accuracy"] == tuple(f"{100 * value:.2f} %" for value in metrics.accuracy)
    assert [row[0] for row in frontier.table().rows] == [one.name for one in frontier.chain()]
    assert certificate.table().rows[0][1] == f"{100 * certificate.drops / certificate.rows:.2f} %"
    assert [row[0] for row in profile.table().rows] == ["1", "2", "3"]


def test_tables_of_answers_are_cut() -> None:
    assert len(answer(30).table().rows) == 10
    assert len(answer(30).table(rows=30).rows) == 30
    assert "first 10 of 30 inputs" in answer(30).table().caption
    assert answer(2, 5, 6).table().columns == (
        "input",
        "most frequent class",
        "classes",
        "mean confidence",
        "exit",
        "fell back",
    )


def test_text_is_aligned_and_harmless() -> None:
    lines = str(Table("a\x1b[2J", ("", "long heading"), (("one", "1"), ("three", "22")))).splitlines()
    assert lines == ["a\\x1b[2J", "       long heading", "one               1", "three            22"]


def test_html_is_well_formed_and_escaped(
    evaluation: Evaluation, frontier: Frontier, certificate: Certificate, profile: Profile
) -> None:
    for shown in (evaluation, frontier, certificate, profile, answer(3)):
        table = html(shown).find(".//table")
        assert table is not None
        assert len(table.findall(".//tbody/tr")) == len(shown.table().rows)
    assert html(Table("<b>", ("<i>",), (("&",),))).findtext(".//td") == "&"


def test_plots_draw_the_numbers_of_the_report_in_its_colours(evaluation: Evaluation, pyplot: Any) -> None:
    axes = evaluation.plot("accuracy")
    accuracy = evaluation.rules["product"].accuracy
    assert accuracy is not None
    drawn = [line for line in axes.get_lines() if line.get_color() == LIGHT["s2"] and len(line.get_xdata())]
    for line in drawn:
        assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6, 7]
        assert list(line.get_ydata()) == pytest.approx([100 * value for value in accuracy])
    assert drawn
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == ("exit", "accuracy, %", "Accuracy")
    (legend,) = axes.figure.legends  # below the chart
    assert [text.get_text() for text in legend.get_texts()] == ["Latest", "Caching", "Product"]


def test_a_legend_below_the_chart_hides_no_line(evaluation: Evaluation, pyplot: Any) -> None:
    axes = evaluation.plot("label_drop")
    axes.figure.canvas.draw()
    (legend,) = axes.figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.filterwarnings("error")  # as of a glyph that the font does not have
def test_names_are_drawn_as_they_are_and_not_as_formulas(pyplot: Any, tmp_path: Path) -> None:
    logits = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(4))
    found = anytime.evaluate(logits, torch.arange(20) % 6, rules={r"$\foo$": "latest", "a\x1b[31m\nb": "product"})
    axes = found.plot("accuracy")
    axes.figure.savefig(tmp_path / "plot.png")
    names = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert names == [r"\$\foo\$", r"a\x1b[31m\x0ab"]


def test_every_chart_of_a_report_can_be_plotted(evaluation: Evaluation, pyplot: Any) -> None:
    for figure in figures(evaluation):
        pyplot.close("all")
        axes = plot_chart(figure.chart)
        assert (axes.get_xlabel(), axes.get_ylabel()) == (figure.chart.x.title, figure.chart.y.title)
        for series in figure.chart.series:  # no point is outside of the frame
            for _, x, y in series.points():
                assert axes.get_xlim()[0] <= x <= axes.get_xlim()[1]
                assert axes.get_ylim()[0] <= y <= axes.get_ylim()[1]


@pytest.mark.filterwarnings("error")
def test_plots_go_into_the_axes_given(
    frontier: Frontier, certificate: Certificate, profile: Profile, pyplot: Any, tmp_path: Path
) -> None:
    plots: list[Callable[..., Any]] = [frontier.plot, certificate.plot, profile.plot, answer().plot, answer(2, 5, 6).plot]
    figure, every = pyplot.subplots(1, len(plots))
    for plot, ax in zip(plots, every, strict=True):
        assert plot(ax=ax) is ax
    figure.savefig(tmp_path / "plots.png")
    assert profile.plot(4).get_title(loc="left") == "Time to each exit, batch of 4 inputs"
    assert answer(3).plot(row=2).get_title(loc="left") == "input 2 at exit 2 of 4"


def test_the_first_plot_without_labels_is_the_agreement(pyplot: Any) -> None:
    found = anytime.evaluate(torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(4)))
    assert found.plot().get_title(loc="left") == "Agreement with the final answer"


def test_without_matplotlib_the_error_names_the_extra(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[plot\]"):
        evaluation.plot()


def test_one_call_writes_the_report(evaluation: Evaluation, tmp_path: Path) -> None:
    report = anytime.write_report(evaluation, tmp_path / "report", title="My network")
    assert report == tmp_path / "report" / "report.html"
    assert "<h1>My network</h1>" in report.read_text()
    assert json.loads((report.parent / "metrics.json").read_text())["samples"] == 1000
    anytime.write_report(evaluation, tmp_path / "report", title="Again")  # replaces its own
    assert "<h1>Again</h1>" in report.read_text()


def test_a_report_of_guarantees_has_its_fitted_product(tmp_path: Path) -> None:
    sample = anytime.samples.cifar100_msdnet()
    halves = [(sample.logits[:, rows], sample.labels[rows]) for rows in (slice(0, 300), slice(300, 600))]
    found = measure_guarantees(*halves, rules=["latest", "product"])
    report = anytime.write_report(found, tmp_path / "report")
    assert (report.parent / "fitted-product.json").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((), "()"),
        ((1,), "(1,)"),
        (("a",) * 9, "(9 entries)"),
        (torch.zeros(2, 3), "Tensor(2, 3)"),
        ("x" * 99, f"'{'x' * 79}…'"),
    ],
)
def test_values_in_short(value: object, text: str) -> None:
    assert brief(value) == text
