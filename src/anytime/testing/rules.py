"""The laws every rule keeps, as one call: `check_rule(my_rule)`.

A rule is anything with `start(exits)`, `step(state, logits)` and a call over all exits, as `anytime.Rule` describes. Each
law is a function below whose docstring says what must hold. A rule that was fitted for certain numbers of exits or for certain
classes is checked with those: `check_rule(my_rule, exits=(7,), classes=100)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Prediction
from anytime.errors import CheckError, InputError, NonFiniteError, OptionError, StateError

_SHAPES = ((1, 1, 1), (1, 4, 3), (2, 0, 5), (3, 7, 2), (4, 5, 10), (8, 3, 101))
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGE = 1e30


@dataclass(frozen=True)
class Sizes:
    """Which logits a rule takes: any numbers of exits and classes, unless it was fitted for some."""

    exits: tuple[int, ...] | None = None
    classes: int | None = None

    def random(self, exits: int, batch: int, classes: int, *, seed: int = 0) -> Tensor:
        """Random logits, of the numbers asked for or of those nearest to them that the rule takes."""
        exits = exits if self.exits is None else min(self.exits, key=lambda known: abs(known - exits))
        shape = (exits, batch, self.classes or classes)
        return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Law = Callable[[Any, Sizes], None]
ANY = Sizes()


def check_rule(rule: Any, *, exits: Sequence[int] | None = None, classes: int | None = None) -> None:
    """Run every law on a rule; raise `CheckError` at the first that is broken.

    Args:
        rule: The rule.
        exits: The numbers of exits that it takes; any where None. For others it must raise `OptionError`.
        classes: The number of classes that it takes; any where None. A rule that knows its classes may tell them apart.

    Example:
        >>> from anytime import Product
        >>> check_rule(Product())
        >>> check_rule(Product(weights=(0.5, 1.0)), exits=[2])
    """
    sizes = Sizes(None if exits is None else tuple(exits), classes)
    if sizes.exits == () or min(sizes.exits or (1,)) < 1 or (classes is not None and classes < 1):
        raise OptionError(
            f"exits are {exits!r}, classes {classes!r}", expected="numbers of at least 1", fix="leave out what any number fits"
        )
    for law in LAWS:
        try:
            law(rule, sizes)
        except CheckError:
            raise
        except Exception as error:
            raise _broken(law, rule, f"it raised {type(error).__name__}: {error}") from error


def gives_distributions(rule: Any, sizes: Sizes = ANY) -> None:
    """Predictions have the right shape, are never NaN, never negative, and sum to one."""
    for logits in _cases(sizes):
        _check_prediction(gives_distributions, rule, rule(logits), logits)


def survives_hostile_values(rule: Any, sizes: Sizes = ANY) -> None:
    """Huge, tiny, equal, zero and opposite logits give distributions too."""
    for value in (0.0, -0.0, 1e8, -1e8, 1e-40, 1e-45, -1e-45, _LARGE, -_LARGE):
        logits = torch.full_like(sizes.random(3, 4, 5), value)
        logits[:, 0, 0] = -value
        logits[len(logits) // 2, 1, -1] = 1.0
        logits[-1, 2] = -logits[-1, 2]
        _check_prediction(survives_hostile_values, rule, rule(logits), logits)


def steps_as_it_calls(rule: Any, sizes: Sizes = ANY) -> None:
    """Stepping exit by exit gives what the call over all exits gives, up to rounding."""
    for logits in _cases(sizes):
        whole = rule(logits)
        for exit, prediction in enumerate(_stepped(rule, logits)):
            _same(steps_as_it_calls, rule, prediction.log_probs, whole.log_probs[exit], f"log_probs at exit {exit + 1}")
            _equal(steps_as_it_calls, rule, prediction.fell_back, whole.fell_back[exit], f"fell_back at exit {exit + 1}")
            _equal(steps_as_it_calls, rule, prediction.labels, whole.labels[exit], f"labels at exit {exit + 1}")


def steps_are_pure(rule: Any, sizes: Sizes = ANY) -> None:
    """A step changes neither its state nor its input: taken twice it gives the same, and the past stays as it was."""
    logits = sizes.random(3, 4, 6)
    kept = logits.clone()
    state = rule.start(len(logits))
    for now in logits:
        _, first = rule.step(state, now)
        state, again = rule.step(state, now)
        _same(steps_are_pure, rule, first.log_probs, again.log_probs, "the same step taken twice")
    rule(logits)
    _equal(steps_are_pure, rule, logits, kept, "the input")


def looks_only_back(rule: Any, sizes: Sizes = ANY) -> None:
    """What is said at an exit does not depend on later exits."""
    logits, other = sizes.random(5, 6, 7), sizes.random(5, 6, 7, seed=1)
    for exit in range(len(logits)):
        mixed = torch.cat((logits[: exit + 1], other[exit + 1 :]))
        _same(looks_only_back, rule, rule(mixed).log_probs[exit], rule(logits).log_probs[exit], f"exit {exit + 1}")


def treats_rows_alone(rule: Any, sizes: Sizes = ANY) -> None:
    """A row's answer does not depend on the other rows of the batch, nor on their order."""
    logits = sizes.random(4, 9, 11)
    whole = rule(logits).log_probs
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    _close(treats_rows_alone, rule, rule(logits[:, order]).log_probs, whole[:, order], "rows in another order")
    _close(treats_rows_alone, rule, rule(logits[:, 3:5]).log_probs, whole[:, 3:5], "rows 3 and 4 alone")


