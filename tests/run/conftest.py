from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """tests/run/fakes.py."""
    spec = importlib.util.spec_from_file_location("runner_fakes", Path(__file__).with_name("fakes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runner_fakes"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def logits() -> Tensor:
    """Five exits, six inputs, four classes."""
    return torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0)) * 2 + 1


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())  # a server of other tests may run in this process
    yield
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name == "anytime-runner"]
