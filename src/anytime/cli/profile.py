"""`anytime profile MODEL`: the time and MACs of each exit on this machine, as a table, a chart and a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytime.cli.options import Flag, counts, print_json
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytime.models.base import MultiExit
    from anytime.models.input_spec import InputSpec
    from anytime.run import Profile

_MOST_REPEATS = 100_000


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
    build: str | None = None,
    trust: Flag = False,
    json: Flag = False,
) -> int:
    """Measure the time and the MACs of each exit of a model on this machine.

    Args:
        model: A folder of `anytime.save`, of a training run, of a published run, or of `anytime export`, or the name of a
            network such as msdnet-cifar, which then has random weights.
        engine: What runs the stages: eager, folded, onnxruntime, cuda-graphs, or auto for the fastest here.
        batch: Batch sizes, such as 1,8.
        repeats: Number of runs per batch size.
        threads: Number of threads per stage.
        input_shape: Shape of one input, such as 3,32,32, or for a text model its length in tokens; by default from the model's
            config.
        out: Folder for profile.json, which a Runner uses as its first forecast, and profile.html.
        build: For a model of your own, package.module:function: makes it with any weights. The module is imported from the
            current folder, or is installed; code is never read from the model's folder.
        trust: Also load exported stages in the format torch-export. Such files can run any code; ONNX stages need no trust.
        json: Print one JSON document instead of the table.
    """
    from anytime.checks import check_count, map_inputs
    from anytime.loading import models
    from anytime.models.input_spec import make_inputs
    from anytime.outputs import check_folder
    from anytime.run import profile_model
    from anytime.run.export import ExportedModel

    check_count(repeats, "--repeats", most=_MOST_REPEATS)
    sizes = counts(batch, "batch", example="1,8")
    given = None if input_shape is None else counts(input_shape, "input-shape", example="3,32,32")
    if out is not None:
        check_folder(out, kind="profile", inputs=(model,))
    opened = models.open_model_or_name(model, build=models.import_function(build), threads=threads, trust=trust)
    specs = models.input_specs(opened.model, given)
    example = make_inputs(specs, max(sizes))
    costs = opened.model.macs if isinstance(opened.model, ExportedModel) else count_macs(opened.model, example)
    few = map_inputs(lambda tensor: tensor[: min(sizes)], example)
    made = models.make_engine(opened.model, engine, example=few, threads=threads)
    print(f"engine: {made.name} ({getattr(made, 'why', 'as requested')})", file=sys.stderr)
    found = profile_model(made, example, batch_sizes=sizes, repeats=repeats, macs=costs)
    notes = [] if opened.trained else [f"{opened.name} has random weights: its times are meaningful, its answers are not."]
    show(found, name=opened.name, specs=specs, notes=notes, out=out, json=json)
    return 0


def count_macs(model: MultiExit, example: Any) -> tuple[int, ...]:
    """MACs per input up to each exit; raises if the model does not take inputs of this shape."""
    from anytime.checks import tensors_of
    from anytime.errors import AnytimeError, ShapeError
    from anytime.models import measure_cost

    try:
        return measure_cost(model, example).macs
    except AnytimeError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # torch's errors for a wrong shape
        shapes = " and ".join(str(tuple(tensor.shape[1:])) for tensor in tensors_of(example))
        raise ShapeError(
            f"inputs of shape {shapes}: {str(error).splitlines()[0]}",
            expected="the shape of the model's inputs",
            fix="leave out --input-shape to use the shape in the model's config",
        ) from error


def show(found: Profile, *, name: str, specs: Sequence[InputSpec], notes: list[str], out: Path | None, json: bool) -> None:
    """Write the folder if there is one, then print the table or the document."""
    from anytime.report.pages.profile import load_note, write_profile

    busy = load_note(found)
    for note in [*notes, *([busy] if busy else [])]:
        print(note, file=sys.stderr)
    if out is not None:
        print(f"page: {write_profile(out, found, name=name, notes=notes)}", file=sys.stderr)
    if json:
        shapes = {spec.name: spec.shape for spec in specs}
        print_json({"model": name, "input_shape": shapes if len(specs) > 1 else specs[0].shape, **document(found)})
    else:
        print_profile(found, name)


def document(found: Profile) -> dict[str, Any]:
    """The JSON document: seconds from the start to each exit, by batch size and quantile."""
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        "exits": found.exits,
        "classes": found.classes,
        "engine": found.engine,
        "threads": found.threads,
        "repeats": found.repeats,
        "machine": found.machine,
        "macs": found.macs,
        "seconds": {
            str(batch): {name: found.seconds(batch, quantile=quantile) for name, quantile in quantiles.items()}
            for batch in found.batch_sizes
        },
    }


def print_profile(found: Profile, name: str) -> None:
    """Print one row per exit to stdout, and the machine."""
    from anytime.cli.console import print_line, print_table
    from anytime.report.pages.profile import machine

    cells = found.table()
    print_line(f"{name}, {found.engine}, {found.repeats} runs: ms to each exit")
    print_table(cells.columns, cells.rows)
    print_line(", ".join(f"{key} {value}" for key, value in machine(found)))
