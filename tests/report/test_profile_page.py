from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest
import torch

from anytime.report.pages.profile import headline, load_note, render_profile
from anytime.report.svg.chart import place
from anytime.run import Profile
from anytime.run.timing.profile_figures import exit_table, profile_figures, stage_table

EVIL = "</style><script>alert(1)</script>"


@pytest.fixture
def profile() -> Profile:
    """Three exits, batches of 1 and 8, each stage 1 ms (or 8), p99 twice as long."""
    stages = torch.tensor([1.0, 1.5, 2.0, 3.0], dtype=torch.float64).repeat(2, 3, 1) / 1e3
    stages[1] *= 8
    machine = {"processor": "A processor", "cores": 4, "torch": "2.0", "gpu": None, "load": 0.5}
    return Profile(
        exits=3, classes=10, engine="eager", threads=1, machine=machine, batch_sizes=(1, 8), stage_seconds=stages,
        exit_seconds=stages.cumsum(1), repeats=200, macs=(1.5e6, 3e6, 4.5e6),
    )  # fmt: skip


def test_the_page_states_the_time_to_the_first_and_the_last_exit(profile: Profile) -> None:
    page = render_profile(profile, name="A model")
    assert "First exit after 1 ms, all 3 after 3 ms" in page
    assert "In 99 of 100 runs it was at most 2 ms and 6 ms." in page
    assert "A processor" in page
    assert "GPU" not in page
    assert "busy" not in page


def test_the_same_profile_gives_the_same_bytes_and_loads_nothing_else(profile: Profile) -> None:
    page = render_profile(profile, name="A model")
    assert page == render_profile(profile, name="A model")
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    assert len(page) < 60_000


def test_names_and_notes_are_escaped(profile: Profile) -> None:
    odd = replace(profile, machine={**profile.machine, "processor": EVIL})
    page = render_profile(odd, name=EVIL, notes=[EVIL])
    assert "<script" not in page
    assert EVIL in unescape(page)


def test_there_is_one_chart_per_batch_size_and_the_costs_follow_the_first(profile: Profile) -> None:
    assert [figure.id for figure in profile_figures(profile)] == ["time-1", "costs", "time-8"]
    assert [figure.id for figure in profile_figures(replace(profile, macs=None))] == ["time-1", "time-8"]
    slow, middle = profile_figures(profile)[2].chart.series
    assert middle.y == pytest.approx((8.0, 16.0, 24.0))
    assert slow.y == pytest.approx((16.0, 32.0, 48.0))


def test_the_band_goes_from_the_medians_to_the_99th_percentiles(profile: Profile) -> None:
    page = render_profile(profile, name="A model")
    drawn = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    assert len(drawn) == 3
    bands = [[node.get("d") for node in ET.fromstring(svg).iter("path") if node.get("class") == "bar few"] for svg in drawn]
    assert [len(band) for band in bands] == [1, 0, 1]
    chart = profile_figures(profile)[0].chart
    corners = [place(chart, exit, time) for exit, time in ((1, 2.0), (2, 4.0), (3, 6.0), (3, 3.0), (2, 2.0), (1, 1.0))]
    found = [float(number) for number in re.findall(r"[\d.]+", str(bands[0][0]))]
    assert found == pytest.approx([number for corner in corners for number in corner], abs=0.051)


def test_tables_have_one_row_per_exit(profile: Profile) -> None:
    found = exit_table(profile)
    assert found.columns == ("exit", "MACs", "p50, batch 1", "p99, batch 1", "p50, batch 8", "p99, batch 8")
    assert found.rows[1] == ("2", "3M", "2", "4", "16", "32")
    assert exit_table(replace(profile, macs=None)).rows[1][1] == "–"
    assert stage_table(profile).rows[2] == ("3", "1", "2", "8", "16")


def test_a_busy_machine_is_reported(profile: Profile) -> None:
    assert load_note(profile) is None
    busy = replace(profile, machine={**profile.machine, "load": 3.25})
    assert "load 3.2 on 4 cores" in str(load_note(busy))
    assert "busy" in render_profile(busy, name="A model")
    assert load_note(replace(profile, machine={"load": None})) is None


def test_one_exit_is_a_page_too(profile: Profile) -> None:
    cut = {name: getattr(profile, name)[:, :1] for name in ("stage_seconds", "exit_seconds")}
    single = replace(profile, exits=1, macs=(1.0,), **cut)
    assert headline(single) == "The only exit after 1 ms"
    assert "The only exit" in render_profile(single, name="A model")
