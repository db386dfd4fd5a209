"""`anytime profile MODEL`: how long each exit takes on this machine, and what it costs, as a table, a picture and a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from anytime.models.base import MultiExit
    from anytime.run import Profile

_MOST_REPEATS = 100_000
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


def profile(
    model: str,
    /,
    *,
    engine: str = "auto",
    batch: str = "1",
    repeats: int = 200,
    threads: int = 1,
    input_shape: str | None = None,
    out: Path | None = None,
    trust: Flag = False,
    json: Flag = False,
) -> int:
    """Measure how long each exit of a model takes on this machine, and what it costs.

    Args:
        model: The folder of a training run, one that `anytime.models.save` made, one that `anytime export` wrote, or a
            network's name such as msdnet-cifar, which then has random weights.
        engine: What runs the stages: eager, folded, onnxruntime, cuda-graphs, or auto for the quickest here.
        batch: How many inputs at once, such as 1,8.
        repeats: How many runs for each of these.
        threads: For each stage.
        input_shape: Of one input, such as 3,32,32, or for a text model its length in tokens; what the model was made for by
            default.
        out: Folder for profile.json, which a Runner takes as its first forecast, and profile.html.
        trust: Load exported stages in the format torch-export too. Such files can run any code; ONNX stages need no trust.
        json: Print one JSON document instead of the table.
    """
    from anytime.checks import check_count
    from anytime.cli import inputs
    from anytime.cli.stages import make_engine
    from anytime.outputs import check_folder
    from anytime.run import profile_model
    from anytime.run.export import ExportedModel

    check_count(repeats, "--repeats", most=_MOST_REPEATS)
    sizes = inputs.counts(batch, "batch", example="1,8")
    given = None if input_shape is None else inputs.counts(input_shape, "input-shape", example="3,32,32")
    if out is not None:
        check_folder(out, kind="profile", inputs=(model,))
    opened = inputs.open_model_or_name(model, threads=threads, trust=trust)
    shape = given or inputs.input_shape(opened.model)
    example = inputs.make_example(opened.model, shape, max(sizes))
    costs = opened.model.macs if isinstance(opened.model, ExportedModel) else count(opened.network, example)
    made = make_engine(opened.model, engine, example=example[: min(sizes)], threads=threads)
    why = f"engine: {made.name} ({getattr(made, 'why', 'asked for')})"
    print(why, file=sys.stderr)
    found = profile_model(made, example, batch_sizes=sizes, repeats=repeats, macs=costs)
    notes = [] if opened.trained else [f"{opened.name} has random weights: its times are real, its answers would not be."]
    show(found, name=opened.name, shape=shape, notes=notes, out=out, json=json)
    return 0


def count(model: MultiExit, example: Any) -> tuple[int, ...]:
    """Multiply-accumulates for one input up to each exit; running it also shows whether inputs of this shape fit."""
    from anytime.errors import AnytimeError, ShapeError
    from anytime.models import measure_cost

    try:
        return measure_cost(model, example).macs
    except AnytimeError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # what torch says of a shape it cannot use
        raise ShapeError(
            f"inputs of shape {tuple(example.shape[1:])}: {str(error).splitlines()[0]}",
            expected="the shape that the model was made for",
            fix="leave --input-shape out",
        ) from error


def show(found: Profile, *, name: str, shape: tuple[int, ...], notes: list[str], out: Path | None, json: bool) -> None:
    """Write the folder if one is asked for, then print the table or the document."""
    from anytime.report.pages.profile import load_note, write_profile

    busy = load_note(found)
    for note in [*notes, *([busy] if busy else [])]:
        print(note, file=sys.stderr)
    if out is not None:
        print(f"page: {write_profile(out, found, name=name, notes=notes)}", file=sys.stderr)
    if json:
        import json as writer

        print(writer.dumps({"model": name, "input_shape": shape, **document(found)}, allow_nan=False))
    else:
        print_table(found, name)


def document(found: Profile) -> dict[str, Any]:
    """A profile for machines: seconds from the start to each exit, by batch size and quantile."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        "exits": found.exits,
        "classes": found.classes,
        "engine": found.engine,
        "threads": found.threads,
        "repeats": found.repeats,
        "machine": found.machine,
        "macs": found.macs,
        "seconds": {
            str(batch): {name: found.seconds(batch, share=share) for name, share in shares.items()}
            for batch in found.batch_sizes
        },
    }


def print_table(found: Profile, name: str) -> None:
    """Print a row an exit to stdout, and the machine."""
    from rich.table import Table

    from anytime.cli.console import make_console
    from anytime.report.pages.profile import exit_table, machine

    cells = exit_table(found)
    table = Table()
    for column in cells.columns:
        table.add_column(column, justify="right")
    for row in cells.rows:
        table.add_row(*row)
    console = make_console()
    console.print(
        f"{name}, {found.engine}, {found.repeats} runs: ms to each exit", soft_wrap=True, highlight=False, markup=False
    )
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in machine(found)), soft_wrap=True, highlight=False, markup=False)
