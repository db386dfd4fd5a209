"""Networks with exits, one file an architecture."""

from anytime.models.base import ExitModel, MultiExit
from anytime.models.cost import Cost, measure_cost
from anytime.models.msdnet import MSDNet, MSDNetConfig
from anytime.models.zoo import create, load, load_weights, names, save

__all__ = [
    "Cost",
    "ExitModel",
    "MSDNet",
    "MSDNetConfig",
    "MultiExit",
    "create",
    "load",
    "load_weights",
    "measure_cost",
    "names",
    "save",
]