def treats_classes_alike(rule: Any, sizes: Sizes = ANY) -> None:
    """Renaming the classes renames the answers and changes nothing else, unless the rule was fitted for these classes."""
    if sizes.classes is not None:
        return
    logits = sizes.random(4, 9, 11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    _close(
        treats_classes_alike, rule, rule(logits[..., order]).log_probs, rule(logits).log_probs[..., order], "renamed classes"
    )


def computes_in_full_precision(rule: Any, sizes: Sizes = ANY) -> None:
    """Half precision logits are computed on in float32, float64 ones in float64."""
    logits = sizes.random(3, 4, 5)
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype)
        _same(computes_in_full_precision, rule, rule(half).log_probs, rule(half.float()).log_probs, f"{dtype} against float32")
    if rule(logits.double()).log_probs.dtype != torch.float64:
        raise _broken(computes_in_full_precision, rule, "float64 logits gave less than float64 log-probabilities")


def refuses_what_is_not_finite(rule: Any, sizes: Sizes = ANY) -> None:
    """NaN and infinity raise `NonFiniteError` that names exit and row, in the call and in a step."""
    for value in (float("nan"), float("inf"), -float("inf")):
        logits = sizes.random(3, 4, 5)
        last = len(logits) - 1
        logits[last, 1, -1] = value
        for attempt in (lambda logits=logits: rule(logits), lambda logits=logits: list(_stepped(rule, logits))):
            error = _raised(refuses_what_is_not_finite, rule, attempt, NonFiniteError, f"{value} at the last exit")
            if (error.exit, error.row) != (last + 1, 1):
                raise _broken(
                    refuses_what_is_not_finite, rule, f"said exit {error.exit}, row {error.row}, not {last + 1} and 1"
                )


