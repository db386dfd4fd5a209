from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anytime.display.chart import COLOURS
from anytime.display.numbers import compact, exact, fraction, number, percent, plural, points
from anytime.display.palette import DARK, LIGHT, variables
from anytime.display.scale import SymlogScale, linear, symlog


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (24.18, "24 %"),
        (0, "0 %"),
        (100, "100 %"),
        (0.004, "under 0.01 %"),
        (99.995, "over 99.99 %"),
        (3.14, "3.1 %"),
        (None, "–"),
    ],
)
def test_percentages_are_short_and_never_rounded_to_a_false_zero_or_hundred(value: float | None, text: str) -> None:
    assert percent(value) == text


def test_points_and_counts_have_singular_and_plural() -> None:
    assert [points(value) for value in (-0.2, 1.0, 2.2, 1.04)] == ["0.2 points", "1 point", "2.2 points", "1 point"]
    assert [plural(count, "input") for count in (1, 5000)] == ["1 input", "5,000 inputs"]


def test_numbers_for_tables_and_axes() -> None:
    assert (exact(27.184), fraction(0.7281), fraction(0.7281, digits=1)) == ("27.18 %", "72.81 %", "72.8 %")
    assert (number(0.00004), number(float("inf")), number(-3)) == ("4.0e−05", "infinite", "−3")
    assert [compact(value) for value in (20_000, 15e6, 3.2e9, 900)] == ["20k", "15M", "3.2G", "900"]


@example(260.3)
@example(999.7)
@given(st.floats(0.001, 1e9))
def test_a_formatted_number_is_within_a_percent_or_half_a_thousandth(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0.01, abs=0.0005)
    assert number(-value) == f"−{number(value)}"


@pytest.mark.parametrize("values", [[0.653, 0.728], [5.0], [0.0, 0.0], [], [-2.0, 1e6], [1e-7, 2e-7], [float("inf"), 3.0]])
def test_a_linear_scale_contains_its_values_and_has_a_few_round_ticks(values: list[float]) -> None:
    scale = linear(values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 9
    assert all(-1e-9 <= scale.at(value) <= 1 + 1e-9 for value in values if value < float("inf"))
    assert len({scale.text(tick) for tick in ticks}) == len(ticks)


def test_a_scale_of_percentages_stays_between_0_and_100() -> None:
    scale = linear([99.7, 99.9], low=0, high=100)
    assert scale.high <= 100
    assert linear([0.0, 0.0], zero=True, low=0, high=100).low == 0


@pytest.mark.parametrize("values", [[0.0, 0.0], [0.0], [0.0, 1e-12], [0.01, 3.0], [1e-9, 1.0]])
def test_a_scale_of_nonnegative_values_does_not_start_below_zero(values: list[float]) -> None:
    assert linear(values).low >= 0
    assert linear([*values, -0.5]).low <= -0.5


def test_symlog_includes_zero_and_keeps_order() -> None:
    scale = symlog([0, 0.02, 66])
    places = [scale.at(value) for value in (0, 0.005, 0.01, 0.02, 1, 66, 100)]
    assert places[0] == 0
    assert places[-1] == pytest.approx(1)
    assert all(one < other for one, other in itertools.pairwise(places))
    assert [scale.text(tick) for tick in scale.ticks()] == ["0", "0.01", "0.1", "1", "10", "100"]


@pytest.mark.parametrize("values", [[], [0, 0], [100, 100], [1e-9, 50]])
def test_symlog_is_between_a_hundredth_and_a_hundred(values: list[float]) -> None:
    scale = symlog(values)
    assert isinstance(scale, SymlogScale)
    assert 0.01 <= scale.threshold < scale.high <= 100


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear_parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear_parts, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_is_enough_for_text_and_for_lines(colours: dict[str, str]) -> None:
    for under in ("paper", "page", "sunken"):
        for text in ("text", "soft", "link"):
            assert contrast(colours[text], colours[under]) >= 4.5, (text, under)
    for grade in ("good", "fair", "poor"):
        assert contrast(colours[grade], colours[f"{grade}-paper"]) >= 4.5, grade
        assert contrast(colours[grade], colours["page"]) >= 4.5, grade
    for line in (*(f"s{index}" for index in range(COLOURS)), "calm", "guide", "base"):
        assert contrast(colours[line], colours["paper"]) >= 3, line


def test_the_dark_palette_has_every_colour_of_the_light_one() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert variables().count("--paper:") == 5
