"""The Jinja environment of all pages. A page is one HTML file that loads nothing else."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from anytime.evaluation.rules import shown
from anytime.report.svg.chart import draw, style_sheet, swatch, template_text

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render_page(template: str, **values: Any) -> str:
    """Render a template of `templates/` as a page with the style of the report."""
    style = style_sheet() + template_text("report.css")
    return environment().get_template(template).render(style=style, **values)


@cache
def environment() -> Environment:
    """The environment with our filters; values are escaped and must be defined."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("anytime.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["shown"] = shown
    made.filters["draw"] = draw
    made.filters["breakable"] = _breakable
    made.filters["together"] = lambda text: str(text).replace(" %", "\u00a0%").replace("≥ ", "≥\u00a0")
    made.globals["swatch"] = swatch
    return made


def _breakable(name: str) -> Markup:
    """A rule's name with line breaks allowed after a bracket or a comma."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([(,])", r"\1<wbr>", str(escape(name))))
