"""Checks of tensors: logits, labels, log-probabilities, costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.errors import DeviceError, DtypeError, LabelError, NonFiniteError, OptionError, ScaleError, ShapeError

_ENOUGH, _FEW = 2048, 32
"""How many rows are examined for their scale, and below how many they could look like probabilities by chance."""
_ROUNDING = 1e-5
_SHAPE = "logits of shape (exits, batch, classes)"
INDICES = (
    "convert them to class indices: torch.tensor(labels) for numbers, numpy.unique(labels, return_inverse=True)[1] for names"
)
"""How to fix labels of another kind."""
_STACK = "convert it first, e.g. torch.stack(list_of_exits) for a list with one tensor per exit"


def as_tensor(values: Any, name: str, *, fix: str = _STACK) -> Tensor:
    """The values as a tensor that shares their memory where possible.

    >>> as_tensor(np.zeros(3, dtype=np.float32), "zeros").shape
    torch.Size([3])
    """
    if isinstance(values, Tensor):
        return _dense(values, name)
    if isinstance(values, np.ma.MaskedArray):
        raise DtypeError(
            f"{name} is a masked NumPy array", expected="a number everywhere", fix="leave masked rows out, or pass .filled(...)"
        )
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
            raise DtypeError(
                f"{name} is a NumPy array of {values.dtype}",
                expected="an array of numbers",
                fix="convert it, e.g. with .astype('float32')" if fix == _STACK else fix,
            )
        # torch refuses foreign byte orders and negative strides, and warns about read-only memory.
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        usable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
        return torch.from_numpy(native if usable else native.copy())
    raise DtypeError(
        f"{name} is {_describe(values)}",
        expected="a torch.Tensor or a numpy.ndarray",
        fix=_conversion(values) or fix,
    )


def _dense(values: Tensor, name: str) -> Tensor:
    """Refuse tensors that do not hold all their numbers one after the other."""
    if values.is_nested:
        raise DtypeError(
            f"{name} is a nested tensor", expected="rows of one length", fix="pad them: values.to_padded_tensor(0.0)"
        )
    if values.layout is not torch.strided:
        kind = str(values.layout).removeprefix("torch.")
        raise DtypeError(f"{name} is a tensor of layout {kind}", expected="a dense tensor", fix="pass values.to_dense()")
    return values


def as_float(logits: Tensor, name: str) -> Tensor:
    """Logits as float32 or float64; integers, booleans and complex numbers are refused."""
    if not logits.is_floating_point():
        raise DtypeError(
            f"{name} have element type {logits.dtype}",
            expected="floating point numbers",
            fix="pass the raw scores of the network, not class indices or booleans",
        )
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


Place = Callable[[int], str]
"""A row in the caller's words, where rows are parts of something else, such as the pixels of images."""


def check_logits(values: Any, *, name: str = "logits", first_row: int = 0, place: Place | None = None) -> Tensor:
    """Logits of all exits, `(exits, batch, classes)`, as float32 or float64; errors count rows from `first_row`."""
    logits = as_float(check_logits_shape(values, name=name), name)
    if logits.is_meta and logits.numel():
        raise DeviceError(
            f"{name} are on the device meta, which keeps no numbers",
            expected="a device with memory",
            fix="compute them on the CPU",
        )
    _check_finite(logits, name, first_exit=0, first_row=first_row, place=place)
    return logits


