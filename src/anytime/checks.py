"""Every check of a caller's tensors, once.

Functions here return what they were given, ready for use (a tensor of at least float32), or raise a typed
error. They never change their input.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.errors import (
    DeviceError,
    DtypeError,
    InputError,
    LabelError,
    NonFiniteError,
    OptionError,
    OverlapError,
    ScaleError,
    ShapeError,
)

MOST_SHARED = 0.01
"""From this fraction on, rows that two sets share mean that the sets are not disjoint."""
_FINGERPRINT_NUMBERS = 1 << 22
_ENOUGH, _FEW = 2048, 32
"""Rows that are looked at for their scale, and below how many of them they could look like probabilities by accident."""
_ROUNDING = 1e-5
_SHAPE = "logits of shape (exits, batch, classes)"
_ALWAYS_FREE = 1 << 28
LARGEST_SEED = 2**64 - 1
LARGEST_OLD_SEED = 2**32 - 1
"""What `numpy.random.RandomState` takes."""
_STEP_SHAPE = "the logits of one exit, of shape (batch, classes)"


def as_tensor(values: Any, name: str) -> Tensor:
    """A tensor that shares memory with `values` where it can.

    >>> as_tensor(np.zeros(3, dtype=np.float32), "zeros").shape
    torch.Size([3])
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiub":
            raise DtypeError(
                f"{name} is a NumPy array of {values.dtype}",
                expected="an array of numbers",
                fix="convert it, e.g. with .astype('float32')",
            )
        # torch refuses foreign byte orders and negative strides, and warns about read-only memory.
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        usable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
        return torch.from_numpy(native if usable else native.copy())
    raise DtypeError(
        f"{name} is {_describe(values)}",
        expected="a torch.Tensor or a numpy.ndarray",
        fix="convert it first, e.g. torch.stack(list_of_exits) for a list with one tensor an exit",
    )


def check_logits(values: Any, *, name: str = "logits", first_row: int = 0) -> Tensor:
    """Logits of all exits, `(exits, batch, classes)`, as float32 or float64.

    Args:
        values: A tensor or array.
        name: What to call it in an error.
        first_row: Where these rows begin in the whole, for the message.
    """
    logits = as_tensor(values, name)
    if logits.ndim != 3:
        raise ShapeError(
            f"{name} has shape {tuple(logits.shape)}: rank {logits.ndim}",
            expected=_SHAPE,
            fix="stack the exits along the first dimension, e.g. torch.stack([exit_1, exit_2])"
            + ("; for the logits of a single exit, logits[None]" if logits.ndim == 2 else ""),
        )
    exits, _, classes = logits.shape
    if exits == 0 or classes == 0:
        raise ShapeError(
            f"{name} has shape {tuple(logits.shape)}: no {'exits' if exits == 0 else 'classes'}",
            expected=f"{_SHAPE} with at least one exit and one class",
            fix="check how the logits were collected",
        )
    logits = as_float(logits, name)
    _check_finite(logits, name, first_exit=0, first_row=first_row)
    return logits


def check_step(values: Any, *, exit: int, like: Tensor | None, name: str = "logits") -> Tensor:
    """Logits of one exit, `(batch, classes)`, fitting what earlier exits gave.

    Args:
        values: A tensor or array.
        exit: Index of this exit, from 0; messages count exits from 1.
        like: A `(batch, classes)` tensor of an earlier exit, if there was one.
        name: What to call it in an error.
    """
    logits = as_tensor(values, name)
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ShapeError(
            f"{name} of exit {exit + 1} has shape {tuple(logits.shape)}",
            expected=f"{_STEP_SHAPE} with at least one class",
            fix="call step once per exit; the rule itself takes all exits at once: rule(logits)",
        )
    if like is not None:
        if logits.shape != like.shape:
            raise ShapeError(
                f"{name} of exit {exit + 1} has shape {tuple(logits.shape)}",
                expected=f"{tuple(like.shape)}, as the exits before it",
                fix="step all exits of the same inputs; begin other inputs with rule.start(exits)",
            )
        if logits.device != like.device:
            raise DeviceError(
                f"{name} of exit {exit + 1} is on {logits.device}",
                expected=f"{like.device}, where the exits before it are",
                fix=f"move it there: logits.to('{like.device}')",
            )
    logits = as_float(logits, name)
    _check_finite(logits[None], name, first_exit=exit, first_row=0)
    return logits


