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

from anytime.process import quiet_imports as _quiet_imports

if TYPE_CHECKING:
    from pathlib import Path

    from anytime import samples
    from anytime.combine import (
        AdaptiveReLU,
        Cached,
        Caching,
        ClippedReLU,
        Exponential,
        Heaviside,
        Intersection,
        Latest,
        Mixture,
        Powers,
        Prediction,
        Product,
        ReLU,
        Rule,
        Scaled,
        Sigmoid,
        Softplus,
        State,
        Tempered,
        ThresholdReLU,
        parse_rule,
    )
    from anytime.conformal import Raps
    from anytime.errors import AnytimeError, DeadlineTooShort
    from anytime.evaluation import Evaluation, evaluate, open_logits
    from anytime.fitted import Fitted
    from anytime.run import Answer, Budget, Profile, Runner

__version__ = "0.1.0"

__all__ = [
    "AdaptiveReLU",
    "Answer",
    "AnytimeError",
    "Budget",
    "Cached",
    "Caching",
    "ClippedReLU",
    "DeadlineTooShort",
    "Evaluation",
    "Exponential",
    "Heaviside",
    "Intersection",
    "Latest",
    "Mixture",
    "Powers",
    "Prediction",
    "Product",
    "Profile",
    "Raps",
    "ReLU",
    "Rule",
    "Runner",
    "Scaled",
    "Sigmoid",
    "Softplus",
    "State",
    "Tempered",
    "ThresholdReLU",
    "__version__",
    "evaluate",
    "load",
    "open_logits",
    "parse_rule",
    "samples",
]

_HOMES = {
    "Answer": "anytime.run",
    "AnytimeError": "anytime.errors",
    "Budget": "anytime.run",
    "DeadlineTooShort": "anytime.errors",
    "Evaluation": "anytime.evaluation",
    "evaluate": "anytime.evaluation",
    "open_logits": "anytime.evaluation",
    "Profile": "anytime.run",
    "Raps": "anytime.conformal",
    "Runner": "anytime.run",
}
# What a fitted object's file says it holds, and the class that reads it.
_KINDS = {
    "adaptive-threshold": "anytime.calibrate.AdaptiveThreshold",
    "budget-policy": "anytime.policy.BudgetPolicy",
    "certificate": "anytime.calibrate.Certificate",
    "choice-certificate": "anytime.calibrate.ChoiceCertificate",
    "conformal-sets": "anytime.conformal.ConformalSets",
    "fitted-product": "anytime.calibrate.FittedProduct",
    "fitted-rule": "anytime.calibrate.FittedRule",
    "frontier": "anytime.calibrate.Frontier",
    "laplace": "anytime.calibrate.Laplace",
    "nested-intervals": "anytime.conformal.NestedIntervals",
    "nested-sets": "anytime.conformal.NestedSets",
    "profile": "anytime.run.Profile",
    "risk-control": "anytime.policy.RiskControl",
    "temperature": "anytime.calibrate.Temperature",
    "tuned-rule": "anytime.calibrate.TunedRule",
    "window-policy": "anytime.policy.WindowPolicy",
}


def load(path: str | Path) -> Fitted:
    """Read any fitted object from the file that its `save` wrote; a damaged file is refused.

    Args:
        path: The file. It says itself what it holds: temperatures, prediction sets, a tuned rule, a policy, a certificate.

    Example:
        >>> import tempfile, torch
        >>> from anytime.calibrate import fit_temperature
        >>> fitted = fit_temperature(torch.tensor([[[3.0, 0.0]] * 3]), torch.tensor([0, 0, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     load(fitted.save(f"{folder}/temperature.json")) == fitted
        True
    """
    from anytime.errors import FormatError
    from anytime.fitted import read_document

    document = read_document(path)
    home = _KINDS.get(document["kind"])
    if home is None:
        raise FormatError(
            f"{path} holds a {document['kind']!r}",
            expected=f"one of {', '.join(_KINDS)}",
            fix="update anytime-nn; an object of your own is read by its own class: Kind.load(path)",
            path=path,
        )
    package, _, name = home.rpartition(".")
    known: type[Fitted] = getattr(import_module(package), name)
    return known.from_document(document, path=path)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'anytime' has no attribute {name!r}")
    if name == "samples":
        return import_module("anytime.samples")
    return getattr(import_module(_HOMES.get(name, "anytime.combine")), name)


def __dir__() -> list[str]:
    return sorted(__all__)


_quiet_imports("anytime.")
