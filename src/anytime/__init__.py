"""Neural networks with exits: answers by a deadline that get better, not worse, with more time.

How much better is measured per input, and certified on held-out data.

>>> import torch, anytime
>>> logits = torch.randn(7, 32, 100)  # (exits, batch, classes)
>>> anytime.Product()(logits).probs.shape
torch.Size([7, 32, 100])

Names and subpackages are loaded on first use, so importing the package is fast.
"""

import typing as _typing
from importlib import import_module as _import_module

from anytime.process import quiet_imports as _quiet_imports

if _typing.TYPE_CHECKING:
    from pathlib import Path

    from anytime import samples
    from anytime.calibrate import certify, fit_product, fit_temperature, tune
    from anytime.combine import (
        Cached,
        Caching,
        Intersection,
        Latest,
        Mixture,
        Powers,
        Prediction,
        Product,
        ReLU,
        Rule,
        Scaled,
        Tempered,
        parse_rule,
    )
    from anytime.conformal import conformal_sets
    from anytime.errors import AnytimeError, DeadlineTooShort, Overloaded
    from anytime.evaluation import evaluate, fit_stopping, open_logits
    from anytime.fitted import Fitted
    from anytime.models import attach_exits
    from anytime.models import create as create_model
    from anytime.models import load as load_model
    from anytime.run import Answer, Budget, Runner, RunOptions
    from anytime.train import fit

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnytimeError",
    "Budget",
    "Cached",
    "Caching",
    "DeadlineTooShort",
    "Intersection",
    "Latest",
    "Mixture",
    "Overloaded",
    "Powers",
    "Prediction",
    "Product",
    "ReLU",
    "Rule",
    "RunOptions",
    "Runner",
    "Scaled",
    "Tempered",
    "__version__",
    "attach_exits",
    "certify",
    "conformal_sets",
    "create_model",
    "evaluate",
    "fit",
    "fit_product",
    "fit_stopping",
    "fit_temperature",
    "load",
    "load_model",
    "open_logits",
    "parse_rule",
    "samples",
    "tune",
]

# The package and the name there of each public name; those that are not listed are in anytime.combine under the same name.
_HOMES = {
    "Answer": ("run", "Answer"),
    "AnytimeError": ("errors", "AnytimeError"),
    "Budget": ("run", "Budget"),
    "DeadlineTooShort": ("errors", "DeadlineTooShort"),
    "Overloaded": ("errors", "Overloaded"),
    "RunOptions": ("run", "RunOptions"),
    "Runner": ("run", "Runner"),
    "attach_exits": ("models", "attach_exits"),
    "certify": ("calibrate", "certify"),
    "conformal_sets": ("conformal", "conformal_sets"),
    "create_model": ("models", "create"),
    "evaluate": ("evaluation", "evaluate"),
    "fit": ("train", "fit"),
    "fit_product": ("calibrate", "fit_product"),
    "fit_stopping": ("evaluation", "fit_stopping"),
    "fit_temperature": ("calibrate", "fit_temperature"),
    "load_model": ("models", "load"),
    "open_logits": ("evaluation", "open_logits"),
    "tune": ("calibrate", "tune"),
}
_PACKAGES = [
    "calibrate",
    "combine",
    "conformal",
    "data",
    "errors",
    "evaluation",
    "metrics",
    "models",
    "policy",
    "report",
    "reproduce",
    "run",
    "samples",
    "testing",
    "train",
]
# The kind of object that a fitted file names, and the class that reads it.
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


def load(path: "str | Path") -> "Fitted":
    """Read any fitted object from the file that its `save` wrote: temperatures, prediction sets, a rule, a policy.

    Example:
        >>> import tempfile, torch, anytime
        >>> fitted = anytime.fit_temperature(torch.tensor([[[3.0, 0.0]] * 3]), torch.tensor([0, 0, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     anytime.load(fitted.save(f"{folder}/temperature.json")) == fitted
        True
    """
    from anytime.errors import FormatError
    from anytime.fitted import read_document

    document = read_document(path)
    home = _KINDS.get(document["kind"])
    if home is None:
        raise FormatError(
            f"{path} holds an object of kind {document['kind']!r}",
            expected=f"one of {', '.join(_KINDS)}",
            fix="update anytime-nn; read an object of your own with its class: MyFitted.load(path)",
            path=path,
        )
    package, _, name = home.rpartition(".")
    known: type[Fitted] = getattr(_import_module(package), name)
    return known.from_document(document, path=path)


def __getattr__(name: str) -> _typing.Any:
    if name in _PACKAGES:
        return _import_module(f"anytime.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'anytime' has no attribute {name!r}")
    package, attribute = _HOMES.get(name, ("combine", name))
    return getattr(_import_module(f"anytime.{package}"), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)


_quiet_imports("anytime.")
