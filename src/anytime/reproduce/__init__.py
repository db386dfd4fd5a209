"""The paper, reproduced: every figure and table as a study over trained networks, held against the paper's numbers."""

from anytime.reproduce.catalogue import CATALOGUE, Context, Study, find, names
from anytime.reproduce.finding import Band, Claim, Comparison, Field, Finding, Line, Measured, Panel
from anytime.reproduce.needs import Need

__all__ = [
    "CATALOGUE",
    "Band",
    "Claim",
    "Comparison",
    "Context",
    "Field",
    "Finding",
    "Line",
    "Measured",
    "Need",
    "Panel",
    "Study",
    "find",
    "names",
]
