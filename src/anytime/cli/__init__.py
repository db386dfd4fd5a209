"""The command line: `anytime VERB`.

Each verb is a module with a thin function, imported when it is called: `anytime --help` imports neither torch nor NumPy.
Results go to stdout, messages to stderr. `anytime.process` defines how a program ends and with which exit code. This module
imports nothing heavy, so that Ctrl-C works from the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from anytime.process import exit_code, run_program

VERBS = {
    "demo": "Train a small network with exits on handwritten digits and compare the rules.",
    "evaluate": "Measure how anytime a model is, from the logits of its exits.",
    "conformal": "Fit prediction sets on one file of logits and measure them on another.",
    "tune": "Search the rules on a model, and choose the best one for an objective.",
    "certify": "Bound the fraction of future inputs that get worse at later exits.",
    "train": "Train a network with exits, from a recipe, a file or flags.",
    "predict": "Run a model on an input: the answer at each exit, and the one by a deadline.",
    "serve": "Serve a model over HTTP: everybody gets the best answer by its deadline.",
    "profile": "Measure the time and the MACs of each exit of a model on this machine.",
    "bench": "Simulate a server under load, to size a machine before buying it.",
    "reproduce": "Reproduce the paper's figures and tables, and compare them with the paper's.",
    "export": "Write the stages of a model, with a rule inside, for ONNX Runtime or torch.",
    "doctor": "Show versions, threads, devices and optional packages.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    run_program(partial(_call, sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return exit_code(partial(_call, arguments))


def _call(arguments: Sequence[str]) -> int:
    from anytime.cli.application import call

    return call(arguments)
