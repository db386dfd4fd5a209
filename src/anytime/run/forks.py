"""What a forked process needs anew: a lock that another thread held at the fork is never released there.

Every object of `run` that owns a lock or threads registers itself here. A child renews all of them before anything else.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object with locks, threads, or both."""

    def renew(self) -> None:
        """Called in a forked process: make new locks. Other threads may have left any change half done."""
        ...


_owners: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(owner: Renewable) -> None:
    """Have `owner.renew()` called in every process that is forked while it exists."""
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        owner.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
