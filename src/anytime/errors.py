"""Every error that this library raises on purpose, and its warnings.

```
AnytimeError
├── InputError          a tensor or array that cannot be used (also a ValueError)
│   ├── ShapeError
│   ├── DtypeError      (also a TypeError)
│   ├── DeviceError
│   ├── NonFiniteError  NaN or infinity; has `exit` and `row`
│   ├── LabelError
│   ├── ScaleError      probabilities or log-probabilities in place of logits
│   └── OverlapError    the same rows where different ones are needed
├── OptionError         an argument outside its range, an unknown name (also a ValueError)
├── StateError          a rule stepped beyond its exits, or with the state of another rule
├── DeadlineTooShort    not even the first exit fits; has `forecast` and `budget` (also a TimeoutError)
├── Overloaded          it fits, but not behind the requests admitted before; has `retry_after` (also a TimeoutError)
├── DivergedError       training whose loss became NaN or infinite (also an ArithmeticError)
├── FileError           a file that cannot be used; has `path`
│   ├── MissingFileError  (also a FileNotFoundError)
│   │   └── MissingRunError  a trained network that a study needs
│   ├── FormatError     readable, but not what was expected
│   ├── IntegrityError  damaged: checksum, length or structure is wrong
│   ├── UntrustedError  reading it could run code, and the caller did not pass `trusted=True`
│   ├── OverwriteError  a path that holds something else and would be overwritten
│   └── LockedError     a folder that another process is using; has `pid`
├── MissingExtraError   an optional dependency is not installed (also an ImportError)
└── CheckError          a law of `anytime.testing` does not hold (also an AssertionError)

FewClassesWarning       the product alone, with too few classes for it to be the best choice (a UserWarning)
FewRowsWarning          too few calibration rows for the requested coverage (a UserWarning)
AttachWarning           exits that are not where, or do not run as, a caller would expect (a UserWarning)
```

Each error has three parts: what it got, what was expected, and how to fix it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anytime.safe_text import printable


class AnytimeError(Exception):
    """Base of all errors of this library.

    Args:
        got: What was passed, in the caller's terms.
        expected: What would have been accepted.
        fix: What the caller can do now.
    """

    def __init__(self, got: str, *, expected: str, fix: str) -> None:
        super().__init__(got)
        self.got, self.expected, self.fix = got, expected, fix

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        return printable(f"{self.got}\n  expected: {self.expected}\n  fix: {self.fix}", lines=True)


def _restored(kind: type[AnytimeError], arguments: tuple[Any, ...], state: dict[str, Any]) -> AnytimeError:
    """An error from another process: the arguments of its class are by keyword, which pickle does not know."""
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(state)
    return error


class InputError(AnytimeError, ValueError):
    """A tensor or array that cannot be used as it is."""


class ShapeError(InputError):
    """The rank or a dimension is wrong."""


class DtypeError(InputError, TypeError):
    """The type or the element type is wrong."""


class DeviceError(InputError):
    """Tensors that belong together are on different devices."""


class NonFiniteError(InputError):
    """NaN or infinity in the logits, at `exit`, counted from 1, and `row`, counted from 0."""

    def __init__(self, got: str, *, expected: str, fix: str, exit: int, row: int) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.exit, self.row = exit, row


class LabelError(InputError):
    """Labels that do not fit the logits."""


class ScaleError(InputError):
    """Numbers that are probabilities or log-probabilities, not logits."""


class OverlapError(InputError):
    """The same rows were passed for fitting, tuning or testing, which makes metrics wrong."""


class OptionError(AnytimeError, ValueError):
    """An argument outside its range, or an unknown name."""


class StateError(AnytimeError, RuntimeError):
    """A streaming state that cannot be used this way."""


class DeadlineTooShort(AnytimeError, TimeoutError):  # noqa: N818 - reads as a sentence: the deadline is too short
    """Not even the first exit fits: it was forecast to take `forecast` seconds, and there were `budget` seconds."""

    __str__ = AnytimeError.__str__  # TimeoutError has its own, made for errno

    def __init__(self, got: str, *, expected: str, fix: str, forecast: float, budget: float) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.forecast, self.budget = forecast, budget


class Overloaded(AnytimeError, TimeoutError):  # noqa: N818 - a state of the runner, not a mistake
    """The first exit does not fit behind the requests that were admitted before; it may after `retry_after` seconds."""

    __str__ = AnytimeError.__str__

    def __init__(self, got: str, *, expected: str, fix: str, retry_after: float) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.retry_after = retry_after


class DivergedError(AnytimeError, ArithmeticError):
    """The loss of a training run became NaN or infinite; its last checkpoint is from before that."""


class FileError(AnytimeError):
    """A file that cannot be used."""

    def __init__(self, got: str, *, expected: str, fix: str, path: str | Path) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.path = Path(path)


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""

    __str__ = AnytimeError.__str__  # FileNotFoundError has its own, made for errno


class MissingRunError(MissingFileError):
    """There is no run of a required network."""


class FormatError(FileError):
    """The file can be read but does not hold what was expected."""


class IntegrityError(FileError):
    """The file is damaged."""


class UntrustedError(FileError):
    """Reading the file could run code, and the caller did not pass `trusted=True`."""


class OverwriteError(FileError):
    """The path holds something that this command did not write: an input, or the files of another command."""


class LockedError(FileError):
    """Another process is using the folder; `pid` is its number, where that is known."""

    def __init__(self, got: str, *, expected: str, fix: str, path: str | Path, pid: int | None) -> None:
        super().__init__(got, expected=expected, fix=fix, path=path)
        self.pid = pid


class MissingExtraError(AnytimeError, ImportError):
    """An optional dependency is not installed."""

    __str__ = AnytimeError.__str__


class CheckError(AnytimeError, AssertionError):
    """A law that every rule, model, engine or policy must satisfy does not hold."""


class FewClassesWarning(UserWarning):
    """The product is the only rule, and there are fewer than five classes."""


class FewRowsWarning(UserWarning):
    """There are too few calibration rows for the requested coverage."""


class AttachWarning(UserWarning):
    """Attached exits run in a thread, or are far from the requested places."""
