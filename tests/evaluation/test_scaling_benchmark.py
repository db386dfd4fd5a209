"""`benchmarks/scaling.py` measures both sides, prints slopes and draws them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_slope_is_the_exponent_of_the_larger_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from scaling import slope

    sizes = [1, 2, 4, 8, 16]
    assert slope(sizes, [7, 7, 16, 64, 256]) == pytest.approx(2)
    assert slope([1], [1]) is None


def test_a_quick_run_prints_both_sides_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    options = ["--quick", "--axes", "exits", "--plain-seconds", "60", "--picture", str(picture)]
    command = [sys.executable, str(FOLDER / "scaling.py"), *options]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^\| 8 (\| [\d,.]+ ){6}\|$", output, re.MULTILINE)
    assert re.search(r"^\| slope (\| [\d.]+ ){2}", output, re.MULTILINE)
    assert picture.read_text().count('<text class="heading"') == 2
