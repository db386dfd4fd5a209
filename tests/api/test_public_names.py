"""Nothing is public by accident."""

from __future__ import annotations

import importlib

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
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_lists_what_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_the_top_is_small_and_lazy_names_are_the_real_ones() -> None:
    assert len(anytime.__all__) <= 40
    from anytime.combine import Product
    from anytime.evaluation import evaluate

    assert anytime.Product is Product
    assert anytime.evaluate is evaluate
    assert set(dir(anytime)) == set(anytime.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Prodct"):
        _ = anytime.Prodct


@pytest.mark.parametrize("name", [name for name in anytime.__all__ if name != "__version__"])
def test_public_things_say_what_they_are(name: str) -> None:
    assert (getattr(anytime, name).__doc__ or "").split("\n")[0].strip()
