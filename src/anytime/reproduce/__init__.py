"""The paper's figures and tables, measured on trained networks and compared with the paper's numbers."""

from anytime.reproduce.catalogue import CATALOGUE, Draft, Study, find, names
from anytime.reproduce.finding import Claim, Comparison, Finding, Measured
from anytime.reproduce.needs import Need
from anytime.reproduce.plots import Band, ClassMap, Line, Plot

__all__ = [
    "CATALOGUE",
    "Band",
    "Claim",
    "ClassMap",
    "Comparison",
    "Draft",
    "Finding",
    "Line",
    "Measured",
    "Need",
    "Plot",
    "Study",
    "find",
    "names",
]