def check_logits_shape(values: Any, *, name: str = "logits") -> Tensor:
    """Logits of all exits, `(exits, batch, classes)`, of any value: nothing is read, so a GPU is not waited for."""
    logits = as_tensor(values, name)
    if logits.ndim != 3:
        raise ShapeError(
            f"{name} has shape {tuple(logits.shape)}: rank {logits.ndim}",
            expected=_SHAPE,
            fix="name the dimension of the classes of pixels or tokens: rule(logits, class_dim=2), evaluate(..., class_dim=2)"
            if logits.ndim > 3
            else "stack the exits along the first dimension, e.g. torch.stack([exit_1, exit_2])"
            + ("; for the logits of a single exit, logits[None]" if logits.ndim == 2 else ""),
        )
    exits, _, classes = logits.shape
    if exits == 0 or classes == 0:
        raise ShapeError(
            f"{name} has shape {tuple(logits.shape)}: no {'exits' if exits == 0 else 'classes'}",
            expected=f"{_SHAPE} with at least one exit and one class",
            fix="collect logits of at least one exit with one score per class",
        )
    return logits


def check_step(values: Any, *, exit: int, like: Tensor | None, name: str = "logits", place: Place | None = None) -> Tensor:
    """Logits of one exit, `(batch, classes)`, with the shape and device of an earlier exit.

    Args:
        values: A tensor or array.
        exit: Index of this exit, from 0; messages count exits from 1.
        like: A tensor of an earlier exit, if there was one.
        name: What to call the values in an error.
        place: Names a row in an error.
    """
    logits = as_tensor(values, name)
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ShapeError(
            f"{name} of exit {exit + 1} has shape {tuple(logits.shape)}",
            expected="the logits of one exit, of shape (batch, classes), with at least one class",
            fix="call step once per exit; the rule itself takes all exits at once: rule(logits)"
            + ("; for pixels or tokens, name the dimension of the classes: class_dim=1" if logits.ndim > 2 else ""),
        )
    if like is not None:
        if logits.shape != like.shape:
            raise ShapeError(
                f"{name} of exit {exit + 1} has shape {tuple(logits.shape)}",
                expected=f"{tuple(like.shape)}, the shape at earlier exits",
                fix="step all exits of the same inputs; call rule.start(exits) for other inputs",
            )
        if logits.device != like.device:
            raise DeviceError(
                f"{name} of exit {exit + 1} is on {logits.device}",
                expected=f"{like.device}, as at earlier exits",
                fix=f"move it there: logits.to('{like.device}')",
            )
    logits = as_float(logits, name)
    _check_finite(logits[None], name, first_exit=exit, first_row=0, place=place)
    return logits


def stack_exits(values: Any, *, name: str = "logits", dense: bool = False) -> Tensor:
    """The logits of all exits as one tensor, from a tensor or an array, or from a list with `(batch, classes)` per exit.

    With `dense`, the tensors of the list may have more dimensions.

    >>> stack_exits([torch.zeros(5, 3), torch.ones(5, 3)]).shape
    torch.Size([2, 5, 3])
    """
    if not isinstance(values, list | tuple):
        how = "the logits in it, e.g. output['logits']" if isinstance(values, Mapping) else "list(model(x))"
        return as_tensor(values, name, fix=f"pass {how}" if isinstance(values, Mapping | Iterator) else _STACK)
    inner = (
        "pass the list of logits alone, e.g. output[0]" if any(isinstance(value, list | tuple) for value in values) else _STACK
    )
    exits = [as_tensor(value, f"{name} of exit {exit}", fix=inner) for exit, value in enumerate(values, 1)]
    shapes = [tuple(exit.shape) for exit in exits]
    if not exits or (len(shapes[0]) != 2 and not dense) or any(shape != shapes[0] for shape in shapes):
        raise ShapeError(
            f"{name} are a list of tensors of the shapes {', '.join(map(str, shapes))}"
            if exits
            else f"{name} are an empty list",
            expected="one tensor (batch, classes) per exit, all of one shape",
            fix="name the dimension of the classes of pixels or tokens, class_dim=2, where there is such an argument"
            if exits and len(shapes[0]) > 2
            else "pass the logits of the same inputs and classes at every exit",
        )
    return torch.stack(exits)


