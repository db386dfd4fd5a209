"""Engines by name, and the choice of one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anytime.errors import CheckError, OptionError
from anytime.models import Carry, MultiExit
from anytime.run.engines import ENGINES, make_engine


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "cuda-graphs"])
def test_an_engine_is_made_by_its_name(name: str, make_network: Any) -> None:
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    model, x = make_network("mlp")
    engine: Any = make_engine(model, name, example=x)
    assert (engine.name, engine.num_exits, engine.why) == (name, 3, "requested")


def test_auto_says_what_it_measured(make_network: Any) -> None:
    model, x = make_network("mlp")
    engine: Any = make_engine(model, example=x)
    assert engine.name in ENGINES
    assert "all exits for a batch of 2" in engine.why
    for name in ("eager", "folded"):
        assert f"{name} " in engine.why


def test_auto_leaves_out_what_is_not_installed(make_network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model, x = make_network("mlp")
    engine: Any = make_engine(model, "auto", example=x)
    assert engine.name in ("eager", "folded")
    assert "onnxruntime is left out: onnxruntime is not installed" in engine.why


def test_auto_is_eager_without_an_example_or_without_stages(make_network: Any) -> None:
    class OnlyExits(MultiExit):
        num_exits = 1

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            yield x

    model, x = make_network("mlp")
    first: Any = make_engine(model)
    second: Any = make_engine(OnlyExits(), example=x)
    assert (first.name, first.why) == ("eager", "no example to measure on")
    assert (second.name, second.why) == ("eager", "the model cannot be run stage by stage")
    with pytest.raises(OptionError, match="'folded' was requested, and OnlyExits cannot be run"):
        make_engine(OnlyExits(), "folded", example=x)


def test_wrong_calls_are_named(make_network: Any) -> None:
    model, x = make_network("mlp")
    with pytest.raises(OptionError, match="engine is 'tensorrt'"):
        make_engine(model, "tensorrt", example=x)
    with pytest.raises(OptionError, match="requested without an example"):
        make_engine(model, "folded")
    for threads in (0, True, 1.5):
        with pytest.raises(OptionError, match="threads is"):
            make_engine(model, threads=threads)  # type: ignore[arg-type]


def test_threads_are_set_unless_none(make_network: Any) -> None:
    model, _ = make_network("mlp")
    before = torch.get_num_threads()
    try:
        make_engine(model, threads=2)
        assert torch.get_num_threads() == 2
        make_engine(model, threads=None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_engine_that_gives_other_logits_is_refused() -> None:
    class Moody(MultiExit):
        num_exits = 1

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
            self.calls = self.calls + 1
            return (), carry[0] + self.calls

    with pytest.raises(CheckError, match="differ from the model's"):
        make_engine(Moody(), "folded", example=torch.zeros(1, 2))
