"""The colours of the report in light and dark mode, as CSS variables.

The series colours have a contrast of at least 3:1 against the background; each also has its own dash, for readers who are
red-green colour-blind. Text has a contrast of at least 4.5:1 (WCAG AA).
"""

from __future__ import annotations

from collections.abc import Mapping

_COLOURS: Mapping[str, tuple[str, str]] = {  # in light mode, in dark mode
    "paper": ("#ffffff", "#171c23"),
    "page": ("#f5f6f8", "#0e1217"),
    "sunken": ("#eef1f5", "#1f262f"),
    "text": ("#1c222b", "#e7ebf0"),
    "soft": ("#4c5664", "#aeb8c4"),
    "edge": ("#d5dae1", "#343d49"),
    "grid": ("#e3e7ec", "#2a323c"),
    "base": ("#87919e", "#6f7b89"),
    "link": ("#0b5cad", "#80bcff"),
    "guide": ("#b3261e", "#ff8a80"),
    "good": ("#0a6b4d", "#6fdcb0"),
    "good-paper": ("#dff3ea", "#12362a"),
    "fair": ("#7d4e00", "#f5c467"),
    "fair-paper": ("#fdeecb", "#3a2c0b"),
    "poor": ("#a4211a", "#ff9d94"),
    "poor-paper": ("#fbe3e0", "#451a17"),
    "calm": ("#5578a3", "#7fa6d3"),
    "s0": ("#5a6472", "#b3bdc9"),
    "s1": ("#b45309", "#f7a24b"),
    "s2": ("#0b62c4", "#6db3ff"),
    "s3": ("#a1348e", "#ef94dc"),
    "s4": ("#0b7a5b", "#45cfa0"),
    "s5": ("#7a6200", "#dcc14d"),
    "s6": ("#171b21", "#f6f8fa"),
    "s7": ("#5a35e0", "#9a86ff"),
    "s8": ("#d81b4a", "#ff6b7d"),
    "s9": ("#0a8fb4", "#30c8e8"),
}
LIGHT, DARK = ({name: pair[mode] for name, pair in _COLOURS.items()} for mode in (0, 1))


def variables() -> str:
    """CSS that sets the variables by the reader's mode, by `data-theme` on the root element if set, and light in print."""
    light, dark = (_declared(colours) for colours in (LIGHT, DARK))
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
        f":root[data-theme=light]{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n"
        f"@media print{{:root,:root[data-theme]{{{light}}}}}\n"
    )


def _declared(colours: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())
