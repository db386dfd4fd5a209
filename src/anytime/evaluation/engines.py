"""Which code evaluates: torch's operations, code compiled for the CPU (extra `fast`), or a Triton kernel on a GPU.

The plain path, `combine` and `metrics`, is the reference. All of them give the same numbers up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from anytime.checks import check_choice
from anytime.errors import OptionError
from anytime.evaluation.blocks import ComputePath
from anytime.evaluation.compiled import use_compiled

if TYPE_CHECKING:
    from anytime.evaluation.blocks import BlockTask, LogitRows

Engine = Literal["auto", "plain", "compiled", "triton"]


def choose_path(engine: Engine, rows: LogitRows, request: BlockTask, *, samples: int | None = None) -> ComputePath:
    """How to compute a request, which is then prepared.

    Args:
        engine: A path that raises an error where it cannot be used, or `auto` for the fastest.
        rows: The logits.
        request: The rules.
        samples: How many rows there are in all, if `rows` are a part of them.
    """
    check_choice(engine, "engine", ("auto", "plain", "compiled", "triton"))
    if engine == "plain":
        return "plain"
    if engine == "triton" or (engine == "auto" and rows.logits[:, :0].device.type == "cuda"):
        return _triton(rows, request, required=engine == "triton")
    compiled = use_compiled(rows, request, required=engine == "compiled", samples=samples or rows.logits.shape[1])
    return "compiled" if compiled else "plain"


def _triton(rows: LogitRows, request: BlockTask, *, required: bool) -> ComputePath:
    from anytime.evaluation.triton_rows import known_rules

    if known_rules(rows, request) is not None:
        return "triton"
    if not required:
        return "plain"
    raise OptionError(
        f"engine='triton' for logits on {rows.logits[:, :0].device}, and no rule that its kernel can follow there",
        expected="logits on an NVIDIA GPU, Triton, and at least one rule of the paper: Latest, Caching, Product or Mixture, "
        "with any activation but Sigmoid and AdaptiveReLU",
        fix="pass a tensor on the GPU, or use engine='auto', which takes another path here",
    )
