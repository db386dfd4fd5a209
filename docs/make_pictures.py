"""Draw the charts of the README and the documentation: `python docs/make_pictures.py`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from anytime import evaluate, samples
from anytime.artifacts import write_text
from anytime.report import figures
from anytime.report.svg.chart import stacked

FOLDER = Path(__file__).parent / "pictures"

# From the top down; tests/api/test_layers.py enforces this list.
LAYERS = json.loads((Path(__file__).parent / "layers.json").read_text())
FLOWS = (
    ("saved logits", ("logits", "combine", "log-probabilities", "metrics", "report")),
    ("a live model", ("input", "model.exits", "rule.step", "answer", "stop or continue")),
)


def main() -> None:
    """Write every chart."""
    found = evaluate(samples.cifar100_msdnet())
    drops = next(figure for figure in figures(found) if figure.id == "label_drop")
    title = "CIFAR-100: drops of the true class's probability"
    write_text(FOLDER / "drops.svg", stacked([(title, drops.chart)]))
    write_text(FOLDER / "layers.svg", layers())


def layers() -> str:
    """The layers, with imports pointing down, and the two flows of data."""
    parts = [_text(20, 30, "Layers: imports point down only", "title")]
    y = 46
    for row in LAYERS:
        parts.append(_text(20, y + 25, row["layer"], "note"))
        packages = row["packages"]
        width = 470 / len(packages) - 8
        parts += [_box(300 + index * (width + 8), y, width, package) for index, package in enumerate(packages)]
        y += 48
    y += 22
    for name, steps in FLOWS:
        parts.append(_text(20, y + 10, f"From {name}", "title"))
        y += 22
        width = (750 - 24 * (len(steps) - 1)) / len(steps)
        for index, step in enumerate(steps):
            x = 20 + index * (width + 24)
            parts.append(_box(x, y, width, step))
            if index:
                parts.append(f'<path class="arrow" d="M{x - 21:g},{y + 19}h14m-5,-5l5,5 -5,5"/>')
        y += 62
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 790 {y}" width="790" role="img" '
        f'aria-label="The layers of the package and the two flows of data"><style>{_STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%" rx="8"/>{"".join(parts)}</svg>\n'
    )


_STYLE = """
text{font:14px system-ui,sans-serif;fill:#1b1f27}.title{font-weight:600}.note{fill:#4a5263;font-size:13px}
.paper{fill:#fff}.box{fill:#eef3fa;stroke:#7d93b2}.arrow{fill:none;stroke:#4a5263;stroke-width:1.6}
@media (prefers-color-scheme:dark){text{fill:#e8ebf1}.note{fill:#aab3c3}.paper{fill:#12161d}
.box{fill:#1d2735;stroke:#6b86ab}.arrow{stroke:#aab3c3}}
""".replace("\n", "")


def _box(x: float, y: float, width: float, text: str) -> str:
    return (
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="38" rx="5"/>'
        f'<text x="{x + width / 2:g}" y="{y + 24:g}" text-anchor="middle">{escape(text)}</text>'
    )


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
