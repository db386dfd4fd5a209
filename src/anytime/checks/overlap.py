"""Whether two sets of rows are disjoint: the one check of it, over all exits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anytime.errors import OverlapError

MOST_SHARED = 0.01
"""Two sets of rows are not disjoint from this fraction of shared rows on."""
_FINGERPRINT_NUMBERS = 1 << 22


def fingerprints(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """One 64-bit number per row, equal for rows with the same numbers at all exits, in any floating-point precision.

    A row is rounded to float32 and then to float16, so that copies in float64, float32 and float16 agree: the tolerance is
    half a unit in the last place of float16, 0.05 % of each number. One exit alone is not enough: with two classes, different
    inputs have equal logits by chance. Rows outside of the range of float16 are scaled by a power of two first.

    Args:
        rows: `(exits, batch, classes)`, or one tensor `(batch, ...)` per exit.
    """
    parts = [exit.detach().flatten(1) for exit in rows]
    width = max(1, sum(part.shape[1] for part in parts))
    digests = bytearray()
    for first in range(0, len(parts[0]), max(1, _FINGERPRINT_NUMBERS // width)):
        block = slice(first, first + max(1, _FINGERPRINT_NUMBERS // width))
        values = torch.cat([part[block].cpu().double() for part in parts], 1).numpy()
        size = np.abs(np.where(np.isinf(values), 0.0, values)).max(1, initial=0.0, keepdims=True)
        ordinary = (size >= 2.0**-6) & (size <= np.finfo(np.float16).max)
        scaled = np.ldexp(values, np.where(ordinary, 0, -np.frexp(size)[1]))
        for row in scaled.astype(np.float32).astype(np.float16) + np.float16(0):  # makes -0 equal to 0
            digests += hashlib.blake2b(row.tobytes(), digest_size=8).digest()
    return torch.frombuffer(digests, dtype=torch.int64) if digests else torch.zeros(0, dtype=torch.int64)


def shared_rows(prints: Tensor, known: Tensor, *, names: tuple[str, str]) -> Tensor:
    """A mask of the rows that are also among others, by their `fingerprints`; refused from one in a hundred on.

    Data sets contain some inputs twice, so a few shared rows do not mean that the same rows were passed twice.

    Args:
        prints: Of the rows in question.
        known: Of the others.
        names: Names of both for the error, such as "test rows" and "the calibration rows".
    """
    shared = torch.isin(prints, known)
    check_shared(int(shared.sum()), len(prints), names=names)
    return shared


def check_shared(count: int, rows: int, *, names: tuple[str, str]) -> None:
    """Refuse rows of which so many are also among others; see `shared_rows`."""
    if count and count >= MOST_SHARED * rows:
        raise OverlapError(
            f"{count} of the {rows} {names[0]} are among {names[1]}",
            expected=f"different rows for each, with less than {100 * MOST_SHARED:g} % duplicates",
            fix="use a random split, e.g. torch.randperm(rows).chunk(2)",
        )


def check_disjoint(first: Tensor | Sequence[Tensor], second: Tensor | Sequence[Tensor], *, names: tuple[str, str]) -> None:
    """Refuse two sets of rows, `(exits, batch, classes)` or one tensor per exit, that are the same rows at all exits."""
    shared_rows(fingerprints(second), fingerprints(first), names=(f"rows for {names[1]}", f"those for {names[0]}"))
