"""Every error this library raises on purpose, and what it warns of.

```
AnytimeError
├── InputError          a tensor or array that cannot be used (also a ValueError)
│   ├── ShapeError
│   ├── DtypeError      (also a TypeError)
│   ├── DeviceError
│   ├── NonFiniteError  NaN or infinity; knows `exit` and `row`
│   ├── LabelError
│   ├── ScaleError      probabilities or log-probabilities where logits belong
│   └── OverlapError    the same rows where different ones are needed
├── OptionError         a setting outside its range, an unknown name (also a ValueError)
├── StateError          a rule stepped beyond its exits, or with another rule's state
├── DeadlineTooShort    not even the first exit fits; knows `forecast` and `budget` (also a TimeoutError)
├── DivergedError       training whose loss became NaN or infinite (also an ArithmeticError)
├── FileError           a file that cannot be used; knows `path`
│   ├── MissingFileError  (also a FileNotFoundError)
│   │   └── MissingRunError  a trained network that a study needs
│   ├── FormatError     readable, but not what was expected
│   ├── IntegrityError  damaged: checksum, length or structure is off
│   ├── UntrustedError  reading it could run code, and nobody said that it is trusted
│   ├── OverwriteError  a path that would be written over and holds something else
│   └── LockedError     a folder that another process is using; knows `pid`
├── MissingExtraError   an optional dependency is absent (also an ImportError)
└── CheckError          `anytime.testing` found a broken law (also an AssertionError)

FewClassesWarning       the product alone, where it has too few classes to be the best choice (a UserWarning)
FewRowsWarning          too few calibration rows for the coverage asked for (a UserWarning)
```

Each error says what it got, what was expected and what to do about it.
"""

from __future__ import annotations

from pathlib import Path

from anytime.safe_text import printable


class AnytimeError(Exception):
    """Base of all errors of this library.

    Args:
        got: What was given, in the caller's words.
        expected: What would have been accepted.
        fix: What the caller can do now.
    """

    def __init__(self, got: str, *, expected: str, fix: str) -> None:
        super().__init__(got)
        self.got = got
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        return printable(f"{self.got}\n  expected: {self.expected}\n  fix: {self.fix}", lines=True)


class InputError(AnytimeError, ValueError):
    """A tensor or array that cannot be used as it is."""


class ShapeError(InputError):
    """The rank or a dimension is wrong."""


class DtypeError(InputError, TypeError):
    """The type or the element type is wrong."""


class DeviceError(InputError):
    """Tensors that belong together lie on different devices."""


class NonFiniteError(InputError):
    """NaN or infinity among the logits; `exit`, counted from 1, and `row`, counted from 0, say where."""

    def __init__(self, got: str, *, expected: str, fix: str, exit: int, row: int) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.exit = exit
        self.row = row


class LabelError(InputError):
    """Labels that do not fit the logits."""


class ScaleError(InputError):
    """Numbers that are probabilities or log-probabilities, not logits."""


class OverlapError(InputError):
    """Rows that were to be different are the same: fitted, tuned and tested on the same data, figures lie."""


class OptionError(AnytimeError, ValueError):
    """A setting outside its range, or a name nobody knows."""


class StateError(AnytimeError, RuntimeError):
    """A streaming state used in a way it cannot be."""


class DeadlineTooShort(AnytimeError, TimeoutError):  # noqa: N818 - said as a sentence: the deadline is too short
    """Not even the first exit could be had in time.

    Args:
        got: What was given, in the caller's words.
        expected: What would have been accepted.
        fix: What the caller can do now.
        forecast: The seconds that an answer from the first exit was expected to take.
        budget: The seconds there were.
    """

    # TimeoutError brings a __str__ of its own, made for errno.
    __str__ = AnytimeError.__str__

    def __init__(self, got: str, *, expected: str, fix: str, forecast: float, budget: float) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.forecast = forecast
        self.budget = budget


class DivergedError(AnytimeError, ArithmeticError):
    """The loss of a training run became NaN or infinite; its last checkpoint is from before that."""


class FileError(AnytimeError):
    """A file that cannot be used."""

    def __init__(self, got: str, *, expected: str, fix: str, path: str | Path) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.path = Path(path)


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""

    # FileNotFoundError brings a __str__ of its own, made for errno.
    __str__ = AnytimeError.__str__


class MissingRunError(MissingFileError):
    """There is no run of a network that is needed."""


class FormatError(FileError):
    """The file can be read but does not hold what was expected."""


class IntegrityError(FileError):
    """The file is damaged."""


class UntrustedError(FileError):
    """Reading the file could run any code, and the caller did not say that it is trusted."""


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
    """A law that every rule or model must keep is broken."""


class FewClassesWarning(UserWarning):
    """The product answers alone, and there are fewer than five classes."""


class FewRowsWarning(UserWarning):
    """There are too few calibration rows for the coverage asked for."""
