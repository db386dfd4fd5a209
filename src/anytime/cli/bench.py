"""`anytime bench [FILE]`: what a server would do under load, on a simulated clock, to size a machine before buying it."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anytime.cli.options import Flag, print_json
from anytime.errors import OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from anytime.evaluation import LogitsFile
    from anytime.run.simulation import LinearTimes, Load

Words = Annotated[list[str], Parameter(consume_multiple=True, negative=())]
"""Several words after one option, or a comma-separated list."""
PLAIN = "plain"
"""The name of a server that runs all exits for one request after the other, and neither refuses nor drops any."""
_METRICS = (
    ("correct", "correct answers in time, % of all requests", 100.0),
    ("in_time", "answers in time, % of all requests", 100.0),
    ("mean_exit", "mean exit of answers in time", 1.0),
    ("refused", "refused at once, % of all requests", 100.0),
)
_MOST_REQUESTS, _MOST_WORKERS, _MOST_PERCENT = 1_000_000, 1024, 100_000.0


def bench(
    file: Path | None = None,
    /,
    *,
    labels: Path | None = None,
    profile: Path | None = None,
    policy: Words | None = None,
    load: Words | None = None,
    deadline: Words | None = None,
    rule: str = "product",
    requests: int = 5000,
    workers: int = 1,
    seed: int = 0,
    out: Path | None = None,
    json: Flag = False,
) -> int:
    """Simulate a server under load, to size a machine before buying it.

    Requests arrive at random. The tables show, for each policy and load, which fraction of all requests gets a correct answer
    in time, gets an answer in time, and is refused, and the mean exit of the answers.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits: their rows
            are what requests ask about. By default the sample of a CIFAR-100 MSDNet.
        labels: A file with the labels, if FILE has none.
        profile: The profile.json of `anytime profile MODEL --batch 1,4,16 --out DIR`: the stage times on some machine. By
            default those of the CIFAR MSDNet on one core.
        policy: Scheduling policies, such as `gain least-progress`; by default all, and `plain`, which runs all exits for one
            request after the other.
        load: Loads in percent of what a plain server can do, by default `30% 70% 100% 150% 300% 600% 1000%`.
        deadline: Time limits of the requests, such as `20ms 40ms`; 20ms by default.
        rule: The rule that combines the exits, by name or the rule.json of a tuning.
        requests: Number of requests per cell.
        workers: Number of batches that run at once.
        seed: Of the arrival times and of the rows.
        out: Folder for bench.json and bench.svg.
        json: Print one JSON document instead of the tables.
    """
    from anytime.checks import check_choice, check_count, check_seed
    from anytime.cli.console import progress_bar
    from anytime.outputs import check_folder
    from anytime.run.scheduler import POLICIES
    from anytime.run.simulation import Load

    names = words(policy) or [PLAIN, *POLICIES]
    for name in names:
        check_choice(name, "--policy", [PLAIN, *POLICIES])
    loads = [percent(word) for word in words(load)] or [30.0, 70.0, 100.0, 150.0, 300.0, 600.0, 1000.0]
    limits = [duration(word) for word in words(deadline) or ["20ms"]]
    check_count(requests, "--requests", most=_MOST_REQUESTS)
    check_count(workers, "--workers", most=_MOST_WORKERS)
    check_seed(seed, name="--seed")
    if out is not None:
        check_folder(out, kind="bench", inputs=(file, labels, profile))
    correct, confidence, about = answers(file, labels, rule)
    times = stage_times(profile, len(correct))
    with progress_bar("simulating", "cells") as progress:
        cells = []
        for limit, amount in itertools.product(limits, loads):
            traffic = Load(workers * times.capacity * amount / 100, limit, requests, seed)
            cells.append(
                {"deadline": limit, "load": amount, **simulate_cell(names, traffic, times, correct, confidence, workers)}
            )
            progress(len(cells), len(limits) * len(loads))
    stages = {"fixed": times.fixed, "per_row": times.per_row, "largest_batch": times.largest_batch}
    settings = {**about, "rule": rule, "requests": requests, "workers": workers, "seed": seed}
    document = {**settings, "stage_seconds": stages, "capacity": workers * times.capacity, "cells": cells}
    if out is not None:
        print(f"chart: {write(out, document)}", file=sys.stderr)
    if json:
        print_json(document)
    else:
        print_cells(document, names)
    return 0


def simulate_cell(
    names: Sequence[str], load: Load, times: LinearTimes, correct: np.ndarray, confidence: np.ndarray, workers: int
) -> dict[str, Any]:
    """What each policy does with the same requests, and the fluid bound for them."""
    from anytime.run.scheduler import POLICIES, AllExits
    from anytime.run.simulation import draw_requests, fluid_bound, simulate

    rows = [request.row for request in draw_requests(load, *correct.shape)]
    bound = fluid_bound(load, times, correct[:, rows].mean(1).tolist(), workers=workers)
    found = {}
    for name in names:
        policy = AllExits(batched=False, drop=False) if name == PLAIN else POLICIES[name]()
        served = name != PLAIN
        one = simulate(policy, load, times, correct=correct, confidence=confidence, workers=workers, admission=served)
        found[name] = vars(one)
    return {"rate": load.rate, "policies": found, "bound": bound}


def words(given: Sequence[str] | None) -> list[str]:
    """The words of an option, each once."""
    return list(dict.fromkeys(word.strip() for part in given or () for word in part.split(",") if word.strip()))


def percent(word: str) -> float:
    """A load such as 300% or 300.

    >>> percent("300%")
    300.0
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{0,6})?)\s*%?", word, re.ASCII)
    if match is None or not 0 < float(match[1]) <= _MOST_PERCENT:
        raise OptionError(
            f"--load is {word!r}",
            expected=f"percentages above 0 and up to {_MOST_PERCENT:,.0f}",
            fix="write --load 100% 300%, after the file",
        )
    return float(match[1])


