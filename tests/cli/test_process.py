"""How the command ends: Ctrl-C at any moment, readers that leave, full disks and closed streams, odd terminals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from anytime.cli import run
from anytime.process import exit_code

RANDOM = np.random.default_rng(0)
COMMAND = f"{sys.executable} -m anytime.cli"


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits") / "a.npz"
    labels = np.arange(60) % 5
    np.savez(path, logits=3 * RANDOM.normal(size=(3, 60, 5)).astype("f4"), labels=labels)
    return path


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line for bash, whose exit code is that of the first command."""
    full = f"{line}\nexit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", full], capture_output=True, text=True, timeout=280, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("{0} evaluate {1} | head -1", 0, ""),
        ("{0} evaluate {1} --json | true", 0, ""),
        ("{0} --help | head -1", 0, ""),
        ("{0} evaluate {1} > /dev/full", 2, "No space left"),
        ("{0} evaluate {1} --json > /dev/full", 2, "No space left"),
        ("{0} evaluate {1} >&-", 2, "could not be written"),
        ("{0} evaluate {1} 2>&-", 0, ""),
        ("{0} evaluate {1} --rules nonsense 2> /dev/full", 2, ""),
        ("{0} evaluate {1} --rules nonsense >&- 2>&- <&-", 2, ""),
    ],
)
def test_output_that_cannot_be_written(logits: Path, line: str, code: int, said: str) -> None:
    done = shell(line.format(COMMAND, logits))
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


def test_messages_do_not_go_to_stdout_where_stderr_is_closed(logits: Path) -> None:
    assert shell(f"{COMMAND} evaluate {logits} --json 2>&-").stdout.startswith("{")


@pytest.mark.parametrize("columns", ["0", "1", "-5", "²", "99999999999999999999", "1000000000"])
def test_any_width_of_the_terminal_gives_a_table(
    logits: Path, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in (["evaluate", str(logits)], ["--help"]):
        assert run(arguments) == 0
        assert len(capsys.readouterr().out) < 20_000


@pytest.mark.parametrize("program", ["anytime.cli doctor", "anytime.train --help"])
def test_ctrl_c_is_130_at_any_moment(program: str) -> None:
    """From the first import of ours to the end; before that it is Python's own."""
    random.seed(0)
    for everybody in (False, True):
        words = program.split()
        code = (
            f"import sys, runpy; words = {words}; sys.argv[:], sys.orig_argv = ['-m'], ['python', '-m', *words]\n"
            "import anytime; print('begun', flush=True); sys.argv[:] = words\n"
            "runpy.run_module(words[0], run_name='__main__', alter_sys=True)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(random.uniform(0, 2))
        if process.poll() is None:
            (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=140)
        assert process.returncode in (0, 130), err
        assert "Traceback" not in err
        assert "ignored" not in err


def test_ctrl_c_in_a_verb_is_130(logits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anytime.evaluation.evaluate", interrupted)
    assert run(["evaluate", str(logits)]) == 130
    assert capsys.readouterr().err == "anytime: interrupted\n"


def test_ctrl_c_that_breaks_a_clean_up_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("what the clean-up needs was not made yet")

    assert exit_code(interrupted) == 130
    assert capsys.readouterr().err == "anytime: interrupted\n"


def test_a_full_memory_is_said(logits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 799999999992 bytes.")

    monkeypatch.setattr("anytime.evaluation.evaluate", full)
    assert run(["evaluate", str(logits)]) == 2
    assert "out of memory" in capsys.readouterr().err


def test_a_bug_is_not_hidden(logits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, **options: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("anytime.evaluation.evaluate", wrong)
    with pytest.raises(KeyError):
        run(["evaluate", str(logits)])
