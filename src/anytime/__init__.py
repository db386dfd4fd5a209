"""Networks with exits that answer by a deadline, and are never worse for having thought longer.

>>> import torch, anytime
>>> logits = torch.randn(7, 32, 100)  # (exits, batch, classes)
>>> anytime.Product()(logits).probs.shape
torch.Size([7, 32, 100])

Names are loaded when they are first used, so that importing the package is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anytime import samples
    from anytime.combine import (
        AdaptiveReLU,
        Caching,
        ClippedReLU,
        Exponential,
        Heaviside,
        Intersection,
        Latest,
        Mixture,
        Prediction,
        Product,
        ReLU,
        Rule,
        Sigmoid,
        Softplus,
        State,
        ThresholdReLU,
        rule,
    )
    from anytime.conformal import Raps
    from anytime.errors import AnytimeError
    from anytime.evaluation import Evaluation, evaluate, open_logits

__version__ = "0.1.0"

__all__ = [
    "AdaptiveReLU",
    "AnytimeError",
    "Caching",
    "ClippedReLU",
    "Evaluation",
    "Exponential",
    "Heaviside",
    "Intersection",
    "Latest",
    "Mixture",
    "Prediction",
    "Product",
    "Raps",
    "ReLU",
    "Rule",
    "Sigmoid",
    "Softplus",
    "State",
    "ThresholdReLU",
    "__version__",
    "evaluate",
    "open_logits",
    "rule",
    "samples",
]

_HOMES = {
    "AnytimeError": "anytime.errors",
    "Evaluation": "anytime.evaluation",
    "evaluate": "anytime.evaluation",
    "open_logits": "anytime.evaluation",
    "Raps": "anytime.conformal",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'anytime' has no attribute {name!r}")
    if name == "samples":
        return import_module("anytime.samples")
    return getattr(import_module(_HOMES.get(name, "anytime.combine")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
