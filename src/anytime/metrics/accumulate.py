"""Metrics that accumulate in a loop: the sums of a `Summary` per rule, updated batch by batch on any device.

`update` reads nothing back from a GPU, so a training loop does not wait for it: what has to be read to be checked (NaN, labels
out of range) is noted on the device, and `compute` raises the error. On a GPU it only copies the batch: rows wait there until
there are enough to follow them together, which takes hundreds of operations however few they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.checks import (
    as_float,
    check_flag,
    check_label_shape,
    check_labels,
    check_logits,
    check_scale,
    exit_costs,
    not_finite,
    stack_exits,
)
from anytime.combine import Latest, Rule
from anytime.combine.dense import check_ignored, labelled_rows
from anytime.combine.named import DEFAULT_RULES, name_rules, plain_rules
from anytime.errors import DtypeError, LabelError, OptionError, ShapeError
from anytime.metrics.fused import NO_FAULT, FusedRules, fused_rules
from anytime.metrics.rule_metrics import RuleMetrics
from anytime.metrics.summary import Summary, is_read_at_once, joined, joint, metrics_of, pack, together, unpack
from anytime.metrics.trajectories import follow

_SOME = 64
"""How many rows are kept to tell logits from probabilities."""
_NONE = NO_FAULT
"""In place of the first bad row where there is none."""
_WAITING_BYTES = 64 << 20
"""How many bytes of logits may wait on a GPU."""


class Metrics:
    """The metrics of each rule, accumulated over batches: equal to those of `anytime.evaluate` on the same rows.

    Prediction sets are calibrated on held-out rows, so their metrics are left to `evaluate`.

    Args:
        rules: Rules by name, as objects or as fitted objects, or a mapping from names to these or to other callables.
        costs: Cumulative cost up to each exit, for consistency and diminishing returns; 1, 2, 3, … by default.
        strict: Count drops above a threshold (released code) rather than at or above it (paper).
        class_dim: The dimension of the classes of dense logits, such as 2 for `(exits, batch, classes, height, width)`. Every
            labelled position is then a row, and there is a mean IoU.
        ignore_index: The label of positions to leave out. Finding them waits for a GPU.

    Example:
        >>> metrics = Metrics(rules=["latest", "product"])
        >>> for seed in range(3):  # a validation loop
        ...     logits, labels = torch.randn(4, 20, 10), torch.arange(20) % 10
        ...     metrics.update(logits, labels)
        >>> found = metrics.compute()
        >>> metrics.rows, len(found["product"].accuracy)
        (60, 4)
    """

    def __init__(
        self,
        rules: Sequence[str | Rule[Any]] | Mapping[str, Any] | str | Rule[Any] = DEFAULT_RULES,
        *,
        costs: Sequence[float] | None = None,
        strict: bool = False,
        class_dim: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        check_ignored(class_dim, ignore_index)
        self.rules = name_rules(rules)
        self.class_dim, self.ignore_index = class_dim, ignore_index
        self.costs = costs
        self.strict = check_flag(strict, "strict")
        self.reset()

    def reset(self) -> None:
        """Forget all rows; the next batch may have another number of exits or classes."""
        self.rows = 0
        self._exits = self._classes = 0
        self._labelled: bool | None = None
        self._summaries: dict[str, Summary] = {}
        self._combiners: dict[str, Any] = {}
        self._fused: dict[Any, FusedRules | None] = {}
        self._waiting: _Waiting | None = None
        self._followed = 0
        self._faults: Tensor | None = None
        self._some: Tensor | None = None

    @torch.no_grad()
    def update(self, logits: Any, labels: Any = None) -> None:
        """Add a batch.

        Args:
            logits: `(exits, batch, classes)`, or a list with `(batch, classes)` per exit, on any device; with `class_dim`, of
                more dimensions.
            labels: `(batch,)` class indices on the same device, with all batches or with none; with `class_dim`, the shape of
                the logits without exits and classes.
        """
        values = stack_exits(logits, dense=self.class_dim is not None)
        if self.class_dim is not None:
            values, labels = labelled_rows(values, labels, self.class_dim, self.ignore_index)
        values, known = self._checked(values, labels)
        self._start(values, labelled=known is not None)
        if is_read_at_once(values) or self.class_dim is not None:
            self._follow(values, known)
        else:
            self._hold(values, known)
        self.rows += values.shape[1]

    def _hold(self, values: Tensor, labels: Tensor | None) -> None:
        """Copy rows to those that wait on the device."""
        if self._waiting is not None and not self._waiting.fits(values):
            self._follow_waiting()
            if not self._waiting.fits(values):  # more than fit at all, or of another type
                self._waiting = None
        if self._waiting is None:
            rows = max(_WAITING_BYTES // max(values[:, :1].numel() * values.element_size(), 1), values.shape[1])
            self._waiting = _Waiting(values, rows, labelled=labels is not None)
        self._waiting.add(values, labels)

    @torch.no_grad()
    def _follow_waiting(self) -> None:
        if self._waiting is not None and self._waiting.rows:
            self._follow(*self._waiting.take())

    def _follow(self, values: Tensor, labels: Tensor | None) -> None:
        """Add rows to the sums."""
        values = as_float(values, "logits")
        at_once, classes = is_read_at_once(values), values.shape[2]
        fused = None if at_once or self.class_dim is not None else self._fused_rules(values)
        rest = {name: combine for name, combine in self._combiners.items() if fused is None or name not in fused.encoded}
        if not at_once:
            faults = self._faults
            self._faults = torch.full((2,), _NONE, device=values.device) if faults is None else faults.to(values.device)
            labels = None if labels is None else self._note_bad_labels(labels, classes)
            if fused is None:
                self._note_not_finite(values)
        # All rules before any sum: a rule that raises an error leaves the sums as they were.
        seen = {name: follow(combine(values), labels) for name, combine in rest.items()}
        if fused is not None:
            found = fused.follow(values, labels, faults=self.faults[:1], first_row=self._followed)
            seen |= {name: each.seen for name, each in found.items()}
        for names in together(seen):
            with joint([self._summaries[name] for name in names]) as summary:
                summary.add(joined([seen[name] for name in names]))
        if self.class_dim is not None and labels is not None:
            for name, summary in self._summaries.items():
                summary.add_classes(seen[name], labels, classes)
        if self._some is None and values.shape[1]:
            self._some = values[:, :_SOME].clone()
        self._followed += values.shape[1]

    def _fused_rules(self, values: Tensor) -> FusedRules | None:
        key = values.shape[2], values.dtype, values.device
        if key not in self._fused:
            exits, _, classes = values.shape
            self._fused[key] = fused_rules(
                self._combiners, exits=exits, classes=classes, dtype=values.dtype, device=values.device
            )
        return self._fused[key]

    def compute(self) -> dict[str, RuleMetrics]:
        """The metrics of each rule over all rows so far. This waits for the device."""
        if not self.rows:
            raise OptionError("metrics of no rows", expected="at least one batch", fix="call update(logits, labels) first")
        self.raise_faults()
        if self._some is not None:
            check_scale(self._some)
        return metrics_of(self._summaries)

    def merge(self, other: Metrics) -> None:
        """Add all rows of another object with the same settings, such as that of another process."""
        if not isinstance(other, Metrics):
            raise DtypeError(
                f"the other metrics are a {type(other).__name__}",
                expected="an anytime.metrics.Metrics",
                fix="merge the objects before compute()",
            )
        if (self.rules, self._settings()) != (other.rules, other._settings()):
            raise OptionError(
                f"metrics of other rules or settings: {other!r}",
                expected=f"those of {self!r}",
                fix="create both with the same arguments",
            )
        if not other._summaries:
            return
        self._follow_waiting()
        other._follow_waiting()
        if not self._summaries:
            self._begin(other._exits, labelled=bool(other._labelled))
        self._check_same(other._exits, other._classes, labelled=bool(other._labelled))
        self._classes = self._classes or other._classes
        for name, summary in self._summaries.items():
            summary.merge(other._summaries[name])
        if other._faults is not None:
            moved = other._faults + torch.tensor([self.rows * self._exits, self.rows], device=other._faults.device)
            self._note(torch.where(other._faults == _NONE, _NONE, moved))
        self._some = self._some if self._some is not None else other._some
        self.rows += other.rows
        self._followed = self.rows

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: the sums, without the room for rows that wait and what is compiled for a device."""
        self._follow_waiting()
        return {**self.__dict__, "_waiting": None, "_fused": {}}

    def __repr__(self) -> str:
        return f"Metrics({self.rules}, {self._settings()}, rows={self.rows})"

    def _settings(self) -> str:
        return f"strict={self.strict}, class_dim={self.class_dim}, ignore_index={self.ignore_index}"

    def prepared(self, exits: int, *, labelled: bool = True) -> Metrics:
        """A new object with these settings that has seen no rows and takes only batches like these."""
        fresh = Metrics(
            self.rules, costs=self.costs, strict=self.strict, class_dim=self.class_dim, ignore_index=self.ignore_index
        )
        fresh._begin(exits, labelled=labelled)
        return fresh

    def pack(self) -> Tensor:
        """All sums as one float64 vector on their device: the sum of two vectors is that of all rows."""
        return pack(value for summary in self._with_sums().values() for value in summary.sums.values())

    def unpack(self, sums: Tensor, faults: Tensor) -> None:
        """Replace the sums of a prepared object by those of `pack`, and its `faults`."""
        summaries = self._with_sums().values()
        values = unpack(sums, [value for summary in summaries for value in summary.sums.values()])
        for summary in summaries:
            summary.sums = dict(zip(summary.sums, values, strict=False))
        self._faults = faults
        self.rows = self._followed = int(next(iter(self._summaries.values())).sums["rows"])

    @property
    def faults(self) -> Tensor:
        """The first value that is not finite, as row × exits + exit, and the first row with a bad label; int64, `(2,)`."""
        self._follow_waiting()
        return torch.full((2,), _NONE) if self._faults is None else self._faults

    def _with_sums(self) -> dict[str, Summary]:
        """The sums of each rule, zero if there were no rows."""
        self._follow_waiting()
        if not all(summary.sums for summary in self._summaries.values()):
            labels = torch.zeros(0, dtype=torch.int64) if self._labelled else None
            nothing = follow(Latest()(torch.zeros(self._exits, 0, 2)), labels)  # no rows are the same under any rule
            for summary in self._summaries.values():
                summary.add(nothing)
        return self._summaries

    def raise_faults(self) -> None:
        """Raise the error for a value that is not finite, or for a bad label, that `update` noted on the device."""
        place, row = self.faults.tolist()
        if place != _NONE:
            row, exit = divmod(place, self._exits)
            what = f"logits are NaN or infinite, first at exit {exit + 1}, row {row} (rows count from 0)"
            raise not_finite(what, exit=exit + 1, row=row)
        if row != _NONE:
            raise LabelError(
                f"the label of row {row} (rows count from 0) is not a class",
                expected="class indices from 0 to classes - 1",
                fix="use the class list of the logits for the labels",
            )

    def _checked(self, values: Tensor, labels: Any) -> tuple[Tensor, Tensor | None]:
        if is_read_at_once(values):
            checked = check_logits(values, first_row=self.rows)
            _, batch, classes = checked.shape
            return checked, None if labels is None else check_labels(labels, batch=batch, classes=classes, device=values.device)
        check_logits(values[:, :0] if values.ndim == 3 else values)  # rank and element type, without reading the data
        return values, None if labels is None else check_label_shape(labels, batch=values.shape[1], device=values.device)

    def _start(self, values: Tensor, *, labelled: bool) -> None:
        """Prepare for a batch, or refuse one that is unlike those before."""
        exits, _, classes = values.shape
        if exits < 2 or classes < 2:
            raise ShapeError(
                f"logits of shape {tuple(values.shape)}: one {'exit' if exits < 2 else 'class'}",
                expected="at least two exits and two classes, (exits, batch, classes)",
                fix="pass the logits of all exits: torch.stack(list_of_exits)",
            )
        if self._summaries:
            self._check_same(exits, classes, labelled=labelled)
        if not self._combiners:
            plain = plain_rules(self.rules, exits, classes)
            self._combiners = {name: each.combine if isinstance(each, Rule) else each for name, each in plain.items()}
        if not self._summaries:
            self._begin(exits, labelled=labelled)
        self._classes = classes

    def _begin(self, exits: int, *, labelled: bool) -> None:
        costs = exit_costs(self.costs, exits)
        self._summaries = {name: Summary(costs, labelled=labelled, strict=self.strict) for name in self.rules}
        self._exits, self._labelled = exits, labelled

    def _check_same(self, exits: int, classes: int, *, labelled: bool) -> None:
        if exits != self._exits or (0 not in (classes, self._classes) and classes != self._classes):
            raise ShapeError(
                f"a batch with {exits} exits and {classes} classes",
                expected=f"{self._exits} exits" + (f" and {self._classes} classes, as before" if self._classes else ""),
                fix="call reset() first, or use one Metrics per model",
            )
        if labelled != self._labelled:
            raise LabelError(
                f"a batch with{'' if labelled else 'out'} labels after batches with{'out' if labelled else ''}",
                expected="labels with every batch or with none",
                fix="call reset() first, or use one Metrics for each",
            )

    def _note_not_finite(self, values: Tensor) -> None:
        """Note the first logit that is not finite on a device that must not be waited for."""
        exits, batch, _ = values.shape
        rows = torch.arange(self._followed, self._followed + batch, device=values.device)
        places = rows[:, None] * exits + torch.arange(exits, device=values.device)
        first = _smallest(places, ~values.isfinite().all(-1).T)
        self._note(torch.stack((first, torch.full_like(first, _NONE))))

    def _note_bad_labels(self, labels: Tensor, classes: int) -> Tensor:
        """Note the first bad label likewise; the labels without bad ones, which would end the program on a GPU."""
        inside = labels.clamp(0, classes - 1)
        rows = torch.arange(self._followed, self._followed + len(labels), device=labels.device)
        first = _smallest(rows, inside != labels)
        self._note(torch.stack((torch.full_like(first, _NONE), first)))
        return inside

    def _note(self, faults: Tensor) -> None:
        self._faults = faults if self._faults is None else torch.minimum(self._faults, faults.to(self._faults.device))