def check_labels(values: Any, *, batch: int, classes: int, device: torch.device | None = None) -> Tensor:
    """Labels of shape `(batch,)` as int64, each in `[0, classes)`."""
    labels = as_tensor(values, "labels")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DtypeError(
            f"labels have element type {labels.dtype}",
            expected="integers, one class index an input",
            fix="convert them: labels.long()" + (", or labels.argmax(1) if they are one-hot" if labels.ndim == 2 else ""),
        )
    if labels.ndim != 1:
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)}",
            expected=f"shape ({batch},), one class index an input",
            fix="use labels.argmax(1) for one-hot labels, labels.squeeze() for a column",
        )
    if labels.shape[0] != batch:
        raise LabelError(
            f"{labels.shape[0]} labels came with the logits of {batch} inputs",
            expected=f"{batch} labels",
            fix="make sure both come from the same rows, in the same order",
        )
    if device is not None and labels.device != device:
        raise DeviceError(
            f"labels lie on {labels.device}",
            expected=f"{device}, where the logits lie",
            fix=f"move them there: labels.to('{device}')",
        )
    labels = labels.long()
    if batch:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            row = int(((labels < 0) | (labels >= classes)).nonzero()[0])
            one_based = low >= 1 and high == classes
            raise LabelError(
                f"labels range from {low} to {high} with {classes} classes (first misfit: row {row}, counted from 0: "
                f"{int(labels[row])})",
                expected=f"class indices from 0 to {classes - 1}",
                fix="these look counted from 1: subtract 1"
                if one_based
                else "check that labels and logits share the class list",
            )
    return labels


def check_scale(logits: Tensor, *, log_probs: bool = False, name: str = "logits", first_exit: int = 1) -> None:
    """Refuse probabilities and log-probabilities where logits belong, `(exits, batch, classes)`.

    Rows of probabilities lie in [0, 1] and sum to one; rows of log-probabilities are at most zero and their exponentials
    sum to one. Real logits do neither in every row of an exit, except by accident: a few rows must sum to one up to rounding.

    Args:
        logits: Of some exits. The first rows suffice.
        log_probs: Whether log-probabilities will do, as for rules that read differences of logits only.
        name: What to call them in an error.
        first_exit: The number of the first of these exits.
    """
    some = logits[:, :_ENOUGH].detach()
    if some.shape[1] == 0 or some.shape[2] < 2:
        return
    for exit, rows in enumerate(some, first_exit):
        low, high = (float(end) for end in rows.aminmax())
        if low < 0 < high:
            continue
        if low >= 0 and high <= 1:
            kind, sums = "probabilities", rows.sum(-1)
        elif high <= 0 and not log_probs:
            kind, sums = "log-probabilities", rows.exp().sum(-1)
        else:
            continue
        few = len(rows) < _FEW
        if few and kind == "probabilities" and bool(((rows == 0) | (rows == 1)).all()):
            continue  # a handful of zeros and ones was written by hand
        if bool((sums - 1.0).abs().max() < (_ROUNDING if few else 0.01)):
            raise ScaleError(
                f"{name} of exit {exit} look like {kind}: they range from {low:.4g} to {high:.4g}, and each row "
                f"{'sums' if kind == 'probabilities' else 'of exponentials sums'} to 1",
                expected="logits, the raw scores before any softmax: the product reads their sign and size",
                fix="give the scores from before the softmax. Where there are none, rules that only read differences of logits "
                "(Latest, Caching, Powers, Product(Exponential())) work on log-probabilities, and probabilities=True "
                "(--probabilities) lets any rule take both: a ReLU product then collapses",
            )


def check_probabilities(values: Tensor, *, name: str = "probabilities") -> Tensor:
    """Log-probabilities from probabilities (rows sum to one) or from log-probabilities, told apart by their sign."""
    if values.numel() == 0:
        return values
    low, high = float(values.min()), float(values.max())
    log_probs = values.log() if low >= 0 else values
    sums = log_probs.exp().sum(-1)
    if high > 1.0 + 1e-3 or (low < 0 < high) or bool((sums - 1.0).abs().max() > 0.01):
        raise ScaleError(
            f"{name} range from {low:.4g} to {high:.4g}, rows sum to {float(sums.min()):.4g} … {float(sums.max()):.4g}",
            expected="rows of probabilities, or of their logarithms, that sum to 1",
            fix="leave probabilities=True (--probabilities) out if these are logits",
        )
    # A class that underflowed to zero keeps a finite logarithm: these stand in for logits, which are finite.
    return log_probs.clamp(min=torch.finfo(torch.float32).min / 4)


