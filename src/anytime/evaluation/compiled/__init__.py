"""Evaluation in compiled code: the rules of the paper, their metrics and prediction sets in one pass over the logits.

Numba compiles the functions of this package for the processor at hand (extra `fast`). The plain path, `combine` and `metrics`,
is the reference: it is used for other rules, for other devices than the CPU, and where numba is not installed. Both give the
same numbers up to rounding.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from anytime.combine.encoded import encode_known
from anytime.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from anytime.evaluation.blocks import BlockTask, LogitRows

ENOUGH = 1 << 24
"""From this many logits on compiled code is chosen: with fewer, the plain path is done before that code is loaded."""
MANY_CLASSES = 64
"""From this many classes on: with fewer, the plain path, which has vectors over the rows, takes less time."""
_PATIENCE = 1.0


def use_compiled(rows: LogitRows, request: BlockTask, *, required: bool, samples: int) -> bool:
    """Whether to compute a request with compiled code, which is then ready.

    Args:
        rows: The logits.
        request: The rules.
        required: Whether it was requested: an error where it cannot be used, also for little data.
        samples: How many rows there are in all.
    """
    values = rows.logits
    exits, _, classes = values.shape
    known = encode_known(request.combiners, request.log_odds, exits, classes, "float64")
    device = values[:, :0].device.type
    enough = classes >= MANY_CLASSES and exits * samples * classes >= ENOUGH
    if not (required or (known and device == "cpu" and enough)):
        return False
    if not known or device != "cpu":
        raise OptionError(
            "engine='compiled' and " + ("no rule that it knows" if device == "cpu" else f"logits on {device}"),
            expected="logits on the CPU and at least one rule of the paper: Latest, Caching, Product or Mixture, with any "
            "activation but Sigmoid and AdaptiveReLU",
            fix="use engine='auto', which takes the plain path here",
        )
    try:
        return _load(rows, request)
    except ImportError as error:  # numba is not installed, or does not know this version of NumPy
        if not required:
            return False
        raise MissingExtraError(
            f"engine='compiled' needs numba ({error})",
            expected="numba, of the extra fast",
            fix="pip install 'anytime-nn[fast]', or use engine='plain'",
        ) from error


def _load(rows: LogitRows, request: BlockTask) -> bool:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise ImportError("NUMBA_DISABLE_JIT is set")
    if find_spec("numba") is None:
        raise ImportError("it is not installed")
    with _announced():
        from anytime.evaluation.compiled.plan import load

        load(rows, request)
    return True


@contextmanager
def _announced() -> Iterator[None]:
    """Say on a terminal what takes so long, if it does."""
    begin = time.monotonic()
    timer = threading.Timer(_PATIENCE, _say, ["compiling the evaluation for this processor, once"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - begin
    if seconds > _PATIENCE:
        _say(f"ready to evaluate after {seconds:.0f} s; other processes load the compiled code from numba's cache")


def _say(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"anytime: {text}", file=sys.stderr, flush=True)
