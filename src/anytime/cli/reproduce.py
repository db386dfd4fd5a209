"""`anytime reproduce NAME`: a figure or table of the paper on trained networks, beside the paper's own numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anytime.cli.options import Flag, print_json
from anytime.errors import AnytimeError, MissingFileError, MissingRunError, OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytime.reproduce import Finding, Study
    from anytime.reproduce.runs import Runs

Scale = Literal["smoke", "small", "full"]


def reproduce(
    name: str,
    /,
    *,
    runs: Path | None = None,
    scale: Scale = "full",
    out: Path | None = None,
    page: Path | None = None,
    images: Path | None = None,
    json: Flag = False,
) -> int:
    """Reproduce a figure or table of the paper, and compare it with the paper's.

    Args:
        name: A study, `all` of them, or `list`.
        runs: Folder with trained runs, such as results/ of the repository; ./results by default at full scale.
        scale: `smoke` needs no runs and takes seconds, `small` trains missing networks on digits, `full` has the paper's size.
        out: Folder for finding.json and figure.svg, in one subfolder per study.
        page: Markdown file with all findings; its figures go to a folder `pictures/reproduction` beside it.
        images: Folder with CIFAR, for the figures that need more than logits.
        json: Print one JSON document instead of tables.
    """
    from anytime.reproduce import CATALOGUE, find

    if name == "list":
        return list_studies(json=json)
    studies = list(CATALOGUE) if name == "all" else [find(name)]
    check_paths(studies, out, page, images, inputs=(runs or Path("results"), images))
    available = open_runs(runs, scale)
    findings: list[Finding] = []
    failures: list[tuple[Study, AnytimeError]] = []
    for study in studies:
        if len(studies) > 1:
            print(f"{study.name} ...", file=sys.stderr)
        try:
            findings.append(study.run(available, scale=scale, images=images))
        except AnytimeError as error:
            failures.append((study, error))
            continue
        if out is not None:
            write(out / study.name, findings[-1])
        if not json:
            print_finding(findings[-1])
    if json and (findings or name == "all"):
        documents = [found.to_json() for found in findings]
        print_json(documents if name == "all" else documents[0])
    if page is not None:
        command = f"anytime reproduce {name} --scale {scale}{' --images FOLDER' if images else ''} --page FILE"
        write_page(page, findings, [study for study, _ in failures], command=command)
    for study, why in failures:
        print(f"anytime: {study.name} failed: {why}", file=sys.stderr)
    # `all` skips studies without runs; a study that was asked for by name needs them.
    expected = MissingRunError if name == "all" else ()
    return 1 if any(not isinstance(why, expected) for _, why in failures) else 0


def check_paths(
    studies: Sequence[Study], out: Path | None, page: Path | None, images: Path | None, *, inputs: tuple[Path | None, ...]
) -> None:
    """Raise before minutes of work if a path cannot be read or would overwrite what this command did not write."""
    from anytime.outputs import check_file, check_folder
    from anytime.reproduce.page import HEADING

    if images is not None and not images.is_dir():
        raise MissingFileError(
            f"there is no folder {images}",
            expected="a folder with CIFAR",
            fix="check --images, or leave it out to skip the figures that need it",
            path=images,
        )
    if out is not None:
        for study in studies:
            check_folder(out / study.name, kind="reproduce", inputs=inputs)
    if page is not None:
        if page.is_dir():
            raise OptionError(f"--page {page} is a folder", expected="a Markdown file", fix=f"write --page {page / 'page.md'}")
        check_file(page, ours=lambda head: head.startswith(HEADING.encode()), inputs=inputs)
        for study in studies:
            check_file(figure_path(page, study.name), ours=lambda head: b'class="chart"' in head, inputs=inputs)


def figure_path(page: Path, study: str) -> Path:
    """The figure of a study, beside the page."""
    return page.parent / "pictures" / "reproduction" / f"{study}.svg"


def open_runs(folder: Path | None, scale: Scale) -> Runs:
    """The runs for a scale: those of the folder, and small ones where the scale allows it."""
    from anytime.reproduce.runs import Runs

    if scale == "full":
        return Runs.open(folder or Path("results"))
    from anytime import samples
    from anytime.reproduce.stand_ins import SMALL, SMOKE, from_sample, on_digits

    found = Runs.open(folder) if folder is not None else Runs()
    if scale == "smoke" and folder is None:
        found = Runs((from_sample(samples.cifar100_msdnet()),), "the package")
    return found.with_stand_in(on_digits(SMOKE if scale == "smoke" else SMALL))


def list_studies(*, json: bool) -> int:
    """Print every study with the paper's figure and the runs it needs."""
    from anytime.cli.console import print_table
    from anytime.reproduce import CATALOGUE

    if json:
        keys = ("name", "shows", "figure")
        print_json([{**{key: getattr(each, key) for key in keys}, "needs": list(map(str, each.needs))} for each in CATALOGUE])
        return 0
    cells = [
        (each.name, each.figure, each.shows, ", ".join(dict.fromkeys(map(str, each.needs))) or "none") for each in CATALOGUE
    ]
    print_table(("study", "in the paper", "shows", "runs"), cells, numeric=False)
    return 0


def print_finding(found: Finding) -> None:
    """Print a finding: numbers beside the paper's, claims, the note."""
    from anytime.cli.console import print_table
    from anytime.reproduce.finding import HEADINGS

    title = f"{found.study}: {found.title} ({found.figure})"
    if found.comparisons:
        print_table(HEADINGS, [row.cells() for row in found.comparisons], title=title, numeric=False)
    else:
        print(title)
    if found.table:
        print_table(found.headings, found.table, numeric=False)
    for claim in found.claims:
        print(f"  {claim}")
    print(f"  {found.verdict}. Measured on {found.rows}.\n  {found.note}\n")


def write(folder: Path, found: Finding) -> None:
    """Write a finding and its figure, both or neither."""
    from anytime.artifacts import json_text, write_bundle
    from anytime.reproduce.drawing import draw_finding

    files = {"finding.json": json_text(found.to_json()).encode(), "figure.svg": draw_finding(found).encode()}
    write_bundle(folder, files, kind="reproduce")


def write_page(path: Path, findings: Sequence[Finding], missing: Sequence[Study], *, command: str) -> None:
    """Write the page and its figures."""
    from anytime.artifacts import write_text
    from anytime.reproduce.drawing import draw_finding
    from anytime.reproduce.page import render

    for found in findings:
        write_text(figure_path(path, found.study), draw_finding(found))
    write_text(path, render(findings, missing, pictures="pictures/reproduction", command=command))
