from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

from anytime.errors import AnytimeError

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
torch.set_num_threads(int(os.environ.get("ANYTIME_TEST_THREADS", "1")))
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which runs nowhere else without a GPU


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give every test the same random numbers, whichever tests this process has run before."""
    torch.manual_seed(0)


class FakeStream:
    """A stream of a GPU that only writes down what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)

    def record_event(self) -> tuple[str, Any]:
        return ("event of", self)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Streams in place of torch's: the main one, and all that are made from now on."""
    made = [FakeStream()]
    current = [made[0]]

    def make() -> FakeStream:
        made.append(FakeStream())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda other: current.__setitem__(0, other))
    return made


@pytest.fixture(scope="session")
def explained() -> Callable[[Callable[[], object], type[AnytimeError], str], None]:
    """Makes a mistake: the error is of its class, has its words, and says what it got, what was expected and how to fix it."""

    def check(call: Callable[[], object], kind: type[AnytimeError], words: str) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert words in str(caught.value)
        assert all((caught.value.got, caught.value.expected, caught.value.fix))

    return check


@pytest.fixture(scope="session")
def two() -> ModuleType:
    """tests/two_inputs.py: models that take token ids and a mask."""
    spec = importlib.util.spec_from_file_location("two_inputs", Path(__file__).with_name("two_inputs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["two_inputs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference data beside the checkout."""
    folder = Path(os.environ.get("ANYTIME_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "reference" / "expected.json").exists():
        pytest.skip(f"no reference data in {folder}; set ANYTIME_SHARED to the folder that has it")
    return folder
