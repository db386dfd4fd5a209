"""An MSDNet in training with its independent parts side by side on a GPU: the paths of each layer, and the exits."""

from __future__ import annotations

import torch

from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.models.branches import run_beside, run_paths_side_by_side
from anytime.models.msdnet import MSDNet


def run_side_by_side(network: MultiExit) -> None:
    """Put the paths of each layer, and the exits, on streams of their own, from now on."""
    if type(network) is not MSDNet:
        raise OptionError(
            f"streams were asked for with {type(network).__name__}",
            expected="MSDNet, whose layers have independent paths",
            fix="leave streams off",
        )
    run_paths_side_by_side(network)
    exits = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    *early, last = network.classifier
    # An exit's logits are needed when all are there: the last one, on the main stream, waits for the others.
    for head in early:
        run_beside(head, exits)
    last.register_forward_hook(lambda *_: torch.cuda.current_stream().wait_stream(exits))
