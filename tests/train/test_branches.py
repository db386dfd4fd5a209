from __future__ import annotations

from typing import Any

import pytest
import torch

from anytime.errors import OptionError
from anytime.models import create
from anytime.train.gpu.branches import run_side_by_side


def test_branches_change_no_number_and_end_on_the_main_stream(streams: list[Any]) -> None:
    torch.manual_seed(0)
    model = create("msdnet-cifar-linear", classes=10).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        run_side_by_side(model)
        torch.testing.assert_close(model(images), before)
    main, *sides = streams
    assert torch.cuda.current_stream() is main
    assert len(sides) == 6
    assert {id(one) for one in main.waits} == {id(side) for side in sides}  # each side stream is waited for
    assert main.waits[-1] is sides[-1]  # the exits, last


def test_other_networks_are_refused(tiny: Any) -> None:
    with pytest.raises(OptionError, match="Tiny"):
        run_side_by_side(tiny.Tiny())