def check_log_probs(values: Any, *, name: str = "log_probs") -> Tensor:
    """Log-probabilities of all exits, `(exits, batch, classes)`; `-inf` for classes without probability."""
    log_probs = as_tensor(values, name)
    if log_probs.ndim != 3 or log_probs.shape[0] == 0 or log_probs.shape[2] == 0:
        raise ShapeError(
            f"{name} has shape {tuple(log_probs.shape)}",
            expected="a rule's answers at all exits, (exits, batch, classes)",
            fix="call the rule on the logits of all exits: rule(logits)",
        )
    log_probs = as_float(log_probs, name)
    off = (log_probs.logsumexp(-1).exp() - 1.0).abs()
    if not bool((off < 0.01).all()):  # NaN is refused too
        exit, row = (int(place) for place in (~(off < 0.01)).nonzero()[0])
        raise ScaleError(
            f"{name} of exit {exit + 1}, row {row} (rows count from 0) are not the logarithms of a distribution",
            expected="log-probabilities: the exponentials of each row sum to 1",
            fix="pass rule(logits).log_probs; for plain softmax, anytime.Latest()(logits).log_probs",
        )
    return log_probs


def fingerprints(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """One 64-bit number per row, equal where rows are the same numbers at all exits, whatever precision they were saved in.

    A row is rounded to float32 and then to float16, so that copies in float64, float32 and float16 agree: the tolerance is
    half a unit in the last place of float16, 0.05 % of each number. One exit alone is not enough: with two classes, different
    inputs have equal logits by chance. A row whose largest number float16 cannot hold well is scaled by a power of two first.

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
        for row in scaled.astype(np.float32).astype(np.float16) + np.float16(0):  # which makes -0 and 0 alike
            digests += hashlib.blake2b(row.tobytes(), digest_size=8).digest()
    return torch.frombuffer(digests, dtype=torch.int64) if digests else torch.zeros(0, dtype=torch.int64)


def shared_rows(prints: Tensor, known: Tensor, *, names: tuple[str, str]) -> Tensor:
    """Which rows are among others, `(rows,)`, by their `fingerprints`; refused from one in a hundred on.

    Data sets hold the same input twice now and then, so a few shared rows do not mean that the same rows were given twice.

    Args:
        prints: Of the rows in question.
        known: Of the others.
        names: What the rows are for, and what the others are, for the message.
    """
    shared = torch.isin(prints, known)
    count = int(shared.sum())
    if count and count >= MOST_SHARED * len(prints):
        raise OverlapError(
            f"{count} of the {len(prints)} {names[0]} are among {names[1]}",
            expected=f"different rows for each; under {100 * MOST_SHARED:g} % would be allowed, as data sets hold duplicates",
            fix="keep them apart with a random split, e.g. torch.randperm(rows).chunk(2)",
        )
    return shared


def check_disjoint(first: Tensor | Sequence[Tensor], second: Tensor | Sequence[Tensor], *, names: tuple[str, str]) -> None:
    """Refuse two sets of rows, `(exits, batch, classes)` or one tensor per exit, that are the same rows at all exits."""
    shared_rows(fingerprints(second), fingerprints(first), names=(f"rows for {names[1]}", f"those for {names[0]}"))


def check_flag(value: Any, name: str) -> bool:
    """True or False itself: a text such as "false" counts as true in a condition."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", expected="True or False", fix=f"pass {name}=True or {name}=False")
    return value


def check_costs(values: Any, *, exits: int) -> Tensor:
    """Cumulative costs per exit: positive, finite, strictly increasing, as float64."""
    costs = torch.as_tensor(np.asarray(values, dtype=np.float64))
    if costs.shape != (exits,):
        raise ShapeError(
            f"costs have shape {tuple(costs.shape)}",
            expected=f"{exits} numbers, the cumulative cost (MACs, milliseconds) up to each exit",
            fix="give one number per exit",
        )
    if not bool(torch.isfinite(costs).all()) or bool((costs <= 0).any()) or bool((costs.diff() <= 0).any()):
        raise OptionError(
            f"costs are {[float(c) for c in costs]}",
            expected="positive and strictly increasing numbers: the cost up to and including each exit",
            fix="sum the costs of the stages: numpy.cumsum(stage_costs)",
        )
    return costs


def check_seed(value: Any, *, most: int = LARGEST_SEED, name: str = "seed") -> int:
    """A seed that NumPy and torch both take: a whole number from 0 to `most`."""
    return check_count(value, name, low=0, most=most)


def check_threads(value: Any, *, name: str = "threads") -> int:
    """A number of threads or processes that this machine can start: from 1 to 64, or to its number of cores."""
    return check_count(value, name, most=max(64, os.cpu_count() or 1))