def check_labels(
    values: Any,
    *,
    batch: int,
    classes: int,
    device: torch.device | None = None,
    place: Place | None = None,
    fix: str = "use the class list of the logits for the labels",
) -> Tensor:
    """Labels of shape `(batch,)` as int64, each in `[0, classes)`; `place` names a row and `fix` is the advice in an error."""
    labels = check_label_shape(values, batch=batch, device=device)
    if batch:
        low, high = torch.stack(labels.aminmax()).tolist()
        if low < 0 or high >= classes:
            row = int(((labels < 0) | (labels >= classes)).nonzero()[0])
            one_based = low >= 1 and high == classes
            raise LabelError(
                f"labels range from {low} to {high} with {classes} classes (first one outside: "
                f"{place(row) if place else f'row {row}'}, counted from 0: {int(labels[row])})",
                expected=f"class indices from 0 to {classes - 1}",
                fix="subtract 1: these look counted from 1" if one_based else fix,
            )
    return labels


def check_label_shape(values: Any, *, batch: int, device: torch.device | None = None) -> Tensor:
    """Labels of shape `(batch,)` as int64, of any value: nothing is read, so a GPU is not waited for."""
    labels = as_tensor(values, "labels", fix=INDICES)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DtypeError(
            f"labels have element type {labels.dtype}",
            expected="integers, one class index per input",
            fix="convert them: labels.long()" + (", or labels.argmax(1) if they are one-hot" if labels.ndim == 2 else ""),
        )
    if labels.ndim != 1:
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)}",
            expected=f"shape ({batch},), one class index per input",
            fix="use labels.argmax(1) for one-hot labels, labels.squeeze() for a column",
        )
    if labels.shape[0] != batch:
        raise LabelError(
            f"{labels.shape[0]} labels for the logits of {batch} inputs",
            expected=f"{batch} labels",
            fix="pass labels and logits of the same rows, in the same order; logits are (exits, rows, classes), so if the rows "
            "come first, pass logits.swapaxes(0, 1)",
        )
    if device is not None and labels.device != device:
        raise DeviceError(
            f"labels are on {labels.device}",
            expected=f"{device}, the device of the logits",
            fix=f"move them there: labels.to('{device}')",
        )
    return labels.long()


