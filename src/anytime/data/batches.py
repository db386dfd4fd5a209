"""Batches of rows of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anytime.checks import check_count
from anytime.errors import OptionError


class Batch(NamedTuple):
    """Rows that go through a network together.

    Attributes:
        rows: Their indices in the data, `(batch,)`, int64, on the CPU.
        length: The number of tokens to read: `data.ids[rows, :length]`.
    """

    rows: Tensor
    length: int


def plan_batches(
    lengths: Tensor, batch: int, *, widths: Sequence[int], generator: torch.Generator | None = None
) -> list[Batch]:
    """Group rows of similar length into batches with one of a few widths, so that each shape can be one CUDA graph.

    With a generator the plan is for training: batches are shuffled, rows are shuffled within each width, and random rows that
    do not fill a batch are dropped. Without one, every row is used once, from short to long, and the last batch may be smaller.

    Args:
        lengths: Of the rows, `(N,)`.
        batch: Rows per batch.
        widths: The allowed lengths of a batch, ascending; the last is at least as long as the longest row.
        generator: For the random order, on the CPU.

    Example:
        >>> [(b.rows.tolist(), b.length) for b in plan_batches(torch.tensor([9, 3, 4, 16, 2]), 2, widths=(4, 8, 16))]
        [([4, 1], 4), ([2, 0], 16), ([3], 16)]
    """
    lengths = lengths.cpu()
    check_count(batch, "batch")
    ends = torch.tensor(tuple(widths), dtype=torch.int64)
    longest = max(1, int(lengths.max())) if len(lengths) else 1
    if len(ends) == 0 or int(ends[0]) < 1 or bool((ends.diff() <= 0).any()) or longest > int(ends[-1]):
        raise OptionError(
            f"widths is {tuple(widths)}",
            expected=f"ascending numbers, the last at least {longest}, the length of the longest row",
            fix=f"pass, for example, widths=({longest},)",
        )
    fitting = torch.searchsorted(ends, lengths)
    if generator is None:
        order = lengths.argsort(stable=True)
    else:
        drawn = torch.randperm(len(lengths), generator=generator)[: len(lengths) // batch * batch]
        order = drawn[fitting[drawn].argsort(stable=True)]
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    plan = [Batch(part, int(ends[fitting[part].max()])) for part in parts]
    if generator is None:
        return plan
    return [plan[at] for at in torch.randperm(len(plan), generator=generator).tolist()]
