"""Run the tests that compare floating-point numbers as other machines would: `make portability`.

Each setting makes the libraries take other instructions, or changes the threads, the memory's alignment or the load. A test
that passes under one and fails under another depends on the machine: it compares bits where it should allow for rounding.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
NOT_NUMERIC = (
    *("api", "attacks", "cli", "data", "fault", "long", "report"),
    *("models/test_cost.py", "reproduce/test_publish.py", "train/test_benchmark.py", "train/test_cifar_entry.py"),
    *("train/test_recipes.py", "train/test_text_entry.py", "test_documentation.py"),
)
"""What compares no floating-point results under tests/; a new folder or file is numeric until it is named here."""
SHARDS = min(2, os.cpu_count() or 1)
AVX2 = ("AVX2", "AVX512")


@dataclass(frozen=True)
class Setting:
    """One kind of machine.

    Attributes:
        what: What is different.
        variables: Of the environment.
        processors: Where it can run, as PyTorch names their instructions; anywhere where empty.
        busy: Whether a process per core spins beside the tests.
        misaligned: Whether PyTorch gets misaligned memory.
    """

    what: str
    variables: dict[str, str] = field(default_factory=dict)
    processors: tuple[str, ...] = ()
    busy: bool = False
    misaligned: bool = False


SETTINGS = {
    "plain": Setting("this machine as it is"),
    "aten-default": Setting("PyTorch without AVX", {"ATEN_CPU_CAPABILITY": "default"}),
    "aten-avx2": Setting("PyTorch with AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}, AVX2),
    "aten-avx512": Setting("PyTorch with AVX-512", {"ATEN_CPU_CAPABILITY": "avx512"}, ("AVX512",)),
    "mkl-compatible": Setting("MKL with SSE2", {"MKL_CBWR": "COMPATIBLE"}),
    "mkl-avx2": Setting("MKL with AVX2", {"MKL_CBWR": "AVX2"}, AVX2),
    "onednn-sse41": Setting("oneDNN with SSE4.1", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "onednn-avx2": Setting("oneDNN with AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, AVX2),
    "two-threads": Setting("two threads per process", {"ANYTIME_TEST_THREADS": "2"}),
    "misaligned": Setting("memory aligned to 16 bytes", misaligned=True),
    "busy": Setting("a spinning process per core", busy=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the settings asked for; 1 if a test failed under any."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=_listed())
    parser.add_argument("--limit", type=float, default=900, help="seconds per setting (default: %(default)g)")
    parser.add_argument("tests", nargs="*", help="test files or folders instead of the numeric ones")
    options = parser.parse_args(arguments)
    tests = options.tests or numeric_tests()
    failures: list[str] = []
    try:
        for name in options.settings:
            failures += _try(name, tests, options.limit)
    finally:  # what was found is said after Ctrl-C too
        if failures:
            print("\nFailed:", *failures, sep="\n  ")
    return bool(failures)


def _try(name: str, tests: Sequence[str], limit: float) -> list[str]:
    setting = SETTINGS[name]
    reason = _missing(setting)
    if reason is not None:
        _say(name, f"skipped: {reason}")
        return []
    with ExitStack() as stack:
        variables = dict(setting.variables)
        if setting.misaligned:
            variables["LD_PRELOAD"] = str(stack.enter_context(_compiled()))
        if setting.busy:
            stack.enter_context(_spinning())
        return _run(name, tests, variables, limit)


def numeric_tests() -> list[str]:
    """Test files that compare floating-point results, and the source, for the examples in its docstrings."""
    others = [TESTS / name for name in NOT_NUMERIC]
    files = sorted(TESTS.rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if not any(map(file.is_relative_to, others))] + ["src"]


def _run(name: str, tests: Sequence[str], variables: dict[str, str], limit: float) -> list[str]:
    """Run the tests in a few processes; give the failed ones, each as a command that runs it again."""
    began = time.monotonic()
    environment = {**os.environ, **variables}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{shard}.log" for shard in range(min(SHARDS, len(tests)))]
        shards = []
        for shard, log in enumerate(logs):
            command = [sys.executable, "-m", "pytest", "-m", "not long", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
            with log.open("w") as out:
                process = subprocess.Popen(
                    [*command, *tests[shard :: len(logs)]], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
                )
            shards.append(process)
        try:
            codes = [_ended(process, began + limit - time.monotonic()) for process in shards]
        finally:
            for process in shards:
                process.kill()
                process.wait()
        texts = [log.read_text() for log in logs]
    passed = sum(int(count) for text in texts for count in re.findall(r"(\d+) passed", text))
    failed = [line for text in texts for line in re.findall(r"^(?:FAILED|ERROR) (\S+(?: in \S+)?)", text, re.MULTILINE)]
    broken = [
        f"{name}: pytest {'took longer than the limit' if code is None else f'ended with {code}'}:\n{text[-2000:]}"
        for code, text in zip(codes, texts, strict=True)
        if code is None or (code != 0 and not re.search(r"\d+ failed|\d+ error", text))
    ]
    _say(name, f"{passed} passed, {len(failed)} failed{', did not end' if broken else ''}, {time.monotonic() - began:.0f} s")
    prefix = "".join(f"{key}={shlex.quote(value)} " for key, value in SETTINGS[name].variables.items())
    return [f"{name}: {prefix}python -m pytest {shlex.quote(test)}" for test in failed] + broken


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _missing(setting: Setting) -> str | None:
    """Why this machine cannot have a setting."""
    if setting.misaligned and (sys.platform != "linux" or shutil.which("cc") is None):
        return "this needs Linux and a C compiler"
    if setting.processors and _instructions() not in setting.processors:
        return f"the processor has {_instructions()}, not {' or '.join(setting.processors)}"
    return None


@cache
def _instructions() -> str:
    """The best that PyTorch finds by itself: what a variable asks for it would believe, and end on the first instruction."""
    ask = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    return subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@contextmanager
def _spinning() -> Iterator[None]:
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


@contextmanager
def _compiled() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "misaligned.so"
        source = Path(__file__).with_name("misaligned.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        yield library


def _listed() -> str:
    return "of " + ", ".join(f"{name} ({setting.what})" for name, setting in SETTINGS.items()) + "; all by default"


def _say(name: str, result: str) -> None:
    print(f"{name:<15} {SETTINGS[name].what:<28} {result}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
