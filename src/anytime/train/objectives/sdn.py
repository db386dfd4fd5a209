"""The weights of exits in the training of shallow-deep networks (SDN, Kaya et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

_FIRST, _LAST_SHARE = 0.01, 0.9


def even_shares(exits: int) -> tuple[float, ...]:
    """What weights grow to where exits stand evenly up to nine tenths of the network, and 1 for the last.

    >>> [round(share, 2) for share in even_shares(7)]
    [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0]
    """
    return (*(_LAST_SHARE * exit / (exits - 1) for exit in range(1, exits)), 1.0)


def growing_weights(epoch: int, *, epochs: int, shares: Sequence[float]) -> tuple[float, ...]:
    """The weight of each exit in an epoch, counted from 0: it climbs evenly to the exit's share, the last stays.

    >>> growing_weights(50, epochs=100, shares=(0.3, 0.9, 1.0))
    (0.16, 0.46, 1.0)
    """
    *inner, last = shares
    return (*(min(share, _FIRST + epoch * share / epochs) for share in inner), last)
