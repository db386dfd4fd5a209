from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from anytime.data import ImageData, load_digits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in a fixed order, so that results are equal to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> dict[str, ImageData]:
    return load_digits()


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tiny.py, which is also run as a program."""
    spec = importlib.util.spec_from_file_location("tiny_network", Path(__file__).with_name("tiny.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_network"] = module
    spec.loader.exec_module(module)
    return module
