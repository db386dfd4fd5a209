"""Signals that a real process gets: Ctrl-C while it waits for an answer, and being stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW = """
import sys, threading, time
import torch
from anytime.run import Runner

class Slow:
    name, num_exits = "slow", 50
    begun = 0
    def begin(self, x): return self
    def advance(self):
        Slow.begun += 1
        print("stage", flush=True)
        time.sleep(0.05)
        return torch.ones(1, 3)
    def keep(self, rows): pass
    def close(self): print("closed", flush=True)

engine = Slow()
runner = Runner(engine, engine=engine)
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SLOW + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "stage\n"
    return process


@pytest.mark.long
@pytest.mark.parametrize("deadline", ["None", "60"])
def test_ctrl_c_ends_a_request_and_leaves_no_thread(deadline: str) -> None:
    process = start(f"""
try:
    runner.predict(torch.zeros(1, 1), deadline={deadline})
except KeyboardInterrupt:
    runner.close()
    print("interrupted", Slow.begun < 50, threading.active_count(), flush=True)
""")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[-1] == "interrupted True 1", err
    assert out.count("closed") == 1
    assert process.returncode == 0


@pytest.mark.long
def test_a_process_that_was_stopped_answers_late_with_what_it_has() -> None:
    process = start("""
answer = runner.predict(torch.zeros(1, 1), deadline=0.5)
runner.close()
print(answer.deadline_met, answer.reason, 1 <= answer.exit < 50, answer.elapsed > 2)
""")
    assert process.stdout is not None
    assert process.stdout.readline() == "stage\n"  # one exit is there
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[-1] == "False deadline True True", err


@pytest.mark.long
def test_an_interpreter_ends_while_a_runner_is_open_and_at_work() -> None:
    process = start("""
task = runner.submit(torch.zeros(1, 1))
while Slow.begun < 3:
    time.sleep(0.01)
""")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("stage") < 49
    assert err == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("workers", ["1", "4"])
@pytest.mark.parametrize("kind", ["forks", "interrupts"])
def test_a_thousand_forks_and_interrupts_under_load_lose_nothing(kind: str, workers: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("battery.py")), kind, "1000", workers]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert ended.stdout.split() == ["done", "1000"], ended.stderr
