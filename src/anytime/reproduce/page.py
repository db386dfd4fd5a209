"""The page `docs/reproduction.md`: every finding beside the paper's, written by `anytime reproduce all --page FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anytime.reproduce import paper
from anytime.reproduce.finding import Finding
from anytime.reproduce.words import claim_cells, comparison_cells

if TYPE_CHECKING:
    from anytime.reproduce.catalogue import Study

HEADING = "# The paper, reproduced"
_SHORT = 12


def render(findings: Sequence[Finding], missing: Sequence[Study] = (), *, pictures: str, command: str) -> str:
    """The page as Markdown.

    Args:
        findings: In the order of the page.
        missing: Studies that could not be made, to be named at the end.
        pictures: Folder with `NAME.svg` for each finding, as a link from the page.
        command: What made it.
    """
    parts = [_head(findings, command), *(_section(found, pictures) for found in findings)]
    if missing:
        rows = [f"- `{study.name}` ({study.shows}; {study.figure}): needs {_needs(study)}." for study in missing]
        parts.append("\n".join(["## Not there yet", "", *rows]))
    return "\n\n".join(parts) + "\n"


def _head(findings: Sequence[Finding], command: str) -> str:
    rows = [f"| [{found.study}](#{found.study}) | {found.figure} | {found.title} | {found.verdict} |" for found in findings]
    asked = [row.within for found in findings for row in found.comparisons if row.within is not None]
    claims = [claim.holds for found in findings for claim in found.claims]
    return "\n".join(
        [
            HEADING,
            "",
            f"Made by `{command}`; do not edit.",
            "",
            f"Of {len(asked)} numbers held against the paper's, {sum(asked)} lie within the tolerance; of {len(claims)} "
            f"claims, {sum(claims)} hold. Everything that does not is marked so where it stands.",
            "",
            f"What was asked beforehand: accuracy within {paper.ACCURACY_TOLERANCE['cifar10']:g} point (CIFAR-10) and "
            f"{paper.ACCURACY_TOLERANCE['cifar100']:g} points (CIFAR-100), the table of correctness within "
            f"{paper.CORRECTNESS_TOLERANCE:g} points, and bounds on the product's falls. The other tolerances are our own, "
            f"set before the first comparison: {paper.DROP_TOLERANCE:g} points for shares of inputs, "
            f"{paper.ENTROPY_TOLERANCE:g} nats, {paper.SET_SIZE_TOLERANCE:g} class, {paper.ECE_TOLERANCE:g} of ECE. Most of "
            "the paper's numbers were read off its figures, which show single checkpoints. In the pictures, bars are one "
            "standard deviation over seeds and crosses are the paper's numbers. A claim is something the paper says in "
            "words (in `deviations`, something that we say), checked on our runs; where it needs a yardstick, such as what "
            "counts as a minor cost, that is ours and stands with it.",
            "",
            "| study | in the paper | shows | verdict |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )


def _section(found: Finding, pictures: str) -> str:
    lines = [f"## {found.study}", "", f"{_upper(found.title)} ({found.figure}). **{_upper(found.verdict)}.**", ""]
    lines += [f"![{found.title}]({pictures}/{found.study}.svg)", ""]
    lines += [*_comparisons(found), *_table(found.headings, found.table)]
    if found.claims:
        lines += [*(f"- {claim}" for claim in claim_cells(found)), ""]
    lines += [found.note, "", f"Rows: {found.rows}." + (f" Runs: {', '.join(found.runs)}." if found.runs else "")]
    return "\n".join(lines)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _comparisons(found: Finding) -> list[str]:
    """The numbers; a long table is folded away, and what is not within stands before it."""
    headings, rows = comparison_cells(found)
    if len(rows) <= _SHORT:
        return _table(headings, rows)
    failed = [row for row in rows if row[-1] == "NOT within"]
    before = ["Not within:", "", *_table(headings, failed)] if failed else []
    return [*before, f"<details><summary>All {len(rows)} numbers</summary>", "", *_table(headings, rows), "</details>", ""]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [_row(headings), _row(["---"] * len(headings)), *(_row(row) for row in rows), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _needs(study: Study) -> str:
    return " and ".join(f"a run of {need}" for need in study.needs)
