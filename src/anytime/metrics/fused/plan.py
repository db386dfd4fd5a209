"""From rules to the arguments of the kernel, and from its results to trajectories."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anytime.combine.encoded import CACHING_EARLIER, CACHING_LATER, LATEST, Encoded, encode_known
from anytime.combine.fused import MOST_CLASSES, is_available, on_device, power_of_two, tile
from anytime.metrics.fused import layout
from anytime.metrics.trajectories import Trajectories

MOST_EXITS = 64
NO_FAULT = torch.iinfo(torch.int64).max
"""In place of the number of a logit that is not finite where there is none."""
_REGISTERS = 128
"""Of a thread, at most: with more, too few programs run beside each other."""


@dataclass(frozen=True)
class SetTask:
    """What to compute of prediction sets.

    Attributes:
        lam_reg, k_reg, randomised, original, empty: Of `anytime.conformal.Raps`.
        draws: Random numbers, `(exits, rows)`, on the device.
        limits: The threshold at each exit, `(exits,)`, of each rule that has sets; None for the scores of the labels.
    """

    lam_reg: float
    k_reg: int
    randomised: bool
    original: bool
    empty: bool
    draws: Tensor
    limits: Mapping[Any, Tensor] | None


@dataclass(frozen=True)
class Fused:
    """What the kernel found under one rule; every tensor is `(exits, rows)` on the device.

    Attributes:
        seen: The trajectories.
        size, covered: The size of each prediction set and whether it contains the label, if there are sets.
        score: The label's score, if requested.
    """

    seen: Trajectories
    size: Tensor | None = None
    covered: Tensor | None = None
    score: Tensor | None = None


@dataclass(frozen=True)
class FusedRules:
    """Rules that the kernel follows together, on logits of one shape, type and device.

    Attributes:
        encoded: The rules by name.
        exits, classes: The shape of the logits.
        dtype: In which to compute, float32 or float64.
        device: Of the logits.
    """

    encoded: Mapping[Any, Encoded]
    exits: int
    classes: int
    dtype: torch.dtype
    device: torch.device

    def follow(
        self,
        logits: Tensor,
        labels: Tensor | None,
        *,
        faults: Tensor,
        first_row: int = 0,
        picked: Tensor | None = None,
        sets: SetTask | None = None,
    ) -> dict[Any, Fused]:
        """Follow rows under all rules. Nothing is read back from the device.

        Args:
            logits: `(exits, rows, classes)`.
            labels: One per row that is followed, if there are any.
            faults: `(1,)`, int64: lowered to row × exits + exit of the first logit that is not finite.
            first_row: The number of the first row, for faults.
            picked: Which rows to follow; by default all.
            sets: What to compute of prediction sets.
        """
        from anytime.metrics.fused.kernel import follow_rows

        values = logits if logits.stride(-1) == 1 else logits.contiguous()
        count = values.shape[1] if picked is None else len(picked)
        slots, exits = self._slots, self.exits
        shape = (len(slots), exits, count)
        whole = torch.empty(3, *shape, dtype=torch.int32, device=self.device)
        marks = torch.empty(3, *shape, dtype=torch.bool, device=self.device)
        real = torch.empty(6, *shape, dtype=self.dtype, device=self.device)
        task = layout.NO_SETS if sets is None else layout.SCORES if sets.limits is None else layout.SIZES
        kinds = [each.kind for each in slots]
        latest, caching = (next((at for at, kind in enumerate(kinds) if kind in known), -1) for known in _SOFTMAXES)
        experts = slots[(latest >= 0) + (caching >= 0) :]
        sizes = tile(self.classes)
        if count:
            anything = faults  # an argument that is not read
            with on_device(values):
                follow_rows[(-(-count // sizes["rows"]),)](
                    values,
                    values.stride(0),
                    values.stride(1),
                    anything if picked is None else picked,
                    anything if labels is None else labels,
                    anything if sets is None else sets.draws,
                    0 if sets is None else sets.draws.stride(0),
                    0 if sets is None else sets.draws.stride(1),
                    *self._numbers,
                    anything if sets is None or sets.limits is None else self._limits(sets.limits),
                    whole,
                    marks.view(torch.int8),
                    real,
                    faults,
                    count,
                    first_row,
                    len(slots),
                    exits,
                    self.classes,
                    0.0 if sets is None else sets.lam_reg,
                    0 if sets is None else sets.k_reg,
                    latest=latest,
                    caching=caching,
                    later_ties=CACHING_LATER in kinds,
                    kinds=tuple(each.kind for each in experts),
                    activations=tuple(each.activation for each in experts),
                    experts=len(experts),
                    chosen=picked is not None,
                    labelled=labels is not None,
                    task=task,
                    randomised=sets is not None and sets.randomised,
                    original=sets is not None and sets.original,
                    empty=sets is not None and sets.empty,
                    double=self.dtype == torch.float64,
                    depth=power_of_two(exits),
                    **sizes,
                    num_stages=1,
                    maxnreg=None if self.dtype == torch.float64 else _REGISTERS,
                    enable_fp_fusion=False,  # equal evidence must stay equal, as in torch's separate operations
                )
        found, sized = {}, () if sets is None or sets.limits is None else sets.limits
        for name, each in self.encoded.items():
            r = slots.index(each)
            found[name] = Fused(
                Trajectories(
                    answer=whole[layout.ANSWER, r],
                    confidence=real[layout.CONFIDENCE, r],
                    final=real[layout.FINAL, r],
                    entropy=real[layout.ENTROPY, r],
                    square=real[layout.SQUARE, r],
                    support=whole[layout.SUPPORT, r],
                    fell_back=marks[layout.FELL_BACK, r],
                    label=None if labels is None else real[layout.LABEL, r],
                    correct=None if labels is None else marks[layout.CORRECT, r],
                ),
                size=whole[layout.SIZE, r] if name in sized else None,
                covered=marks[layout.COVERED, r] if name in sized else None,
                score=real[layout.SCORE, r] if task == layout.SCORES else None,
            )
        return found

    @cached_property
    def _slots(self) -> Sequence[Encoded]:
        """The different rules, softmaxes first."""
        different: list[Encoded] = []
        for each in self.encoded.values():
            if each not in different:
                different.append(each)
        return sorted(different, key=lambda each: each.kind)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Evidence, weights and fractions of the products and mixtures."""
        experts = [each for each in self._slots if each.kind not in (LATEST, CACHING_EARLIER, CACHING_LATER)]
        lists = ([each.evidence for each in experts], [each.weights for each in experts], [each.fractions for each in experts])
        made = [torch.tensor(each or [0.0], dtype=self.dtype).to(self.device, non_blocking=True) for each in lists]
        return made[0], made[1], made[2]

    def _limits(self, given: Mapping[Any, Tensor]) -> Tensor:
        by_rule = {self._slots.index(each): given[name] for name, each in self.encoded.items() if name in given}
        none = torch.full((self.exits,), torch.inf)
        return torch.stack([by_rule.get(slot, none).to(self.device, self.dtype) for slot in range(len(self._slots))])


_SOFTMAXES = ((LATEST,), (CACHING_EARLIER, CACHING_LATER))


def fused_rules(
    combiners: Mapping[Any, Any],
    *,
    exits: int,
    classes: int,
    dtype: torch.dtype,
    device: torch.device,
    but: Collection[Any] = (),
) -> FusedRules | None:
    """The rules that the kernel can follow on such logits, or None if there are none.

    Args:
        combiners: The rules' `combine` by name.
        exits: Of the logits.
        classes: Of the logits.
        dtype: Of the logits.
        device: Of the logits.
        but: Rules to leave out.
    """
    if not is_available(device) or not (2 <= classes <= MOST_CLASSES and exits <= MOST_EXITS):
        return None
    real = torch.float64 if dtype == torch.float64 else torch.float32
    known = encode_known({name: each for name, each in combiners.items() if name not in but}, (), exits, classes, _NUMPY[real])
    if {CACHING_EARLIER, CACHING_LATER} <= {each.kind for each in known.values()}:  # the kernel has one cache
        known = {name: each for name, each in known.items() if each.kind != CACHING_LATER}
    return FusedRules(known, exits, classes, real, device) if known else None


_NUMPY = {torch.float32: "float32", torch.float64: "float64"}
