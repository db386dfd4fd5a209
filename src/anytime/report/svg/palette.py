"""The colours of the report, once for the light and once for the dark, as CSS variables.

The series colours are told apart by people who see red and green alike, stand out from the paper by at least 3 to 1, and
never work alone: each series has its own dash and marker too. Text stands out by at least 4.5 to 1 (WCAG AA).
"""

from __future__ import annotations

from collections.abc import Mapping

LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "page": "#f5f6f8",
    "sunken": "#eef1f5",
    "text": "#1c222b",
    "soft": "#4c5664",
    "edge": "#d5dae1",
    "grid": "#e3e7ec",
    "base": "#87919e",
    "link": "#0b5cad",
    "guide": "#b3261e",
    "good": "#0a6b4d",
    "good-paper": "#dff3ea",
    "fair": "#7d4e00",
    "fair-paper": "#fdeecb",
    "poor": "#a4211a",
    "poor-paper": "#fbe3e0",
    "calm": "#5578a3",
    "s0": "#5a6472",
    "s1": "#b45309",
    "s2": "#0b62c4",
    "s3": "#a1348e",
    "s4": "#0b7a5b",
    "s5": "#7a6200",
}

DARK: Mapping[str, str] = {
    "paper": "#171c23",
    "page": "#0e1217",
    "sunken": "#1f262f",
    "text": "#e7ebf0",
    "soft": "#aeb8c4",
    "edge": "#343d49",
    "grid": "#2a323c",
    "base": "#6f7b89",
    "link": "#80bcff",
    "guide": "#ff8a80",
    "good": "#6fdcb0",
    "good-paper": "#12362a",
    "fair": "#f5c467",
    "fair-paper": "#3a2c0b",
    "poor": "#ff9d94",
    "poor-paper": "#451a17",
    "calm": "#7fa6d3",
    "s0": "#b3bdc9",
    "s1": "#f7a24b",
    "s2": "#6db3ff",
    "s3": "#ef94dc",
    "s4": "#45cfa0",
    "s5": "#dcc14d",
}


def variables() -> str:
    """CSS that sets the variables by the reader's setting, by `data-theme` on the root where given, and light in print."""
    light, dark = (_declared(colours) for colours in (LIGHT, DARK))
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
        f":root[data-theme=light]{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n"
        f"@media print{{:root,:root[data-theme]{{{light}}}}}\n"
    )


def _declared(colours: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())
