"""Torch's thread count, which belongs to the whole process, while runners are open."""

from __future__ import annotations

import os
import threading
from typing import ClassVar

import torch


class TorchThreads:
    """Sets torch's thread count until it is restored."""

    _open: ClassVar[list[TorchThreads]] = []
    _changing = threading.RLock()  # garbage collection may end one runner while another is made

    def __init__(self, threads: int | None) -> None:
        self.wanted = threads
        with self._changing:
            self._before = torch.get_num_threads()
            if threads is not None:
                self._open.append(self)
                if threads != self._before:
                    torch.set_num_threads(threads)

    def restore(self) -> None:
        """Restore the count unless it was changed since; if runners made later are open, the next one does so."""
        with self._changing:
            if self not in self._open:
                return
            place = self._open.index(self)
            self._open.remove(self)
            if place < len(self._open):
                self._open[place]._before = self._before
            elif self.wanted != self._before and torch.get_num_threads() == self.wanted:
                torch.set_num_threads(self._before)

    @classmethod
    def renew(cls) -> None:
        """Make a new lock, in a forked process."""
        cls._changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TorchThreads.renew)
