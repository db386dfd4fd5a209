"""Locks in forked processes: a lock that another thread held at the fork is never released there.

Every object of `run` that owns a lock or threads registers itself here, and a child process renews all of them first.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_children(owner: Any) -> None:
    """Call `owner.renew()`, which makes new locks, in every process that is forked while `owner` exists."""
    _owners.add(owner)


def _renew_all() -> None:
    for owner in list(_owners):
        owner.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
