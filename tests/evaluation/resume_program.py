"""Evaluations of many files that are killed again and again, and one that is not.

`python resume_program.py KILLS SEED` prints one JSON document. This process only imports: each evaluation is a fork of it, so
that a kill costs no start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import anytime
import anytime.evaluation

EXITS, CLASSES = 3, 5
KEPT = "*.sums.safetensors"


def write(folder: Path, count: int, seed: int) -> int:
    """Files of different lengths and kinds; returns the number of rows."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    total = 0
    for number in range(count):
        rows = int(rng.integers(100, 300))
        labels = rng.integers(0, CLASSES, rows)
        logits = rng.normal(size=(EXITS, rows, CLASSES)).astype("f4") + 2 * np.eye(CLASSES, dtype="f4")[labels]
        if number % 2:
            np.savez(folder / f"{number:03}.npz", logits=logits, labels=labels)
        else:
            np.save(folder / f"{number:03}.npy", logits)
            np.save(folder / f"{number:03}.labels.npy", labels)
        total += rows
    return total


def evaluation(files: Path, work: Path | None, answer: Path, processes: int) -> int:
    """Start an evaluation in a fork; returns its process number."""
    child = os.fork()
    if child:
        return child
    try:
        found = anytime.evaluate(files, work=work, processes=processes).to_json()
        answer.write_text(json.dumps(found))
        os._exit(0)
    finally:
        os._exit(1)


def run(kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        files, work = Path(place) / "logits", Path(place) / "work"
        rows = write(files, max(40, 5 * kills), seed)
        plain, resumed = Path(place) / "plain.json", Path(place) / "resumed.json"
        os.waitpid(evaluation(files, None, plain, 1), 0)
        killed, kept, lost = 0, set[str](), 0
        for number in range(kills):
            child = evaluation(files, work, resumed, 2 if number % 20 == 10 else 1)
            # Before its first result, between two of them, or while one is written.
            goal, until = len(kept) + rng.choice((0, 1, 1, 2)), time.monotonic() + 60
            while len(list(work.glob(KEPT))) < goal and time.monotonic() < until and not resumed.exists():
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            os.kill(child, signal.SIGKILL)
            killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            now = {path.name for path in work.glob(KEPT)}
            lost += len(kept - now) if work.exists() else 0  # it is removed by an evaluation that ends before the signal
            kept = now
            resumed.unlink(missing_ok=True)
        status = os.waitpid(evaluation(files, work, resumed, 1), 0)[1]
        found = json.loads(resumed.read_text()) if status == 0 else {}
        counted = [sum(bins["count"]) for each in found.get("rules", {}).values() for bins in each["reliability"]]
        return {
            "killed": killed,
            "kept": len(kept),
            "lost": lost,
            "status": status,
            "same": plain.read_bytes() == resumed.read_bytes(),
            "rows": rows,
            "counted": sorted(set(counted)),
            "left": work.exists(),
        }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
