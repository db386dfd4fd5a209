"""The report of `anytime evaluate`: one HTML file that loads nothing else and can be read without its script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anytime import __version__
from anytime.display.numbers import number, plural
from anytime.evaluation.figures import figures
from anytime.evaluation.rules import followed, looks
from anytime.evaluation.tables import at_each_exit, over_all
from anytime.report.pages.card import LIMITS, card
from anytime.report.pages.guarantees import section
from anytime.report.pages.inputs import input_section, worst
from anytime.report.pages.template import render_page
from anytime.report.pages.verdict import DECISION, verdict
from anytime.report.svg.chart import template_text

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation, Guarantees

# The sections made of figures, in order, with their titles and introductions.
SECTIONS: Mapping[str, tuple[str, str]] = {
    "average": (
        "On average",
        "The quality of the answers if every input is stopped at the same exit. Averages hide what happens to single inputs.",
    ),
    "drops": (
        "Drops",
        "In an ideal anytime model no answer gets worse with more computation. These curves count how often it does.",
    ),
    "uncertainty": (
        "Uncertainty",
        "Uncertainty should decrease with more computation: lower entropy, smaller prediction sets.",
    ),
    "calibration": ("Calibration", "Calibration compares the confidence of a rule with its accuracy."),
    "learning": ("Learned and forgotten", "Between exits, some answers become correct and some become wrong."),
    "support": (
        "Classes excluded by the product",
        "A product excludes classes for good. This makes it monotone, and it is where it can fail.",
    ),
}
# Without labels only the agreement is left of the section on learning.
AGREEMENT = (
    "Agreement with the final answer",
    "The earlier the answers agree with the final one, the less is lost by stopping.",
)


def render(
    evaluation: Evaluation,
    *,
    title: str,
    source: str,
    versions: Mapping[str, str] | None = None,
    guarantees: Guarantees | None = None,
    calibration: str = "the calibration rows",
) -> str:
    """Render the whole report as HTML; the same evaluation gives the same bytes.

    Args:
        evaluation: The evaluation.
        title: The title of the report, such as the model's name.
        source: The source of the logits, such as the name of the file.
        versions: Versions of libraries to list, such as `{"torch": "2.13.0"}`; this library is always listed.
        guarantees: The guarantees for the same inputs, if there are any.
        calibration: The source of the calibration rows, such as the name of their file.
    """
    found = figures(evaluation)
    grouped = {id: [figure for figure in found if figure.section == id] for id in SECTIONS}
    words = dict(SECTIONS) if evaluation.labelled else {**SECTIONS, "learning": AGREEMENT}
    inputs = input_section(evaluation)
    script, early = template_text("report.js"), template_text("theme.js")
    return render_page(
        "report.html.j2",
        evaluation=evaluation,
        verdict=verdict(evaluation),
        card=card(evaluation),
        limits=LIMITS,
        decision=DECISION,
        sections={id: (*words[id], group) for id, group in grouped.items() if group},
        inputs=inputs,
        data=None if inputs is None else as_json(inputs.data),
        worst=worst(evaluation),
        over_all=over_all(evaluation),
        exit_by_exit=[at_each_exit(evaluation, rule) for rule in evaluation.rules],
        settings=list(flat(evaluation.settings)),
        looks=looks(evaluation.rules),
        followed=followed(evaluation),
        facts=_facts(evaluation),
        title=title,
        source=source,
        guarantees=None if guarantees is None else section(guarantees, source=calibration),
        versions=[(f"version of {name}", each) for name, each in {"anytime": __version__, **(versions or {})}.items()],
        script=script,
        early=early,
        hashes=[_hash(early), _hash(script)],
    )


def _facts(evaluation: Evaluation) -> list[str]:
    inputs = plural(evaluation.samples, "input")
    if evaluation.positions is not None and evaluation.rows is not None:
        size = " × ".join(map(str, evaluation.positions))
        inputs += f" of {size} positions, {plural(evaluation.rows, 'position')} used; below, “input” means a position"
    parts = [inputs, plural(evaluation.exits, "exit"), f"{number(evaluation.classes)} classes"]
    return [*parts, "with labels" if evaluation.labelled else "without labels"]


def flat(settings: Mapping[str, Any], *, under: str = "") -> Iterator[tuple[str, str]]:
    """Settings as pairs of a name and a value, nested ones under `group, name`."""
    for key, value in settings.items():
        name = (f"{under}, {key}" if under else str(key)).replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, under=name)
        elif isinstance(value, list | tuple):
            yield name, ", ".join(str(part) for part in value) or "none"
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        else:
            yield name, "none" if value is None else str(value)


def as_json(data: Mapping[str, Any]) -> str:
    """JSON for a script element: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
