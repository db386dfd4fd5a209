"""Read pickles that hold plain data, without unpickling.

The official CIFAR archives are pickles, and unpickling runs whatever a file asks for. `load` walks the opcodes with a
small machine of its own: it knows containers, strings, numbers and NumPy arrays of bytes and integers, looks up no
name, imports nothing and calls nothing. Anything else is refused.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anytime.errors import FormatError

_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUFFER_MODULES = ("numpy.core.numeric", "numpy._core.numeric")
_NAMES = {
    **{(module, "_reconstruct"): "array" for module in _ARRAY_MODULES},
    **{(module, "_frombuffer"): "buffer" for module in _BUFFER_MODULES},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
_DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
_VALUES |= {"BINBYTES8", "BYTEARRAY8", "INT", "LONG"}
_IGNORED = {"PROTO", "FRAME"}


class _Mark:
    """Where a group of items begins on the stack."""


class _Name:
    """A known name: a label, never the thing itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Dtype:
    """A NumPy element type, as its code."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "<"


class _Array:
    """An array under construction."""

    values: NDArray[Any] | None = None


class _RefusedError(Exception):
    """What the file asked for and may not have."""


def load(data: bytes, *, path: str | Path) -> Any:
    """The plain data in a pickle; `path` is for the error.

    >>> import pickle
    >>> load(pickle.dumps({"a": [1, 2.5, (None, True)]}), path="example")
    {'a': [1, 2.5, (None, True)]}
    """
    try:
        return _finish(_Machine().run(data), {})
    except _RefusedError as error:
        reason = str(error)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, UnicodeError) as error:
        reason = f"it is not well formed ({error})"
    raise FormatError(
        f"{path}: {reason}",
        expected="a pickle of dictionaries, lists, strings, numbers and arrays of integers",
        fix="fetch the official archive again; do not load this file by other means",
        path=path,
    )


class _Machine:
    """A stack, a memo and one method a kind of opcode."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                (result,) = self.stack
                return result
            if name in _IGNORED:
                continue
            if name in _VALUES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in ("BINSTRING", "SHORT_BINSTRING"):  # Python 2's str: bytes, shown by genops as latin-1
                self.stack.append(str(argument).encode("latin-1"))
            elif name in _ACTIONS:
                _ACTIONS[name](self, argument)
            else:
                raise _RefusedError(f"it holds the opcode {name}")
        raise _RefusedError("it ends too early")

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], _Mark):
            at -= 1
            if at < 0:
                raise _RefusedError("a group of items has no beginning")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise _RefusedError("a tuple lacks its items")
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.stack.append(items)

    def memoize(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise _RefusedError("it appends to something that is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _RefusedError("it sets items of something that is no dictionary")
        target.update(zip(items[::2], items[1::2], strict=True))

    def name(self, module: str, name: str) -> None:
        if (module, name) not in _NAMES:
            raise _RefusedError(f"it asks for {module}.{name}")
        self.stack.append(_Name(_NAMES[module, name]))

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        kind = function.kind if isinstance(function, _Name) else ""
        if kind == "array":
            self.stack.append(_Array())
        elif kind == "dtype":
            self.stack.append(_dtype(arguments[0]))
        elif kind == "buffer":
            self.stack.append(_from_buffer(*arguments))
        elif kind == "encode" and arguments[1] in ("latin1", "latin-1"):
            self.stack.append(arguments[0].encode("latin-1"))
        else:
            raise _RefusedError("it asks for a call")

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Dtype):
            target.order = state[1]
        elif isinstance(target, _Array):
            _, shape, dtype, fortran, raw = state
            target.values = _values(raw, dtype, shape, "F" if fortran else "C")
        else:
            raise _RefusedError("it sets the state of something that is no array")


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda m, _: m.stack.append(_Mark()),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "APPEND": lambda m, _: m.append([m.stack.pop()]),
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "SETITEM": lambda m, _: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
    "BINPUT": lambda m, index: m.memoize(index),
    "LONG_BINPUT": lambda m, index: m.memoize(index),
    "MEMOIZE": lambda m, _: m.memoize(None),
    "BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "GLOBAL": lambda m, names: m.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.stack_name(),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
}


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _dtype(code: Any) -> _Dtype:
    if _text(code) not in _DTYPES:
        raise _RefusedError(f"it holds an array of {_text(code)!r}")
    return _Dtype(_text(code))


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.values = _values(raw, dtype, shape, _text(order))
    return array


def _values(raw: Any, dtype: Any, shape: Any, order: str) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray) or order not in ("C", "F"):
        raise _RefusedError("an array is not made of bytes")
    kind = np.dtype((">" if _text(dtype.order) == ">" else "<") + dtype.code)
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * kind.itemsize != len(raw):
        raise _RefusedError(f"an array of shape {shape} came with {len(raw)} bytes")
    return np.frombuffer(bytes(raw), kind).reshape(shape, order="F" if order == "F" else "C")


def _finish(value: Any, done: dict[int, Any]) -> Any:
    """Arrays in place of their builders; left-over names and marks are refused.

    What stands in many places is done once: a small file can name the same list a billion times.
    """
    if id(value) in done:
        return done[id(value)]
    result = value
    if isinstance(value, dict):
        result = {_finish(key, done): _finish(item, done) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        result = type(value)(_finish(item, done) for item in value)
    elif isinstance(value, _Array) and value.values is not None:
        result = value.values
    elif isinstance(value, _Name | _Mark | _Array | _Dtype):
        raise _RefusedError("it holds a name in place of a value")
    done[id(value)] = result
    return result
