"""Nothing is public by accident."""

from __future__ import annotations

import importlib
import types

import pytest

import anytime

PACKAGES = [
    "anytime",
    "anytime.combine",
    "anytime.metrics",
    "anytime.calibrate",
    "anytime.conformal",
    "anytime.policy",
    "anytime.evaluation",
    "anytime.run",
    "anytime.models",
    "anytime.data",
    "anytime.train",
    "anytime.report",
    "anytime.testing",
    "anytime.serve",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_lists_what_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_the_top_level_holds_the_public_names_and_no_others() -> None:
    assert set(dir(anytime)) == set(anytime.__all__)
    held = {name for name, value in vars(anytime).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in held if not name.startswith("_")} <= set(anytime.__all__)


def test_lazy_names_are_the_real_ones() -> None:
    from anytime.combine import Product
    from anytime.models import create

    assert (anytime.Product, anytime.create_model) == (Product, create)
    assert anytime.conformal.Raps is importlib.import_module("anytime.conformal").Raps


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Prodct"):
        _ = anytime.Prodct


@pytest.mark.parametrize("name", [name for name in anytime.__all__ if name != "__version__"])
def test_public_names_have_docstrings(name: str) -> None:
    assert (getattr(anytime, name).__doc__ or "").split("\n")[0].strip()
