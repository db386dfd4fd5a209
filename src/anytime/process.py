"""How a program of this library begins and ends: its exit code, Ctrl-C at any moment, and output that cannot be written.

Exit codes are 0 (done), 1 (a check failed), 2 (wrong call or input) and 130 (interrupted). Results that do not reach stdout are
an error, unless the reader has left, as in `anytime ... | head -1`. Messages that do not reach stderr are dropped.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from anytime.errors import AnytimeError
from anytime.safe_text import print_safely

INTERRUPTED = 130
_INTERRUPTED_TEXT = "anytime: interrupted"


def run_program(call: Callable[[], int]) -> NoReturn:
    """Run a program as the main program of this process, and exit with its code."""
    code = INTERRUPTED
    try:
        _interrupt_by_exception()
        sys.unraisablehook = _exit_on_lost_interrupt
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        _open_streams()
        code = exit_code(call)
    except KeyboardInterrupt:  # in the few lines around the call
        _report(_INTERRUPTED_TEXT)
    finally:
        # From here on the interpreter only waits for threads and shuts down.
        with suppress(ValueError, KeyboardInterrupt):
            signal.signal(signal.SIGINT, _exit_at_once)
    sys.exit(code)


def exit_code(call: Callable[[], int]) -> int:
    """Call a program and flush its output; errors that a user can fix are printed on stderr and become exit codes."""
    try:
        code = call()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except AnytimeError as error:
        _report(f"anytime: {error}")
    except KeyboardInterrupt:
        _report(_INTERRUPTED_TEXT)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as in `anytime ... | head`
        _drop_stdout()
        return 0
    except OSError as error:
        _report(f"anytime: {_explained(error)}")
        _drop_stdout()
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # cleaning up after Ctrl-C failed, as in parts of argparse
            _report(_INTERRUPTED_TEXT)
            return INTERRUPTED
        if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
            raise
        why = " ".join(str(error).split())[:200] or "an allocation failed"
        fix = "use fewer rows, a smaller batch or network, or a machine with more memory"
        _report(
            f"anytime: {AnytimeError(f'out of memory: {why}', expected='enough memory for the data and the network', fix=fix)}"
        )
    return 2


def quiet_imports(program: str) -> None:
    """Exit with 130 and without a traceback on Ctrl-C while `python -m PROGRAM...` still imports its modules."""
    words = getattr(sys, "orig_argv", [])
    # sys.argv[0] is "-m" until Python has found the module, for which it imports its packages.
    if sys.argv[:1] == ["-m"] and "-m" in words[:-1] and words[words.index("-m") + 1].startswith(program):
        with suppress(ValueError):
            signal.signal(signal.SIGINT, _exit_at_once)


def _interrupt_by_exception() -> None:
    """The first Ctrl-C raises, so that files are closed and processes ended; the second exits at once."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        signal.signal(signal.SIGINT, _exit_at_once)
        raise KeyboardInterrupt

    # A background job of a shell ignores Ctrl-C, and must continue to do so.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


def _exit_at_once(number: int, frame: Any) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"{_INTERRUPTED_TEXT}\n".encode())
    os._exit(INTERRUPTED)


def _exit_on_lost_interrupt(lost: Any) -> None:
    """Ctrl-C in a callback, where Python only prints exceptions, still ends the program."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        _exit_at_once(signal.SIGINT, None)
    sys.__unraisablehook__(lost)


class _Messages(io.FileIO):
    """The file of stderr; what cannot be written is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _open_streams() -> None:
    """Open the standard streams that are closed, and make both outputs accept any character."""
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:  # closed: the next opened file would get its number
            os.open(os.devnull, flags)  # stdout is read-only then, so that results are not lost silently
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks becomes a question mark
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None or isinstance(sys.stderr, io.TextIOWrapper):
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        file: Any = _Messages(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(file, encoding=encoding, errors="replace", line_buffering=True, write_through=True)


def _drop_stdout() -> None:
    """Discard what is still buffered: Python would raise about it at exit."""
    with suppress(OSError, ValueError, AttributeError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, sys.stdout.fileno())
        os.close(handle)
        sys.stdout.flush()


def _explained(error: OSError) -> AnytimeError:
    why = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return AnytimeError(
            f"the result could not be written: {why}",
            expected="a stdout that accepts all of it",
            fix="redirect it to a file on a disk with free space, or to a program that reads it",
        )
    return AnytimeError(
        f"{str(error.filename)[:500]!r} cannot be used: {why}",
        expected="a path that can be read or written",
        fix="use another path, or change its permissions",
    )


def _report(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        print_safely(text, file=sys.stderr, flush=True)