class _Waiting:
    """Rows on a device that wait to be followed.

    Args:
        like: Logits of one batch.
        most: How many rows may wait.
        labelled: Whether they have labels.
    """

    def __init__(self, like: Tensor, most: int, *, labelled: bool) -> None:
        exits, _, classes = like.shape
        self.rows, self._most = 0, most
        self._logits = like.new_empty(exits, most, classes)
        self._labels = torch.empty(most, dtype=torch.int64, device=like.device) if labelled else None

    def fits(self, values: Tensor) -> bool:
        """Whether there is room for these logits."""
        held = self._logits
        return self.rows + values.shape[1] <= self._most and (values.dtype, values.device) == (held.dtype, held.device)

    def add(self, values: Tensor, labels: Tensor | None) -> None:
        """Copy rows."""
        end = self.rows + values.shape[1]
        self._logits[:, self.rows : end].copy_(values)
        if self._labels is not None and labels is not None:
            self._labels[self.rows : end].copy_(labels)
        self.rows = end

    def take(self) -> tuple[Tensor, Tensor | None]:
        """The rows, which no longer wait; later ones overwrite them."""
        count, self.rows = self.rows, 0
        return self._logits[:, :count], None if self._labels is None else self._labels[:count]


def _smallest(numbers: Tensor, where: Tensor) -> Tensor:
    """The smallest of these numbers, `_NONE` if there are none."""
    kept = torch.where(where, numbers, _NONE).reshape(-1)
    return torch.cat((kept, kept.new_full((1,), _NONE))).amin()
