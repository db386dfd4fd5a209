"""The command line: `anytime VERB`.

Each verb is a module with a thin function over something importable, loaded when it is called: `anytime --help` imports
neither torch nor NumPy. Results go to stdout, talk to stderr. Exit codes: 0 done, 1 a check failed, 2 wrong call or input.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from anytime import __version__
from anytime.errors import AnytimeError
from anytime.safe_text import print_safely as print

app = App(
    name="anytime",
    help="Neural networks that answer by a deadline, and are never worse for having thought longer.",
    version=__version__,
    result_action="return_value",
)
VERBS = {
    "demo": "Train a small network with exits on real digits and show what the rules do.",
    "evaluate": "Measure how anytime a model is, from the logits of its exits.",
    "conformal": "Fit prediction sets on one file of logits and measure them on another.",
    "tune": "Show what the rules can reach on a model, and choose the one that fits a wish.",
    "certify": "Bound the share of future inputs that get worse on the way.",
    "train": "Train a network with exits, by a recipe, a file or flags.",
    "predict": "Show a model an input: how the answer grows exit by exit, and the one by a deadline.",
    "profile": "Measure how long each exit of a model takes on this machine, and what it costs.",
    "reproduce": "Make the paper's figures and tables again, and hold them against the paper's.",
    "export": "Write the stages of a model, with a rule inside, for ONNX Runtime or torch.",
    "doctor": "Show versions, threads, devices and optional packages.",
}
for _verb, _help in VERBS.items():
    app.command(f"anytime.cli.{_verb}:{_verb}", name=_verb, help=_help)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a sign the terminal does not know becomes a question mark
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; give its exit code."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        verb = next((word for word in arguments if not word.startswith("-")), "")
        usage = f"anytime {verb} --help" if verb in VERBS else "anytime --help"
        wrong = AnytimeError(" ".join(str(error).split()), expected="a call as its help describes", fix=f"see '{usage}'")
        print(f"anytime: {wrong}", file=sys.stderr)
        return 2
    except AnytimeError as error:
        print(f"anytime: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("anytime: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `anytime ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 0
    return code if isinstance(code, int) else 0
