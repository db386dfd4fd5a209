"""Small work is done by one torch thread, and large work by as many as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from anytime.threads import one_thread_for_few, torch_threads


@one_thread_for_few
def threads_for(logits: Any, *, fail: bool = False) -> int:
    if fail:
        raise ValueError
    return torch.get_num_threads()


def test_few_numbers_take_one_thread_and_many_leave_it() -> None:
    with torch_threads(2):
        assert threads_for(torch.zeros(3, 100, 10)) == 1
        assert threads_for(logits=[torch.zeros(100, 10)] * 3) == 1
        assert threads_for(torch.zeros(1, dtype=torch.bool).expand(5000, 1000)) == 2
        with pytest.raises(ValueError):
            threads_for(torch.zeros(3), fail=True)
        assert torch.get_num_threads() == 2


def test_no_number_changes_nothing() -> None:
    before = torch.get_num_threads()
    with torch_threads(None):
        assert torch.get_num_threads() == before


def test_overlapping_uses_leave_what_was_before_the_first() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with torch_threads(1):
            entered.set()
            left.wait(10)

    torch.set_num_threads(before := max(2, torch.get_num_threads()))
    thread = threading.Thread(target=other)
    with torch_threads(1):
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    assert torch.get_num_threads() == before
    seen: list[int] = []
    fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert seen == [before]
