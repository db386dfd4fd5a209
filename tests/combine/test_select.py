"""A state that lost rows goes on as if those rows had never been there."""

from __future__ import annotations

import pytest
import torch

import anytime
from anytime.combine import Arithmetic, Geometric

EXITS, BATCH, CLASSES = 4, 9, 5
RULES = [
    *map(
        anytime.parse_rule,
        (
            "latest",
            "caching",
            "caching(ties=later)",
            "product",
            "product(clipped(2), weights=ones)",
            "product(adaptive(2, (1.0,), 0.5))",
            "mixture",
            "mixture(heaviside, weights=linear)",
            "scaled(product(softplus), temperatures=(1.0, 2.0, 0.5, 3.0))",
            "tempered(mixture, temperatures=(1.0, 2.0, 0.5, 3.0))",
            "cached(product)",
            "cached(cached(tempered(product, temperatures=(1.0, 2.0, 0.5, 3.0))))",
            "powers((1.0, 0.5, 0.5, 0.5), (1.0, 0.5, 2.0, 0.5))",
        ),
    ),
    Geometric.plain(EXITS),
    Arithmetic.plain(EXITS),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("kind", ["places", "mask", "none"])
def test_steps_on_the_rows_that_are_left_are_the_steps_on_all(rule: anytime.Rule, kind: str) -> None:
    logits = 3 * torch.randn(EXITS, BATCH, CLASSES, generator=torch.Generator().manual_seed(0))
    logits[:, 2] = -1  # a row that collapses
    whole = rule(logits)
    state, rows = rule.start(EXITS), torch.arange(BATCH)
    assert state.select(rows[:2]) == state
    for exit, now in enumerate(logits):
        state, prediction = rule.step(state, now[rows])
        # A vectorised loop may round its last elements differently, so a smaller batch is not equal to the bit.
        torch.testing.assert_close(prediction.log_probs, whole.log_probs[exit, rows], rtol=1e-5, atol=1e-6)
        assert torch.equal(prediction.fell_back, whole.fell_back[exit, rows])
        keep = {"places": torch.arange(len(rows) - 1, -1, -2), "mask": rows % 3 != exit, "none": rows[:0]}[kind]
        state, rows = state.select(keep), rows[keep]
        assert state.seen == exit + 1