def check_labelled(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Logits `(exits, rows, classes)` and labels `(rows,)` to fit on: at least one row."""
    values = check_logits(logits).detach()
    known = check_labels(labels, batch=values.shape[1], classes=values.shape[2], device=values.device)
    if not len(known):
        raise LabelError("there are no rows", expected="at least one row", fix="pass held-out logits with their labels")
    return values, known


def check_scale(logits: Tensor, *, log_probs: bool = False, name: str = "logits", first_exit: int = 1) -> None:
    """Refuse probabilities and log-probabilities in place of logits, `(exits, batch, classes)`.

    Rows of probabilities are in [0, 1] and sum to one; rows of log-probabilities are at most zero and their exponentials
    sum to one. Logits do so in every row of an exit only by chance: a few rows must sum to one up to rounding.

    Args:
        logits: Of some exits; the first rows suffice.
        log_probs: Whether log-probabilities are accepted, as by rules that read differences of logits only.
        name: What to call them in an error.
        first_exit: The number of the first of these exits.
    """
    some = logits[:, :_ENOUGH].detach()
    if some.shape[1] == 0 or some.shape[2] < 2:
        return
    ends = torch.stack([end for rows in some for end in rows.aminmax()]).tolist()  # together: each would wait for a GPU
    for exit, (rows, low, high) in enumerate(zip(some, ends[::2], ends[1::2], strict=True), first_exit):
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
            continue  # a few zeros and ones are probably written by hand
        if bool((sums - 1.0).abs().max() < (_ROUNDING if few else 0.01)):
            raise ScaleError(
                f"{name} of exit {exit} look like {kind}: they range from {low:.4g} to {high:.4g}, and each row "
                f"{'sums' if kind == 'probabilities' else 'of exponentials sums'} to 1",
                expected="logits, the raw scores before any softmax: the product reads their sign and size",
                fix="pass the scores from before the softmax. If there are none, pass log-probabilities to a rule that reads "
                "only differences of logits (Latest, Caching, Powers, Product(Exponential())), or pass probabilities=True "
                "(--probabilities), with which a ReLU product collapses",
            )


def check_probabilities(values: Tensor, *, name: str = "probabilities") -> Tensor:
    """Log-probabilities from probabilities or log-probabilities, distinguished by their sign; rows sum to one."""
    if values.numel() == 0:
        return values
    low, high = float(values.min()), float(values.max())
    log_probs = values.log() if low >= 0 else values
    sums = log_probs.exp().sum(-1)
    if high > 1.0 + 1e-3 or (low < 0 < high) or bool((sums - 1.0).abs().max() > 0.01):
        raise ScaleError(
            f"{name} range from {low:.4g} to {high:.4g}, rows sum to {float(sums.min()):.4g} … {float(sums.max()):.4g}",
            expected="rows of probabilities, or of their logarithms, that sum to 1",
            fix="remove probabilities=True (--probabilities) if these are logits",
        )
    # A class that underflowed to zero keeps a finite logarithm, as logits are finite.
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


def check_costs(values: Any, *, exits: int) -> Tensor:
    """Cumulative costs per exit: positive, finite, strictly increasing, as float64."""
    costs = torch.as_tensor(np.asarray(values, dtype=np.float64))
    if costs.shape != (exits,):
        raise ShapeError(
            f"costs have shape {tuple(costs.shape)}",
            expected=f"{exits} numbers, the cumulative cost (MACs, milliseconds) up to each exit",
            fix="pass one number per exit",
        )
    if not bool(torch.isfinite(costs).all()) or bool((costs <= 0).any()) or bool((costs.diff() <= 0).any()):
        raise OptionError(
            f"costs are {[float(c) for c in costs]}",
            expected="positive and strictly increasing numbers: the cost up to and including each exit",
            fix="sum the costs of the stages: numpy.cumsum(stage_costs)",
        )
    return costs


def exit_costs(costs: Any, exits: int) -> Tensor:
    """Cumulative cost per exit, `(exits,)`: as given, or 1, 2, 3, …."""
    return torch.arange(1.0, exits + 1, dtype=torch.float64) if costs is None else check_costs(costs, exits=exits)


def _check_finite(logits: Tensor, name: str, *, first_exit: int, first_row: int, place: Place | None) -> None:
    # One cheap pass: a sum is finite unless a value is not, or the sum itself overflows.
    if logits.numel() == 0 or bool(torch.isfinite(logits.sum())):
        return
    bad = ~torch.isfinite(logits)
    if not bool(bad.any()):
        return
    exit, row, column = (int(i) for i in bad.nonzero()[0])
    value = float(logits[exit, row, column])
    exit, row = first_exit + exit + 1, first_row + row
    what = (
        f"{name} hold {int(bad.sum())} values that are NaN or infinite, the first {value} at exit {exit}, "
        f"{place(row) if place else f'row {row}'}, class {column} "
        f"({'inputs, positions' if place else 'rows'} and classes count from 0)"
    )
    raise not_finite(what, exit=exit, row=row)


def not_finite(got: str, *, exit: int, row: int) -> NonFiniteError:
    """The error for NaN or infinity in logits, at an exit counted from 1 and a row counted from 0."""
    return NonFiniteError(
        got,
        expected="finite logits",
        fix="check for overflow in half precision or a diverged training run; mask a class with a large negative number",
        exit=exit,
        row=row,
    )


def _conversion(value: object) -> str:
    """How to make an array of an array of another library, or an empty text."""
    method = next((name for name in ("toarray", "to_numpy") if hasattr(value, name)), None)  # sparse, data frame
    if method is not None:
        return f"convert it with .{method}()"
    return "read it into memory: logits[:]" if hasattr(value, "ndim") else ""


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"a {type(value).__name__} of shape {shape}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sized) else "")
