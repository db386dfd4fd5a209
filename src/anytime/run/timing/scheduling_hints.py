"""Prompt wake-ups: scheduling hints that a thread can give to Linux without privileges.

By default the kernel may fire a timer 50 µs late to save power, and on a busy core a thread that wakes up waits until the
running one has used its time slice of a few milliseconds. A thread can ask for timers exact to the microsecond and, from Linux
6.12 on, for short slices, which let it run first when it wakes up; its fraction of CPU time stays the same. New threads inherit
both, so worker threads return to default slices. They also use the policy SCHED_BATCH: a worker that receives work does not
preempt the thread that submitted it, which could otherwise start to wait for its deadline only a slice later. On other systems
these functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from contextlib import suppress
from functools import cache

_TIMER_SLACK = 29
_SLACK_NS = 1_000
_SLICE_NS = 100_000
_DEFAULT_SLICE = 0
# System call numbers of sched_setattr and sched_getattr, which the C library does not wrap.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_FAIR = (0, 3)
"""The ordinary policies, SCHED_OTHER and SCHED_BATCH; threads under other policies are left unchanged."""

_this_thread = threading.local()


@cache
def _libc() -> ctypes.CDLL:
    """Opened once: a forked process must not need the loader's lock, which another thread may have held."""
    return ctypes.CDLL(None)


def request_prompt_wakeups() -> None:
    """Ask for exact timers and short time slices for the calling thread, from now on."""
    if not hasattr(_this_thread, "prompt"):
        _this_thread.prompt = True
        if sys.platform == "linux":
            _libc().prctl(_TIMER_SLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
            _set_slice(_SLICE_NS)


def use_batch_scheduling(nice: int = 0) -> None:
    """Give the calling thread default time slices, and do not let it preempt others when it wakes up.

    Args:
        nice: By how much to lower its priority.
    """
    if sys.platform == "linux":
        _set_slice(_DEFAULT_SLICE)
        if nice:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))
        with suppress(OSError):  # forbidden in some containers
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _set_slice(nanoseconds: int) -> None:
    calls = _CALLS.get(platform.machine())
    if calls is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    set_call, get_call = calls
    syscall, current = _libc().syscall, ctypes.create_string_buffer(_ATTRIBUTES.size)
    if syscall(get_call, 0, current, _ATTRIBUTES.size, 0) != 0:
        return
    size, policy, flags, nice, priority, _, *others = _ATTRIBUTES.unpack(current.raw)
    if policy in _FAIR:
        wanted = _ATTRIBUTES.pack(size, policy, flags, nice, priority, nanoseconds, *others)
        syscall(set_call, 0, ctypes.create_string_buffer(wanted, len(wanted)), 0)
