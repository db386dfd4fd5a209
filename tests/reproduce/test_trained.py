"""The page's table of what was trained agrees with the settings of the runs."""

from __future__ import annotations

import json

import pytest

from anytime.reproduce.trained import TRAINED

from .stored import PAGE, RESULTS, seeds


@pytest.mark.parametrize("prefix", TRAINED)
def test_images_epochs_and_schedule_are_those_of_the_runs(prefix: str) -> None:
    _, images, epochs, words = TRAINED[prefix]
    for name in seeds(prefix):
        config = json.loads((RESULTS / name / "config.json").read_text())
        total = 100_000 if config["data"] == "tiny-imagenet" else 50_000
        assert int(images.replace(",", "")) == total - config["held_out"]
        assert int(epochs.split(" + ")[-1]) == config["recipe"]["epochs"]
        if "schedule" in words:
            assert ("cosine" in words) == (config["recipe"]["schedule"] == "cosine")
        if "Nesterov" in words:
            assert ("no Nesterov" in words) != config["recipe"]["nesterov"]


def test_every_run_on_images_that_the_page_uses_is_in_its_table() -> None:
    table = PAGE.read_text().partition("What was trained on images")[2].partition("What changed")[0]
    used = {name.rpartition("-seed")[0] for name in PAGE.read_text().replace(",", " ").split() if "-seed" in name}
    for prefix in used:
        if (RESULTS / f"{prefix}-seed0").is_dir() and not prefix.startswith("minilm"):
            assert f"| {prefix} |" in table