def duration(word: str) -> float:
    """A positive duration in seconds."""
    from anytime.run.budget import seconds

    found = seconds(word)
    if found == 0:
        raise OptionError(f"--deadline is {word!r}", expected="a positive duration", fix="write --deadline 20ms")
    return found


def answers(file: Path | None, labels: Path | None, rule: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Whether the answer of each exit is correct and how confident it is, `(exits, rows)`, and what the file contains."""
    import torch

    from anytime.checks import check_memory
    from anytime.cli.logits import labels_of
    from anytime.cli.rules import rule_from
    from anytime.evaluation import open_logits
    from anytime.samples import cifar100_msdnet

    source: LogitsFile = cifar100_msdnet() if file is None else open_logits(file, labels)
    known = labels_of(source)
    exits, samples, classes = source.logits.shape
    check_memory(12 * exits * samples * classes, f"{samples:,} rows", fix="save fewer rows: a few thousand are enough")
    predictions = rule_from(rule, source)(torch.as_tensor(source.logits[...]).float())
    about = {"file": source.path.name, "exits": exits, "samples": samples, "classes": classes}
    return (predictions.labels == known).numpy(), predictions.confidence.numpy(), about


def stage_times(path: Path | None, exits: int) -> LinearTimes:
    """The times of a profile, or those of the CIFAR MSDNet."""
    from anytime.run import Profile
    from anytime.run.simulation import CIFAR_MSDNET, fit_times

    if path is None:
        if len(CIFAR_MSDNET.fixed) != exits:
            raise OptionError(
                f"the logits have {exits} exits, and --profile is not given",
                expected=f"a profile; only the CIFAR MSDNet with {len(CIFAR_MSDNET.fixed)} exits has known times",
                fix="run anytime profile MODEL --batch 1,4,16 --out DIR, and pass --profile DIR/profile.json",
            )
        return CIFAR_MSDNET
    found = Profile.load(path)
    if found.exits != exits:
        raise OptionError(
            f"the profile has {found.exits} exits and the logits {exits}",
            expected="a profile and logits of the same model",
            fix="pass the logits of the model that was measured",
        )
    if len(found.batch_sizes) == 1:
        note = "batches are assumed to save no time; measure it with anytime profile MODEL --batch 1,4,16"
        print(f"anytime: {path} has one batch size: {note}", file=sys.stderr)
    times = fit_times(found)
    if not min(fixed + row for fixed, row in zip(times.fixed, times.per_row, strict=True)) > 0:
        raise OptionError(f"{path} has a stage that takes no time", expected="positive times", fix="measure the profile again")
    return times


def write(folder: Path, document: dict[str, Any]) -> Path:
    """Write the bundle, in place of an earlier one; returns the path of the chart."""
    from anytime.artifacts import json_text, write_bundle

    files = {"bench.json": json_text(document).encode(), "bench.svg": chart(document).encode()}
    write_bundle(folder, files, kind="bench")
    return folder / "bench.svg"


def chart(document: dict[str, Any]) -> str:
    """Correct answers in time over the load, one chart per deadline and one line per policy, as an SVG file."""
    from anytime.report.svg.chart import stacked
    from anytime.report.svg.load import load_chart

    charts = []
    for limit in dict.fromkeys(cell["deadline"] for cell in document["cells"]):
        cells = [cell for cell in document["cells"] if cell["deadline"] == limit]
        lines = {name: [100 * cell["policies"][name]["correct"] for cell in cells] for name in cells[0]["policies"]}
        lines["fluid bound"] = [100 * cell["bound"] for cell in cells]
        drawn = load_chart([cell["load"] for cell in cells], lines)
        charts.append((f"Correct answers within {1e3 * limit:g} ms", drawn))
    return stacked(charts)


def print_cells(document: dict[str, Any], names: Sequence[str]) -> None:
    """Print four tables per deadline to stdout, with one row per policy and one column per load."""
    from anytime.cli.console import print_line, print_table

    for limit in dict.fromkeys(cell["deadline"] for cell in document["cells"]):
        cells = [cell for cell in document["cells"] if cell["deadline"] == limit]
        headings = ("load", *(f"{cell['load']:g} %" for cell in cells))
        for key, title, factor in _METRICS:
            rows = [(name, *(f"{factor * cell['policies'][name][key]:.1f}" for cell in cells)) for name in names]
            if key == "correct":
                rows.append(("fluid bound", *(f"{factor * cell['bound']:.1f}" for cell in cells)))
            print_table(headings, rows, title=f"deadline {1e3 * limit:g} ms: {title}", section=len(names))
    print_line(
        f"{document['file']}, {document['rule']}: {document['requests']:,} simulated requests per column, workers "
        f"{document['workers']}. 100 % is a plain server's capacity, {document['capacity']:,.0f} requests per second."
    )
