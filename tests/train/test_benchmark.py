from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "train.py"


def test_the_benchmark_measures_the_step_and_a_plain_loop() -> None:
    small = ["--batch", "4", "--steps", "1", "--repeats", "1", "--warm-up", "1", "--images", "16"]
    command = [sys.executable, str(PROGRAM), "--device", "cpu", "--model", "msdnet-cifar-linear", *small]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = json.loads(output.splitlines()[-1])["results"]
    assert [result["step"] for result in results] == ["plain eager loop", "ours"]
