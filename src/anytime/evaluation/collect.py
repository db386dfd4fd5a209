"""Placeholder until the real one is merged: the logits of all exits over labelled batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anytime.checks import map_inputs
from anytime.models.attach.probe import evaluating


class CollectedLogits(NamedTuple):
    """Logits, `(exits, rows, classes)`, and labels, `(rows,)` or None."""

    logits: Tensor
    labels: Tensor | None


@torch.no_grad()
def collect_logits(model: Any, data: Any) -> CollectedLogits:
    """The logits of all exits over the batches of `data`."""
    device = next(model.parameters()).device
    logits, labels = [], []
    with evaluating(model):
        for x, y in data:
            inputs = map_inputs(lambda tensor: tensor.to(device), x)
            logits.append(torch.stack([found.float().cpu() for found in model.exits(inputs)]))
            labels.append(y)
    known = None if any(y is None for y in labels) else torch.cat([torch.as_tensor(y).cpu() for y in labels])
    return CollectedLogits(torch.cat(logits, 1), known)
