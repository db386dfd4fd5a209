"""`python -m anytime.train RECIPE --out FOLDER [NAME=VALUE ...]`: `anytime train` where cyclopts and rich are not installed."""

from __future__ import annotations

import argparse
from pathlib import Path

from anytime.errors import OptionError
from anytime.process import run_program
from anytime.train.command import Command, list_recipes, run_command
from anytime.train.settings import read_pair


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and train; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m anytime.train", description="Train a network with exits.")
    parser.add_argument("words", nargs="*", metavar="RECIPE | NAME=VALUE", help="a recipe by name, and settings")
    parser.add_argument("--out", type=Path, help="folder of the run; with several seeds, of one folder per run")
    parser.add_argument("--config", type=Path, help="a YAML file with settings")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="one run per seed, one after the other")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_intermixed_args(arguments)
    if options.list:
        return list_recipes()
    recipes = [word for word in options.words if "=" not in word]
    if len(recipes) > 1:
        raise OptionError(
            f"{len(recipes)} recipes were given: {', '.join(recipes)}",
            expected="at most one recipe",
            fix="write settings as NAME=VALUE, without spaces",
        )
    settings = dict(read_pair(word) for word in options.words if "=" in word)
    recipe = recipes[0] if recipes else None
    command = Command(recipe, options.out, options.config, options.resume, settings, options.seeds, options.json)
    return run_command(command)


if __name__ == "__main__":
    run_program(main)
