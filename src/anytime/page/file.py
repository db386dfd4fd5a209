"""The page as one file, with recorded answers: what `anytime demo --page FILE` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anytime.artifacts import write_text
from anytime.page.assets import single_file
from anytime.page.card import card_of, evaluate_unlabelled
from anytime.page.recorded import Source, cifar100, digits
from anytime.page.simulated import simulated_load

_MARK = b"anytime: see a network think"


def write_page(path: Path, *, report: Path | None = None) -> None:
    """Write the page with recorded answers.

    Args:
        path: The file.
        report: A report to link to, if there is one.
    """
    write_text(path, make_page(report=None if report is None else _relative(report, path.parent)))


def make_page(*, report: str | None = None) -> str:
    """The page with recorded answers; `report` is the address of a report to link to."""
    return single_file(recorded_document(link=report))


def recorded_document(*, link: str | None = None) -> dict[str, Any]:
    """Everything that the page shows without a server."""
    sources = [cifar100(), digits()]
    return {
        "sources": [source.document() for source in sources],
        "load": simulated_load(),
        "cards": [{"title": source.title, **_card(source)} for source in sources],
        "report": link,
    }


def is_page(head: bytes) -> bool:
    """Whether a file begins as one that `write_page` wrote."""
    return _MARK in head


def _card(source: Source) -> dict[str, Any]:
    return card_of(evaluate_unlabelled(source.logits, source.rules, source.milliseconds))


def _relative(target: Path, folder: Path) -> str:
    return Path(os.path.relpath(target.resolve(), folder.resolve())).as_posix()
