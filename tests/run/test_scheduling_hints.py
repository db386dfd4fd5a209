"""What is asked of the kernel changes how soon a thread is woken, and nothing else about it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

import pytest

from anytime.run.timing import scheduling_hints as prompt
from anytime.run.timing.clock import MonotonicClock

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="timer slack is a setting of Linux")
_GET_TIMER_SLACK = 30


def in_a_thread(work: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def timer_slack() -> int:
    slack: int = ctypes.CDLL(None).prctl(_GET_TIMER_SLACK, 0, 0, 0, 0)
    return slack


def wait(clock: MonotonicClock, seconds: float | None) -> None:
    gate = threading.Lock()
    if seconds is not None:
        gate.acquire()
    clock.wait(gate, seconds)


@on_linux
def test_a_wait_with_a_limit_is_exact_and_keeps_policy_and_niceness() -> None:
    def work() -> None:
        before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        wait(MonotonicClock(), 1e-4)
        assert timer_slack() == 1_000
        assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before

    in_a_thread(work)


@on_linux
def test_who_works_pushes_nobody_aside_and_keeps_its_niceness() -> None:
    def work() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        prompt.be_patient()
        assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == (os.SCHED_BATCH, nice)

    in_a_thread(work)


@on_linux
def test_a_forbidden_policy_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not allowed here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    in_a_thread(prompt.be_patient)


@on_linux
@pytest.mark.parametrize(("clock", "seconds"), [(MonotonicClock(prompt=False), 1e-4), (MonotonicClock(), None)])
def test_nothing_is_asked_where_it_is_not_wanted_or_nothing_is_limited(clock: MonotonicClock, seconds: float | None) -> None:
    def work() -> None:
        before = timer_slack()
        wait(clock, seconds)
        assert timer_slack() == before

    in_a_thread(work)


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    in_a_thread(prompt.be_prompt)
    in_a_thread(prompt.be_patient)


@on_linux
def test_an_unknown_machine_keeps_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt.platform, "machine", lambda: "riscv64")
    in_a_thread(prompt.be_prompt)
