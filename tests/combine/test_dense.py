"""Dense logits, such as those of pixels and tokens: the same numbers as a loop over the positions."""

from __future__ import annotations

import pytest
import torch

import anytime
from anytime.calibrate import FittedProduct, Temperature
from anytime.combine.dense import DenseRows, Layout
from anytime.metrics import follow

GENERATOR = torch.Generator().manual_seed(3)
PIXELS = 3 * torch.randn(3, 2, 4, 5, 6, generator=GENERATOR)  # (exits, batch, classes, height, width)
TOKENS = 3 * torch.randn(3, 2, 7, 4, generator=GENERATOR)  # (exits, batch, length, classes)
RULES = [
    anytime.Latest(),
    anytime.Caching(),
    anytime.Product(),
    anytime.Mixture(),
    anytime.Cached(anytime.Product()),
    anytime.Scaled(anytime.Latest(), (1.0, 2.0, 0.5)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_gives_each_pixel_what_it_gives_a_row(rule: anytime.Rule) -> None:
    found = rule(PIXELS, class_dim=2)
    assert found.probs.shape == PIXELS.shape
    for y in range(5):
        for x in range(6):
            wanted = rule(PIXELS[..., y, x])
            torch.testing.assert_close(found.probs[..., y, x], wanted.probs)
            torch.testing.assert_close(found.confidence[..., y, x], wanted.confidence)
            torch.testing.assert_close(found.log_odds[..., y, x], wanted.log_odds)
            assert torch.equal(found.labels[..., y, x], wanted.labels)
            assert torch.equal(found.fell_back[..., y, x], wanted.fell_back)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("logits", "class_dim", "step_dim"), [(PIXELS, 2, 1), (PIXELS, -3, -3), (TOKENS, -1, 2)])
def test_stepping_equals_the_call(rule: anytime.Rule, logits: torch.Tensor, class_dim: int, step_dim: int) -> None:
    whole, state = rule(logits, class_dim=class_dim), rule.start(3)
    for exit, now in enumerate(logits):
        state, found = rule.step(state, now, class_dim=step_dim if exit == 0 else None)
        torch.testing.assert_close(found.probs, whole.at(exit).probs)
        assert torch.equal(found.labels, whole.at(exit).labels)


@pytest.mark.parametrize("rows", [torch.tensor([1]), torch.tensor([False, True])])
def test_inputs_can_leave_a_dense_state(rows: torch.Tensor) -> None:
    rule = anytime.Caching()
    state, _ = rule.step(rule.start(3), PIXELS[0], class_dim=1)
    _, found = rule.step(state.select(rows), PIXELS[1][1:])
    torch.testing.assert_close(found.probs, rule(PIXELS, class_dim=2).probs[1, 1:])


def test_classes_may_be_between_positions() -> None:
    between = PIXELS.movedim(2, 3)  # (exits, batch, height, classes, width)
    found = anytime.Product()(between, class_dim=3)
    torch.testing.assert_close(found.probs.movedim(3, 2), anytime.Product()(PIXELS, class_dim=2).probs)


def test_rows_are_read_in_any_blocks() -> None:
    plain = PIXELS.movedim(2, -1).reshape(3, -1, 4)
    rows = DenseRows(PIXELS, 2)
    for first in range(0, 60, 7):
        for stop in (first, first + 1, first + 13, 60):
            assert torch.equal(rows[:, first:stop], plain[:, first:stop])
    kept = torch.tensor([0, 3, 29, 30, 31, 59])
    some = DenseRows(PIXELS, 2, kept=kept)
    assert torch.equal(some[:, 1:5], plain[:, kept[1:5]])
    assert torch.equal(some[:, torch.tensor([0, 4])], plain[:, kept[[0, 4]]])
    assert (some.locate(3), some.place(3)) == ((1, (0, 0)), "input 1, position (0, 0)")


def test_probabilities_and_half_precision_are_accepted() -> None:
    probs = PIXELS.softmax(2)
    found = anytime.Latest()(probs, class_dim=2, probabilities=True)
    torch.testing.assert_close(found.probs, probs)
    assert anytime.Product()(PIXELS.half(), class_dim=2).probs.dtype == torch.float32


def test_gradients_reach_dense_logits() -> None:
    logits = PIXELS.clone().requires_grad_()
    anytime.Product(anytime.combine.Softplus())(logits, class_dim=2).log_probs[-1, :, 0].sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.abs().sum() > 0)


def test_trajectories_of_a_dense_prediction_are_those_of_its_positions() -> None:
    labels = torch.randint(0, 4, (2, 5, 6), generator=GENERATOR)
    labels[0, 0] = 255
    found = follow(anytime.Product()(PIXELS, class_dim=2), labels, ignore_index=255)
    used = labels.flatten() != 255
    rows = PIXELS.movedim(2, -1).reshape(3, -1, 4)[:, used]
    torch.testing.assert_close(found.label, follow(anytime.Product()(rows), labels.flatten()[used]).label)


def test_fits_use_labelled_positions_as_rows() -> None:
    labels = torch.randint(0, 4, (2, 7), generator=GENERATOR)
    labels[1, :3] = -100
    used = labels.flatten() != -100
    rows, known = TOKENS.reshape(3, -1, 4)[:, used], labels.flatten()[used]
    fits: list[tuple[Temperature | FittedProduct, Temperature | FittedProduct]] = [
        (fit(TOKENS, labels, class_dim=-1, ignore_index=-100), fit(rows, known))
        for fit in (anytime.fit_temperature, anytime.fit_product)
    ]
    assert all(dense == plain for dense, plain in fits)


def test_a_layout_without_positions_is_plain() -> None:
    layout = Layout.of((3, 40, 5), -1)
    assert (layout.positions, layout.per_input, layout.rows, layout.place(7)) == ((), 1, 40, "input 7")
