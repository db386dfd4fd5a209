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
    from anytime.evaluation import collect_logits, evaluate, fit_stopping, open_logits
    from anytime.models import attach_exits
    from anytime.models import create as create_model
    from anytime.report import write_report
    from anytime.run import Answer, Budget, Runner, RunOptions, load, save
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
    "collect_logits",
    "conformal_sets",
    "create_model",
    "evaluate",
    "fit",
    "fit_product",
    "fit_stopping",
    "fit_temperature",
    "load",
    "open_logits",
    "parse_rule",
    "samples",
    "save",
    "tune",
    "write_report",
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
    "collect_logits": ("evaluation", "collect_logits"),
    "conformal_sets": ("conformal", "conformal_sets"),
    "create_model": ("models", "create"),
    "evaluate": ("evaluation", "evaluate"),
    "fit": ("train", "fit"),
    "fit_product": ("calibrate", "fit_product"),
    "fit_stopping": ("evaluation", "fit_stopping"),
    "fit_temperature": ("calibrate", "fit_temperature"),
    "load": ("run", "load"),
    "open_logits": ("evaluation", "open_logits"),
    "save": ("run", "save"),
    "tune": ("calibrate", "tune"),
    "write_report": ("report", "write_report"),
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
