"""The report of `anytime evaluate` as one HTML file that needs nothing else: no network, no fonts, no script to be read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from anytime import __version__
from anytime.report.numbers import number, plural
from anytime.report.pages.card import LIMITS, card
from anytime.report.pages.figures import figures
from anytime.report.pages.guarantees import section
from anytime.report.pages.inputs import trajectories, worst
from anytime.report.pages.rules import followed, looks, shown
from anytime.report.pages.tables import exit_by_exit, over_all
from anytime.report.pages.verdict import DECISION, verdict
from anytime.report.svg.chart import style_sheet, swatch, template_text

if TYPE_CHECKING:
    from jinja2 import Environment

    from anytime.evaluation import Evaluation, Guarantees

# The sections made of figures, in the order of the page, each with what it is about.
SECTIONS: Mapping[str, tuple[str, str]] = {
    "average": (
        "On average",
        "How good the answers are if every input is stopped at the same exit. Averages hide what happens to single inputs.",
    ),
    "drops": (
        "How far answers fall",
        "An anytime model never gets worse for having thought longer. These curves count the inputs for which it does.",
    ),
    "uncertainty": ("Doubt", "Less time should mean more doubt: entropy and prediction sets should shrink from exit to exit."),
    "calibration": (
        "Are the probabilities worth their name?",
        "Calibration compares how sure a rule is with how often it is right.",
    ),
    "learning": (
        "Learned and forgotten",
        "Between exits, answers turn right and answers turn wrong. Only the first should happen.",
    ),
    "support": (
        "What the product rules out",
        "A product takes classes out of the running for good. This is what makes it monotone, and where it can fail.",
    ),
}

# Without labels all that is left of the section on learning is how soon the answers settle.
SETTLING = ("Do the answers settle?", "The sooner the answer at an exit is the final one, the less is lost by stopping there.")


def render(
    evaluation: Evaluation,
    *,
    title: str,
    source: str,
    versions: Mapping[str, str] | None = None,
    guarantees: Guarantees | None = None,
    calibration: str = "the calibration rows",
) -> str:
    """The whole report as HTML.

    Args:
        evaluation: What was measured.
        title: The title of the report, such as the model's name.
        source: Where the logits came from, such as the name of the file.
        versions: What it was measured with, such as `{"torch": "2.13.0"}`; this library is always named.
        guarantees: What was fitted on calibration rows and measured on the same inputs, if anything was.
        calibration: Where those rows came from, such as the name of their file.

    Returns:
        One HTML document. The same evaluation gives the same bytes.
    """
    environment = _environment()
    style, script, early = (template_text(name) for name in ("report.css", "report.js", "theme.js"))
    return environment.get_template("report.html.j2").render(
        **_words(evaluation),
        title=title,
        source=source,
        guarantees=None if guarantees is None else section(guarantees, source=calibration),
        versions={"anytime": __version__, **(versions or {})},
        style=style_sheet() + style,
        script=script,
        early=early,
        hashes=[_hash(early), _hash(script)],
    )


def _words(evaluation: Evaluation) -> dict[str, Any]:
    every = looks(evaluation.rules)
    found = figures(evaluation)
    grouped = {id: [figure for figure in found if figure.section == id] for id in SECTIONS}
    words = dict(SECTIONS) if evaluation.labelled else {**SECTIONS, "learning": SETTLING}
    singles = trajectories(evaluation)
    return {
        "evaluation": evaluation,
        "verdict": verdict(evaluation),
        "card": card(evaluation),
        "limits": LIMITS,
        "decision": DECISION,
        "sections": {id: (*words[id], group) for id, group in grouped.items() if group},
        "trajectories": singles,
        "data": None if singles is None else as_json(singles.data),
        "worst": worst(evaluation),
        "over_all": over_all(evaluation),
        "exit_by_exit": exit_by_exit(evaluation),
        "settings": list(flat(evaluation.settings)),
        "looks": every,
        "followed": followed(evaluation),
        "facts": _facts(evaluation),
    }


def _facts(evaluation: Evaluation) -> list[str]:
    parts = [plural(evaluation.samples, "input"), plural(evaluation.exits, "exit"), f"{number(evaluation.classes)} classes"]
    return [*parts, "with labels" if evaluation.labelled else "without labels"]


def flat(settings: Mapping[str, Any], *, under: str = "") -> Iterator[tuple[str, str]]:
    """Settings as pairs of a name and a value, those of a group under `group, name`."""
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
    """JSON that can stand inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("anytime.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    environment.filters["breakable"] = _breakable
    environment.filters["together"] = lambda text: str(text).replace(" %", "\u00a0%").replace("≥ ", "≥\u00a0")
    environment.globals["swatch"] = swatch
    return environment


def _breakable(name: str) -> Markup:
    """A rule's name that may be broken after a bracket or a comma."""
    return Markup(re.sub(r"([(,])", r"\1<wbr>", str(escape(name))))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
