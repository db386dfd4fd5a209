"""Short texts of values, for the `repr` of objects that hold many numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

_FEW = 4


def brief(value: Any) -> str:
    """A value in a few characters: numbers rounded, long sequences by their ends or their length, tensors by their shape.

    Example:
        >>> brief(0.123456), brief((0.1, 0.2, 0.3, 0.4, 0.5)), brief({"a": 1}), brief("product")
        ('0.1235', '(0.1, …, 0.5)', '{1 entry}', "'product'")
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return f"{{{len(value)} entr{'y' if len(value) == 1 else 'ies'}}}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__}{tuple(value.shape)}"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else f"{value[:79]}…")
    if isinstance(value, Sequence):
        if len(value) > _FEW and isinstance(value[0], int | float):
            return f"({brief(value[0])}, …, {brief(value[-1])})"
        if len(value) > _FEW:
            return f"({len(value)} entries)"
        return f"({', '.join(map(brief, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def brief_repr(thing: Any, *names: str) -> str:
    """The `repr` of a dataclass with its values in short, all or some of them; those that are None are left out."""
    parts = [(name, getattr(thing, name)) for name in names or [field.name for field in fields(thing)]]
    return f"{type(thing).__name__}({', '.join(f'{name}={brief(value)}' for name, value in parts if value is not None)})"