def refuses_what_does_not_fit(rule: Any, sizes: Sizes = ANY) -> None:
    """Wrong ranks, changing shapes, numbers of exits that do not fit and steps beyond the last raise typed errors."""

    def refused(attempt: Callable[[], Any], kind: type[Any], what: str) -> None:
        _raised(refuses_what_does_not_fit, rule, attempt, kind, what)

    logits = sizes.random(2, 4, 5)
    exits, rows, classes = logits.shape
    refused(lambda: rule(logits[0]), InputError, "logits of rank 2")
    refused(lambda: rule(logits.long()), InputError, "integer logits")
    state, _ = rule.step(rule.start(exits), logits[0])
    if exits > 1:
        refused(lambda: rule.step(state, torch.zeros(rows - 1, classes)), InputError, "another batch size")
        refused(lambda: rule.step(state, torch.zeros(rows, classes + 1)), InputError, "other classes")
    for now in logits[1:]:
        state, _ = rule.step(state, now)
    refused(lambda: rule.step(state, logits[-1]), StateError, "a step too many")
    if sizes.exits is not None:
        refused(lambda: rule.start(max(sizes.exits or ()) + 1), OptionError, "another number of exits")


LAWS: tuple[Law, ...] = (
    gives_distributions,
    survives_hostile_values,
    steps_as_it_calls,
    steps_are_pure,
    looks_only_back,
    treats_rows_alone,
    treats_classes_alike,
    computes_in_full_precision,
    refuses_what_is_not_finite,
    refuses_what_does_not_fit,
)


def _cases(sizes: Sizes) -> Iterator[Tensor]:
    for seed, shape in enumerate(_SHAPES):
        for dtype in _FLOATS:
            yield sizes.random(*shape, seed=seed).to(dtype)


def _stepped(rule: Any, logits: Tensor) -> Iterator[Prediction]:
    state = rule.start(len(logits))
    for now in logits:
        state, prediction = rule.step(state, now)
        yield prediction


def _check_prediction(law: Law, rule: Any, prediction: Any, logits: Tensor) -> None:
    log_probs, fell_back = prediction.log_probs, prediction.fell_back
    where = f"for {logits.dtype} logits of shape {tuple(logits.shape)}"
    if log_probs.shape != logits.shape or fell_back.shape != logits.shape[:2] or fell_back.dtype != torch.bool:
        raise _broken(law, rule, f"{where} log_probs are {tuple(log_probs.shape)}, fell_back {tuple(fell_back.shape)}")
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise _broken(law, rule, f"{where} log_probs are {log_probs.dtype}")
    if bool(log_probs.isnan().any()) or bool((log_probs > 1e-6).any()):
        raise _broken(law, rule, f"{where} log-probabilities are NaN or above zero")
    named = log_probs.gather(-1, prediction.labels[..., None])[..., 0]
    if not torch.equal(named, log_probs.amax(-1)):
        raise _broken(law, rule, f"{where} the label is not a most probable class")
    off = (log_probs.double().exp().sum(-1) - 1).abs()
    if off.numel() and float(off.max()) > 1e-4:
        raise _broken(law, rule, f"{where} probabilities sum to one only within {float(off.max()):.2g}")


def _equal(law: Law, rule: Any, given: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(given, wanted):
        raise _broken(law, rule, f"{what}: differs")


def _same(law: Law, rule: Any, given: Tensor, wanted: Tensor, what: str) -> None:
    """The same computation: bits may differ with the processor, its threads and the memory's alignment, no more."""
    try:
        torch.testing.assert_close(given, wanted)
    except AssertionError as error:
        raise _broken(law, rule, f"{what}: {error}") from error


def _close(law: Law, rule: Any, given: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.allclose(given.exp(), wanted.exp(), atol=1e-5, rtol=1e-4):
        raise _broken(law, rule, f"{what}: differs by {float((given.exp() - wanted.exp()).abs().max()):.2g}")


def _raised(law: Law, rule: Any, attempt: Callable[[], Any], kind: type[Any], what: str) -> Any:
    try:
        attempt()
    except kind as error:
        return error
    except Exception as error:
        raise _broken(law, rule, f"{what} raised {type(error).__name__}, not {kind.__name__}") from error
    raise _broken(law, rule, f"{what} was accepted")


def _broken(law: Law, rule: Any, how: str) -> CheckError:
    return CheckError(f"{rule!r} breaks the law '{law.__name__}': {how}", expected=str(law.__doc__), fix="mend the rule")
