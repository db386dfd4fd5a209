"""Paths on streams of their own, on streams that only write down what is asked of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anytime.models import MLP, MLPConfig, create
from anytime.models.branches import run_beside, run_paths_side_by_side


def test_paths_begin_with_their_layer_and_the_main_stream_waits_for_each(streams: list[Any]) -> None:
    torch.manual_seed(0)
    model = create("msdnet-cifar-linear", classes=10).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        run_paths_side_by_side(model)
        torch.testing.assert_close(model(images), before)
    main, *sides = streams
    assert torch.cuda.current_stream() is main
    assert len(sides) == 5
    assert {id(one) for one in main.waits} == {id(side) for side in sides}
    assert all(event == ("event of", main) for side in sides for event in side.waits)
    assert sum(len(side.waits) for side in sides) == len(main.waits)  # each that leaves comes back


def test_other_networks_stay_as_they_are(streams: list[Any]) -> None:
    model = MLP(MLPConfig(classes=4))
    run_paths_side_by_side(model)
    assert len(streams) == 1
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_part_beside_the_others_is_not_waited_for(streams: list[Any]) -> None:
    part, side = nn.Linear(2, 2), torch.cuda.Stream()
    run_beside(part, side)
    part(torch.zeros(1, 2))
    main, side = streams
    assert torch.cuda.current_stream() is main
    assert side.waits == [("event of", main)]
    assert main.waits == []
