"""Run the tests that compare floating-point numbers as other machines would: `make portability`.

Each setting makes the libraries take other instructions, or changes the threads, the memory's alignment or the load. A test
that passes under one and fails under another depends on the machine: it compares bits where it should allow for rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Timer

from anytime.artifacts import write_json

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
NOT_NUMERIC = (
    *("api", "attacks", "cli", "data", "fault", "long", "report"),
    *("models/test_cost.py", "reproduce/test_publish.py", "train/test_benchmark.py"),
    *("train/test_recipes.py", "train/test_text_entry.py", "test_documentation.py"),
    *("test_arrays.py", "test_artifacts.py", "test_distribution_name.py", "test_reading.py"),
)
"""What compares no floating-point results under tests/; a new folder or file is numeric until it is named here."""
BUILD = ROOT / "build" / "portability"
"""Results of the last run per setting, and what pytest printed."""
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
    "numba-generic": Setting("numba without AVX", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    "two-threads": Setting("two threads per process", {"ANYTIME_TEST_THREADS": "2"}),
    "misaligned": Setting("memory aligned to 16 bytes", misaligned=True),
    "busy": Setting("a spinning process per core", busy=True),
}


@dataclass
class Result:
    """What came out under one setting.

    Attributes:
        tests: Files and folders that were run.
        passed: How many tests passed.
        skipped: How many were skipped.
        failed: Commands that run the failed ones again.
        seconds: How long it took.
        ended: Whether pytest came to its end within the limit.
        not_run: Why this machine cannot have the setting.
    """

    tests: list[str]
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: int = 0
    ended: bool = True
    not_run: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing failed."""
        return self.ended and not self.failed

    @property
    def summary(self) -> str:
        """One line."""
        if self.not_run:
            return f"not run: {self.not_run}"
        end = "" if self.ended else ", did not end"
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped{end}, {self.seconds} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the settings asked for; 1 if a test failed under any, or one did not end."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=_listed())
    parser.add_argument("--limit", type=float, default=7200, help="seconds per setting (default: %(default)g)")
    parser.add_argument("--resume", action="store_true", help="leave out settings under which the same tests passed last time")
    parser.add_argument("tests", nargs="*", help="test files or folders instead of the numeric ones")
    options = parser.parse_args(arguments)
    tests = options.tests or numeric_tests()
    kept = _kept()
    results: dict[str, Result] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends pytest and says what was found
    try:
        for name in options.settings:
            last = kept.get(name)
            if options.resume and last and last.good and last.tests == tests:
                results[name] = last
            else:
                results[name] = kept[name] = _try(name, tests, options.limit)
                write_json(BUILD / "results.json", {setting: asdict(result) for setting, result in kept.items()})
            _say(name, results[name].summary)
    finally:  # what was found is said after Ctrl-C too
        print("\nAll settings:" if len(results) == len(SETTINGS) else f"\n{len(results)} of {len(SETTINGS)} settings:")
        for name, result in results.items():
            _say(name, result.summary)
            for line in result.failed:
                print(f"  {line}")
    return not all(result.good for result in results.values())


def _kept() -> dict[str, Result]:
    """Results of earlier runs; none where there are none, or of another version of this file."""
    try:
        return {name: Result(**result) for name, result in json.loads((BUILD / "results.json").read_text()).items()}
    except (OSError, ValueError, TypeError):
        return {}


def _try(name: str, tests: list[str], limit: float) -> Result:
    setting = SETTINGS[name]
    reason = _missing(setting)
    if reason is not None:
        return Result(tests, not_run=reason)
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
    files = sorted(TESTS.rglob("test_*.py"), reverse=True)  # training takes longest and begins first
    return [str(file.relative_to(ROOT)) for file in files if not any(map(file.is_relative_to, others))] + ["src"]


def _run(name: str, tests: list[str], variables: dict[str, str], limit: float) -> Result:
    """Run the tests in a few processes; print each failed one at once, as a command that runs it again."""
    result, crashed = Result(tests), False
    began = time.monotonic()
    prefix = "".join(f"{key}={shlex.quote(value)} " for key, value in SETTINGS[name].variables.items())
    log = BUILD / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", buffering=1) as out, _pytest([*tests, "--timeout", f"{limit:g}"], variables) as process:
        timer = Timer(limit, _end, [process])
        timer.daemon = True  # does not outlive Ctrl-C
        timer.start()
        for line in process.stdout or ():
            out.write(line)
            crashed = crashed or "worker restarting disabled" in line
            if found := re.match(r"\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED) (.+?)\s*$", line):
                outcome, test = found.groups()
                result.passed += outcome == "PASSED"
                result.skipped += outcome == "SKIPPED"
                if outcome in ("FAILED", "ERROR"):
                    result.failed.append(f"{prefix}python -m pytest {shlex.quote(test)}")
                    _say(name, f"failed: {result.failed[-1]}")
        code = process.wait()
        timer.cancel()
    result.seconds = round(time.monotonic() - began)
    result.ended = code == 0 or (code == 1 and bool(result.failed) and not crashed)
    if not result.ended:
        _say(name, f"pytest ended with {code} after {result.seconds} s; its output is in {log}")
    return result


@contextmanager
def _pytest(arguments: Sequence[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Pytest and its workers as a process group of their own, which is gone afterwards; a crash ends it."""
    workers = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-vv", "--tb=short", "-p", "no:cacheprovider", *workers]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)
        process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _missing(setting: Setting) -> str | None:
    """Why this machine cannot have a setting."""
    if setting.misaligned and (sys.platform != "linux" or shutil.which("cc") is None):
        return "this needs Linux and a C compiler"
    if setting.variables.get("ATEN_CPU_CAPABILITY") == _instructions().lower():
        return "plain is the same on this processor"
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
