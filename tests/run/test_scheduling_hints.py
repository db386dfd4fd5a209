"""Scheduling hints change how soon a thread is woken, and nothing else about it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

import pytest

from anytime.run.timing import scheduling_hints
from anytime.run.timing.clock import MonotonicClock

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="timer slack is a setting of Linux")
State = tuple[int, int, int]


def in_a_thread(work: Callable[[], object]) -> tuple[State, State]:
    """The scheduling of a thread before and after some work: timer slack, policy and niceness."""
    found: list[State] = []

    def state() -> State:
        slack: int = ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK
        return slack, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    def run() -> None:
        found.append(state())
        work()
        found.append(state())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    before, after = found
    return before, after


def wait(clock: MonotonicClock, seconds: float | None) -> None:
    gate = threading.Lock()
    if seconds is not None:
        gate.acquire()
    clock.wait(gate, seconds)


@on_linux
def test_a_wait_with_a_timeout_is_exact_and_keeps_policy_and_niceness() -> None:
    before, after = in_a_thread(lambda: wait(MonotonicClock(), 1e-4))
    assert after == (1_000, *before[1:])


@on_linux
@pytest.mark.parametrize(("clock", "seconds"), [(MonotonicClock(prompt=False), 1e-4), (MonotonicClock(), None)])
def test_a_wait_without_hints_or_without_a_timeout_changes_nothing(clock: MonotonicClock, seconds: float | None) -> None:
    before, after = in_a_thread(lambda: wait(clock, seconds))
    assert after == before


@on_linux
def test_workers_do_not_preempt_and_keep_their_niceness() -> None:
    before, after = in_a_thread(scheduling_hints.use_batch_scheduling)
    assert after == (before[0], os.SCHED_BATCH, before[2])


@on_linux
def test_a_forbidden_policy_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not allowed here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before, after = in_a_thread(scheduling_hints.use_batch_scheduling)
    assert after == before


@on_linux
def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            scheduling_hints.request_prompt_wakeups()
            scheduling_hints.use_batch_scheduling()

    before, after = in_a_thread(both)
    assert after == before


@on_linux
def test_an_unknown_processor_gets_exact_timers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_hints.platform, "machine", lambda: "riscv64")
    before, after = in_a_thread(scheduling_hints.request_prompt_wakeups)
    assert after == (1_000, *before[1:])
