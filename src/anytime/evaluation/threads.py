"""The threads of an evaluation, with one torch thread each (see `anytime.threads`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from anytime.installed import count_cores
from anytime.threads import torch_threads

_MAX_THREADS = 8  # each keeps about 100 MB of freed memory

MapInOrder = Callable[..., Iterator[Any]]


@contextmanager
def workers(most: int) -> Iterator[MapInOrder]:
    """A `map` over at most so many threads that yields in order and never runs far ahead of its consumer.

    A single thread is the caller's.
    """
    threads = max(1, min(count_cores(), most, _MAX_THREADS))
    if threads == 1:
        with torch_threads(1):
            yield map
        return
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def map_in_order(work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        for each in zip(*arguments, strict=True):
            waiting.append(pool.submit(work, *each))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        with torch_threads(1):
            yield map_in_order
    finally:
        pool.shutdown(cancel_futures=True)
