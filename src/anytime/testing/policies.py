"""The battery for policies: `check_policy(my_policy)` runs every law of an `anytime.policy.Policy`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_count
from anytime.combine import Latest, Prediction
from anytime.errors import ScaleError, ShapeError
from anytime.policy import FittedPolicy
from anytime.testing.laws import check_equal, check_raises, fail, run_laws


def check_policy(policy: Any, *, exits: int = 4, classes: int = 5) -> None:
    """Run every law on a policy; raise `CheckError` at the first that does not hold.

    Args:
        policy: A `Policy`, or a fitted one.
        exits: The number of exits that it accepts.
        classes: The number of classes that it accepts.

    Example:
        >>> from anytime.policy import Confidence, Patience
        >>> check_policy(Patience(2))
        >>> check_policy(Confidence((0.9, 0.8, 0.7)), exits=3)
    """
    run_laws(LAWS, policy, check_count(exits, "exits"), check_count(classes, "classes"))


def decides_per_row(policy: Any, exits: int, classes: int) -> None:
    """`stop` gives one boolean per row at every exit, also for an empty batch."""
    for rows in (0, 1, 7):
        for mask in _masks(policy, _answers(exits, rows, classes)):
            if mask.dtype != torch.bool or mask.shape != (rows,):
                fail(f"stop gave {mask.dtype} of shape {tuple(mask.shape)} for {rows} rows")


def steps_as_it_applies(policy: Any, exits: int, classes: int) -> None:
    """`apply` and `answer` give the first exit, from 1, at which `stop` is true; the last exit stops every row."""
    for seed in range(4):
        answers = _answers(exits, 40, classes, seed=seed)
        stopped = torch.full((40,), exits)
        for exit, mask in reversed(list(enumerate(_masks(policy, answers), 1))):
            stopped[mask] = exit
        check_equal(policy.apply(answers), stopped, "apply: it")
        check_equal(policy.apply(answers.log_probs), policy.answer(answers).exit, "apply from answer: it")


def answers_come_from_the_source(policy: Any, exits: int, classes: int) -> None:
    """The answer of a row is the rule's at the exit `source`, and no later than the exit where the row stopped."""
    answers = _answers(exits, 40, classes)
    found = policy.answer(answers)
    if bool((found.source > found.exit).any()) or bool((found.source < 1).any()):
        fail("source is not an exit that was computed")
    expected = answers.at(found.source - 1, torch.arange(40))
    check_equal(found.log_probs, expected.log_probs, "the distribution")
    check_equal(found.labels, expected.labels, "the label")
    check_equal(found.fell_back, expected.fell_back, "fell_back")


def steps_are_pure(policy: Any, exits: int, classes: int) -> None:
    """A step changes neither its state nor the prediction: repeated, it gives the same."""
    answers, plain = _answers(exits, 9, classes), _plain(policy)
    state, copy = plain.start(9), answers.clone()
    for exit in range(exits - 1):
        before = tuple(part.clone() for part in state)
        _, first = plain.stop(state, exit, answers.at(exit))
        for old, new in zip(before, state, strict=True):
            check_equal(new, old, f"the state before exit {exit + 1}")
        state, again = plain.stop(state, exit, answers.at(exit))
        check_equal(first, again, f"the repeated step at exit {exit + 1}")
    check_equal(answers.log_probs, copy.log_probs, "the prediction")


def ignores_later_exits(policy: Any, exits: int, classes: int) -> None:
    """The decision at an exit does not depend on later exits."""
    answers, other = _answers(exits, 20, classes), _answers(exits, 20, classes, seed=1)
    for exit in range(exits - 1):
        mixed = Prediction(
            torch.cat((answers.log_probs[: exit + 1], other.log_probs[exit + 1 :])),
            torch.cat((answers.fell_back[: exit + 1], other.fell_back[exit + 1 :])),
        )
        stopped, changed = policy.apply(answers), policy.apply(mixed)
        early = stopped <= exit + 1
        check_equal(changed[early], stopped[early], f"the exit of rows that stopped by exit {exit + 1}")


def treats_rows_independently(policy: Any, exits: int, classes: int) -> None:
    """Rows stop at the same exit alone, in another order, and where other rows have left the batch."""
    answers, plain = _answers(exits, 12, classes), _plain(policy)
    stopped = policy.apply(answers)
    order = torch.arange(12).flip(0)
    check_equal(policy.apply(answers.at(slice(None), order)), stopped[order], "rows in another order: the exit")
    check_equal(policy.apply(answers.at(slice(None), slice(3, 4))), stopped[3:4], "row 3 alone: the exit")
    state, rows = plain.start(12), torch.arange(12)
    for exit in range(exits - 1):
        state, mask = plain.stop(state, exit, answers.at(exit, rows))
        check_equal(mask, stopped[rows] == exit + 1, f"with rows leaving, the decision at exit {exit + 1}")
        rows, state = rows[~mask], tuple(part[~mask] for part in state)


def refuses_what_is_not_a_prediction(policy: Any, exits: int, classes: int) -> None:
    """Wrong ranks raise `ShapeError`, logits in place of log-probabilities `ScaleError`."""
    check_raises(ShapeError, lambda: policy.apply(torch.zeros(exits, classes)), "a tensor of rank 2")
    check_raises(ScaleError, lambda: policy.apply(torch.ones(exits, 3, classes)), "logits")


LAWS = (
    decides_per_row,
    steps_as_it_applies,
    answers_come_from_the_source,
    steps_are_pure,
    ignores_later_exits,
    treats_rows_independently,
    refuses_what_is_not_a_prediction,
)


def _answers(exits: int, rows: int, classes: int, *, seed: int = 0) -> Prediction:
    logits = 3 * torch.randn(exits, rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Latest()(logits)


def _masks(policy: Any, answers: Prediction) -> Iterator[Tensor]:
    plain = _plain(policy)
    state = plain.start(answers.log_probs.shape[1])
    for exit in range(len(answers.log_probs) - 1):
        state, mask = plain.stop(state, exit, answers.at(exit))
        yield mask


def _plain(policy: Any) -> Any:
    return policy.policy if isinstance(policy, FittedPolicy) else policy
