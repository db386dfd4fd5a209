"""The command line: `anytime VERB`.

Each verb is a module with a thin function over something importable, loaded when it is called: `anytime --help` imports
neither torch nor NumPy. Results go to stdout, messages to stderr. `anytime.process` says how a program ends, and with which
exit code; this module imports nothing heavy, so that Ctrl-C is heard from the beginning.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from anytime.process import exit_code, run_program

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    run_program(partial(_call, sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; give its exit code."""
    return exit_code(partial(_call, arguments))


def _call(arguments: Sequence[str]) -> int:
    from anytime.cli.application import call

    return call(arguments)
