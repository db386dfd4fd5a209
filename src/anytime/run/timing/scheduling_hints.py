"""Waking up in time: what a thread can ask of Linux without privileges.

By default the kernel lets a timer be 50 µs late to save power, and lets whoever runs on a busy core finish a slice of a few
milliseconds before a thread whose time has come gets its turn. A thread may ask for neither: for timers to the microsecond,
and, from Linux 6.12 on, for short slices, which put it first when it wakes up; its share of the processor stays the same.
Threads inherit both from those that begin them, so a thread that works takes usual slices again. It is also of the policy
SCHED_BATCH: when it is given work it does not push aside who gave it, who would then not come to wait for the deadline before
a slice is over. Where the system has no such thing, nothing happens.
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
_USUAL = 0
# Numbers of the calls sched_setattr and sched_getattr, for which the C library has no names.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_FAIR = (0, 3)
"""The ordinary policies, SCHED_OTHER and SCHED_BATCH; a thread under another one is left as it is."""

_here = threading.local()


@cache
def _libc() -> ctypes.CDLL:
    """Opened once: a forked process must not need the loader's lock, which another thread may have held."""
    return ctypes.CDLL(None)


def be_prompt() -> None:
    """Have the calling thread woken without delay from now on."""
    if not hasattr(_here, "prompt"):
        _here.prompt = True
        if sys.platform == "linux":
            _libc().prctl(_TIMER_SLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
            _take_slices(_SLICE_NS)


def be_patient() -> None:
    """Let the calling thread have usual slices of time, and begin its work when others wait."""
    if sys.platform == "linux":
        _take_slices(_USUAL)
        with suppress(OSError):  # forbidden in some containers
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _take_slices(nanoseconds: int) -> None:
    calls = _CALLS.get(platform.machine())
    if calls is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    set_call, get_call = calls
    syscall, held = _libc().syscall, ctypes.create_string_buffer(_ATTRIBUTES.size)
    if syscall(get_call, 0, held, _ATTRIBUTES.size, 0) != 0:
        return
    size, policy, flags, nice, priority, _, *others = _ATTRIBUTES.unpack(held.raw)
    if policy in _FAIR:
        wanted = _ATTRIBUTES.pack(size, policy, flags, nice, priority, nanoseconds, *others)
        syscall(set_call, 0, ctypes.create_string_buffer(wanted, len(wanted)), 0)
