"""How long it takes to start: this library's imports and commands against `import torch`, in one run.

    python benchmarks/startup.py                three rounds, about two minutes
    python benchmarks/startup.py --rounds 1

Every case is a process of its own; the cases take turns. Printed are the medians of the CPU seconds of all threads and of the
seconds on the clock, and the ratio of the CPU seconds to those of `import torch`. A server ends when it listens. The model is
the network for digits that comes with the package, with the engine that is the fastest here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import anytime

DIGITS = Path(anytime.__file__).parent / "samples" / "digits"


def cases(folder: Path) -> dict[str, list[str]]:
    """Arguments of Python by name."""
    rng = np.random.default_rng(0)
    np.savez(folder / "logits.npz", logits=rng.normal(size=(3, 200, 10)), labels=rng.integers(0, 10, 200))
    np.save(folder / "digit.npy", rng.random((1, 1, 16, 16), np.float32))
    verbs = {
        "--help": (),
        "doctor": (),
        "evaluate": (folder / "logits.npz",),
        "predict": (DIGITS, folder / "digit.npy"),
        "profile": (DIGITS,),
        "serve": (DIGITS, "--port", "0"),
    }
    imports = ["import torch", "import anytime", "import anytime; anytime.Product", "import anytime; anytime.Runner"]
    commands = {f"anytime {verb}": ["-m", "anytime.cli", verb, *map(str, rest)] for verb, rest in verbs.items()}
    return {code: ["-c", code] for code in imports} | commands


def measure(arguments: list[str]) -> tuple[float, float]:
    """CPU seconds and seconds on the clock until the process ends, or listens."""
    begin = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"listening on"):
                process.kill()
                break
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, -9):
        raise SystemExit(f"{' '.join(arguments)} failed with code {process.returncode}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        todo = cases(Path(folder))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in todo}
        for _ in range(rounds + 1):
            for name, arguments in todo.items():
                found[name].append(measure(arguments))
    # The first round fills the caches of files and of Python.
    medians = {name: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for name, rows in found.items()}
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {rounds} rounds")
    print(f"{'':32}{'CPU':>7}{'clock':>8}{'to import torch':>18}")
    for name, (cpu, clock) in medians.items():
        print(f"{name:32}{cpu:6.2f}s{clock:7.2f}s{cpu / medians['import torch'][0]:17.2f}x")


if __name__ == "__main__":
    main()
