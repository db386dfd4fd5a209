from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytime import samples
from anytime.artifacts import write_bundle
from anytime.evaluation import evaluate
from anytime.reproduce import Finding, find
from anytime.reproduce.runs import Runs
from anytime.reproduce.stand_ins import Size, from_sample, on_digits

Publish = Callable[..., Path]


@pytest.fixture(scope="session")
def smoke() -> Runs:
    """The packaged sample, and networks on digits that are trained for one short epoch when a study first needs them."""
    tiny = Size(rows=64, epochs=1, seeds=2, held_out=100)
    return Runs((from_sample(samples.cifar100_msdnet()),), "the package").with_stand_in(on_digits(tiny))


@pytest.fixture(scope="session")
def smoke_finding(smoke: Runs) -> Callable[[str], Finding]:
    """What a study finds on these runs; each study runs once."""
    return cache(lambda name: find(name).run(smoke, scale="smoke"))


@pytest.fixture(scope="session", autouse=True)
def few_penalties() -> Iterator[None]:
    """The fitted product of the text studies chooses among two penalties."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anytime.reproduce.studies.text.PENALTIES", (0.0, 1.0))
        yield


@pytest.fixture
def publish(tmp_path: Path) -> Publish:
    """Writes a small run as `results/publish.py` does; `change` may damage its arrays and metrics before they are packed."""

    def write(
        name: str,
        *,
        objective: str = "joint",
        model: str = "msdnet-cifar",
        data: str = "cifar100",
        seed: int = 0,
        exits: int = 7,
        classes: int = 10,
        change: Callable[[dict[str, Any], dict[str, Any]], object] = lambda arrays, document: None,
    ) -> Path:
        rng = np.random.default_rng(seed)
        files: dict[str, Any] = {}
        for split, rows in (("test", 60), ("val", 40)):
            labels = rng.integers(0, classes, rows)
            logits = (2 * rng.normal(size=(exits, rows, classes)) + 3 * np.eye(classes)[labels]).astype(np.float16)
            arrays: dict[str, Any] = {"logits": logits, "labels": labels, "indices": np.arange(rows)}
            document = evaluate(logits.astype(np.float32), labels).to_json()
            change(arrays, document)
            packed = io.BytesIO()
            np.savez_compressed(packed, **arrays)
            files[f"{split}-sample.npz"] = packed.getvalue()
            files[f"{split}-metrics.json"] = json.dumps(document).encode()
        recipe = {"objective": objective, "seed": seed}
        files["config.json"] = json.dumps({"model": model, "data": data, "recipe": recipe}).encode()
        write_bundle(tmp_path / "runs" / name, files)
        return tmp_path / "runs"

    return write
