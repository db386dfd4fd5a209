from __future__ import annotations

from typing import Any

import pytest
import torch

from anytime.errors import OptionError
from anytime.models import create
from anytime.train.branches import run_side_by_side


class FakeStream:
    """A stream that writes down what is asked of it, and an event of its own."""

    made = 0

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"side {FakeStream.made}"
        FakeStream.made += name is None
        self.waits: list[Any] = []

    def wait_event(self, event: str) -> None:
        self.waits.append(event)

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other.name)

    def record_event(self) -> str:
        return f"event of {self.name}"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream("main")
    current = [stream]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda other: current.__setitem__(0, other))
    return stream


def test_branches_change_no_number_and_end_on_the_main_stream(main: FakeStream) -> None:
    torch.manual_seed(0)
    model = create("msdnet-cifar-linear", classes=10).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        run_side_by_side(model)
        assert torch.equal(model(images), before)
    assert torch.cuda.current_stream() is main
    sides = {f"side {i}" for i in range(6)}
    assert {name[-6:] for name in main.waits} == sides  # each side stream is waited for
    assert main.waits[-1] == "side 5"  # the exits, last


def test_other_networks_are_refused(tiny: Any) -> None:
    with pytest.raises(OptionError, match="Tiny"):
        run_side_by_side(tiny.Tiny())
