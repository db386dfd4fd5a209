"""Tasks on several processes of this machine, which end when this process ends, even if it is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from anytime.errors import StateError
from anytime.evaluation.shards import Mapper, Packed


@contextmanager
def on_processes(count: int) -> Iterator[Mapper]:
    """A function that maps tasks over so many processes, each with one thread."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    pool = ProcessPoolExecutor(count, context, _begin, (theirs,))
    try:
        yield partial(_as_completed, pool, 2 * count)
        pool.shutdown()
    except BrokenProcessPool as error:
        raise StateError(
            "a process that evaluated a part has ended",
            expected="processes that run to the end",
            fix="use fewer processes if memory is short; with a folder for the sums, the same call continues",
        ) from error
    finally:
        ours.close()  # ends processes that still compute
        theirs.close()
        pool.shutdown(cancel_futures=True)


def _as_completed(
    pool: ProcessPoolExecutor, ahead: int, work: Callable[..., Any], tasks: Sequence[tuple[int, bytes]]
) -> Iterator[Packed]:
    running: dict[Future[Any], int] = {}
    waiting = list(reversed(tasks))
    while waiting or running:
        while waiting and len(running) < ahead:
            index, packed = waiting.pop()
            running[pool.submit(work, packed)] = index
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield (running.pop(future), *future.result())


def _begin(alive: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    """End this process when the other end of the pipe is closed, as the kernel does for a killed process."""
    with suppress(OSError, EOFError):
        alive.recv_bytes()
    os._exit(1)
