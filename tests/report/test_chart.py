from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from anytime.display.chart import COLOURS, Axis, Chart, Guide, Look, Series, look
from anytime.display.scale import linear, symlog
from anytime.report.svg.chart import MARKERS, WIDTH, draw, place, sparkline, stacked, style_sheet

EVIL = '"><script>alert(1)</script>&'


def chart(*, name: str = "product", y: tuple[float | None, ...] = (66.0, 1.0, 0.0)) -> Chart:
    line = Series(name, (0.01, 0.1, 0.5), y, look(2), tuple(f"{name} {value}" for value in y))
    guide = Guide((0.0, 0.0), (0.5, 0.0), "ideal")
    values = [value for value in y if value is not None]
    return Chart(f"drops under {name}", Axis("by", linear((0, 0.5))), Axis("%", symlog(values)), (line,), (guide,))


def test_a_chart_is_well_formed_scales_and_has_a_text_summary() -> None:
    root = ElementTree.fromstring(draw(chart()))
    assert root.get("viewBox") == "0 0 440 264"
    assert root.get("role") == "img"
    assert root.get("aria-label") == "drops under product"


def test_every_point_has_a_marker_with_a_tooltip() -> None:
    titles = [title.text for title in ElementTree.fromstring(draw(chart())).iter("title")]
    assert titles == ["product 66.0", "product 1.0", "product 0.0"]


def test_zero_is_on_the_ideal_line() -> None:
    found = chart()
    assert place(found, 0.5, 0.0)[1] == place(found, 0.0, 0.0)[1]


def test_all_points_are_inside_the_frame() -> None:
    found = chart()
    for x, y in zip(found.series[0].x, found.series[0].y, strict=True):
        across, down = place(found, x, y or 0.0)
        assert 0 < across < 440
        assert 0 < down < 264


def test_a_missing_point_breaks_the_line() -> None:
    svg = draw(chart(y=(66.0, None, 1.0)))
    root = ElementTree.fromstring(svg)
    line = next(path for group in root.iter("g") if group.get("class") == "s2" for path in group if path.get("class") == "line")
    assert (line.get("d") or "").count("M") == 2
    assert "None" not in (line.get("d") or "")


def test_text_is_escaped_everywhere() -> None:
    for svg in (draw(chart(name=EVIL)), stacked([(EVIL, chart(name=EVIL))])):
        ElementTree.fromstring(svg)
        assert "<script" not in svg


def test_a_chart_contains_no_colours() -> None:
    svg = draw(chart())
    assert "#" not in svg
    assert "style=" not in svg


def test_a_file_of_charts_includes_style_background_title_and_legend() -> None:
    svg = stacked([("Falls", chart())])
    root = ElementTree.fromstring(svg)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Falls", "product", "ideal"} <= set(words)
    assert style_sheet() in svg
    assert "prefers-color-scheme: dark" in svg
    assert 'class="paper"' in svg
    assert svg.count("http") == 1  # the namespace


def test_a_long_legend_wraps() -> None:
    lines = tuple(Series(f"product(clipped({index}), weights=ones)", (1.0,), (1.0,), look(index)) for index in range(4))
    wide = Chart("many", Axis("x", linear([1])), Axis("y", linear([1])), lines)
    assert 'transform="translate(0 20)"' in stacked([("many", wide)])


def test_the_first_60_looks_all_differ_and_the_first_ten_in_colour_and_dash() -> None:
    looks = [look(index) for index in range(60)]
    assert len(set(looks)) == 60
    assert len({look(index).css for index in range(COLOURS)}) == COLOURS == 10
    assert len({look(index).marker for index in range(6)}) == len(MARKERS)
    dashes = [rule for rule in style_sheet().splitlines() if re.match(r"\.s\d \.line \{ stroke-dasharray", rule)]
    assert len({rule.partition("{")[2] for rule in dashes}) == COLOURS - 1  # the first is solid


@pytest.mark.parametrize("values", [[0.5], [0.0, 1.0], [0.1] * 12])
def test_a_sparkline_takes_any_number_of_exits(values: list[float]) -> None:
    root = ElementTree.fromstring(sparkline(values, Look("s0"), summary="a < b"))
    assert root.get("aria-label") == "a < b"


def spread(y: tuple[float | None, ...], by: tuple[float | None, ...]) -> Series:
    return Series("ECE", tuple(range(1, len(y) + 1)), y, look(0), spread=by)


def test_error_bars_end_at_zero_if_no_value_is_negative() -> None:
    line = spread((0.02, 0.1, None, 0.2), (0.05, 0.05, 0.05, None))
    assert list(line.bars()) == [(1, 0.0, pytest.approx(0.07)), (2, pytest.approx(0.05), pytest.approx(0.15))]
    assert linear(line.reach()).low == 0


def test_error_bars_go_below_zero_if_a_value_is_negative() -> None:
    line = spread((0.5, -1.0), (1.0, 1.0))
    assert list(line.bars()) == [(1, -0.5, 1.5), (2, -2.0, 0.0)]
    assert linear(line.reach()).low == -2


def test_error_bars_are_inside_the_frame_and_only_at_points_with_a_spread() -> None:
    line = spread((1.0, 20.0, 30.0), (3.0, 0.0, 4.0))
    found = Chart("deviations", Axis("exit", linear(line.x)), Axis("%", linear(line.reach())), (line,))
    bars = next(path for path in ElementTree.fromstring(draw(found)).iter("path") if path.get("class") == "spread")
    assert (bars.get("d") or "").count("V") == 2
    assert place(found, 1, 0.0)[1] <= 264 - 42
    assert 'class="spread"' not in draw(chart())


def test_stacked_charts_are_one_file_below_each_other() -> None:
    single = ElementTree.fromstring(stacked([("one", chart())]))
    both = ElementTree.fromstring(stacked([("one", chart()), ("two", chart())]))
    assert float(both.get("height", "0")) == 2 * float(single.get("height", "0"))
    headings = [node.text for node in both.iter() if node.get("class") == "heading"]
    assert headings == ["one", "two"]


def test_a_nested_chart_has_a_place_and_a_size() -> None:
    root = ElementTree.fromstring(draw(chart(), at=(12.0, 34.0)))
    assert (root.get("x"), root.get("y"), root.get("width")) == ("12", "34", f"{WIDTH:g}")