def check_count(value: Any, name: str, *, low: int = 1, most: int | None = None, fix: str | None = None) -> int:
    """A whole number from `low` to `most`, NumPy's among them; `fix` replaces the general advice.

    >>> check_count(3, "exits")
    3
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < low or (most is not None and int(value) > most):
        expected = f"a whole number, at least {low}" + ("" if most is None else f" and at most {most}")
        raise OptionError(f"{name} is {value!r}", expected=expected, fix=fix or f"pass a whole number such as {name}={low}")
    return int(value)


def check_counts(values: Any, name: str, *, most: int | None = None, fix: str | None = None) -> tuple[int, ...]:
    """At least one whole number, each from 1 to `most`."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise OptionError(f"{name} is {values!r}", expected="a list of whole numbers", fix=fix or f"pass {name}=(1,)")
    return tuple(check_count(value, name, most=most, fix=fix) for value in values)


def check_number(
    value: Any,
    name: str,
    *,
    low: float | None = None,
    above: float | None = None,
    most: float = sys.float_info.max,
    below: float | None = None,
    fix: str | None = None,
) -> float:
    """A finite number within its limits: `low` ≤ or `above` < number ≤ `most` or < `below`; NumPy's numbers too.

    >>> check_number(0.1, "alpha", above=0, below=1)
    0.1
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.nan
    bounds = {"at least": low, "above": above, "at most": most if most < sys.float_info.max else None, "below": below}
    held = (low is None or number >= low, above is None or number > above, below is None or number < below)
    if not (all(held) and -sys.float_info.max <= number <= most):  # NaN is refused too
        words = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        ends = [bound for bound in bounds.values() if bound is not None]
        raise OptionError(
            f"{name} is {value!r}",
            expected=f"a {'' if len(ends) == 2 else 'finite '}number {words}".rstrip(),
            fix=fix or f"pass a number such as {name}={sum(ends) / 2 if len(ends) == 2 else 1:g}",
        )
    return number


def check_fraction(value: Any, name: str, *, fix: str | None = None) -> float:
    """A number strictly between 0 and 1."""
    return check_number(value, name, above=0, below=1, fix=fix or f"pass a fraction such as {name}=0.1")


def check_choice(value: Any, name: str, choices: Sequence[Any], *, fix: str | None = None) -> None:
    """Refuse a value that is not one of the choices, and suggest the closest of them."""
    if value not in choices:
        close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        suggestion = f"did you mean {close[0]!r}?" if close else f"pass {name}={choices[0]!r}"
        raise OptionError(
            f"{name} is {value!r}", expected=f"one of {', '.join(repr(choice) for choice in choices)}", fix=fix or suggestion
        )


def check_memory(size: int, what: str, *, fix: str = "use fewer rows, or a machine with more memory") -> None:
    """Refuse what does not fit the memory that is free, before it is allocated: the system may end the program else."""
    free = free_memory() if size > _ALWAYS_FREE else None
    if free is not None and size > free:
        raise InputError(
            f"{what} would take {size / 2**30:,.1f} GiB of memory",
            expected=f"at most {free / 2**30:,.1f} GiB, which are free here",
            fix=fix,
        )


def free_memory() -> int | None:
    """The bytes of memory that this process can still get, or None where the system does not say."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, ValueError, KeyError):
        pass
    try:  # in a container
        home = Path("/sys/fs/cgroup")
        found.append(int((home / "memory.max").read_text()) - int((home / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found)) if found else None


def as_float(logits: Tensor, name: str) -> Tensor:
    """Logits as float32 or float64; whole numbers, truth values and complex numbers are refused."""
    if not logits.is_floating_point():
        raise DtypeError(
            f"{name} have element type {logits.dtype}",
            expected="floating point numbers",
            fix="logits are raw scores; class indices or booleans cannot be combined",
        )
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _check_finite(logits: Tensor, name: str, *, first_exit: int, first_row: int) -> None:
    # One cheap pass: a sum is finite unless a value is not, or the sum itself overflows.
    if logits.numel() == 0 or bool(torch.isfinite(logits.sum())):
        return
    bad = ~torch.isfinite(logits)
    if not bool(bad.any()):
        return
    exit, row, column = (int(i) for i in bad.nonzero()[0])
    value = float(logits[exit, row, column])
    exit, row = first_exit + exit + 1, first_row + row
    raise NonFiniteError(
        f"{name} hold {int(bad.sum())} values that are NaN or infinite, the first {value} at exit {exit}, row {row}, "
        f"class {column} (rows and classes count from 0)",
        expected="finite logits",
        fix="look for overflow in half precision or a diverged training run; mask a class with a large negative number",
        exit=exit,
        row=row,
    )


def _describe(value: object) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"
