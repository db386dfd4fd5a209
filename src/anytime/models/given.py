"""Inputs as a flat tuple of tensors, and what is wrong with those that a model refuses.

Nobody can know which inputs a model takes. So when it fails, inputs that differ in one thing (a batch dimension, the type of
numbers) are tried, and if these work, the error says so in place of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.checks import Inputs, check_inputs, map_inputs, tensors_of
from anytime.errors import AnytimeError, DtypeError, InputError, OptionError, ShapeError
from anytime.models.attach.exits import AttachedExits
from anytime.models.base import Carry
from anytime.models.outputs import OutputsModel

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def names_of(model: object) -> tuple[str, ...]:
    """The names of a model's inputs, in the order in which its first stage takes them; empty if it has none."""
    return tuple(getattr(model, "input_names", ()))


def flat_inputs(x: Any, names: Sequence[str] = ()) -> Carry:
    """Inputs of any structure as the carry of the first stage; at least one row."""
    return tensors_of(check_inputs(x), names)


def places(count: int, names: Sequence[str] = ()) -> list[str]:
    """What errors call each of the tensors.

    >>> places(1), places(2, ("ids", "mask"))
    (['x'], ["x['ids']", "x['mask']"])
    """
    if count == 1 and len(names) < 2:
        return ["x"]
    return [f"x[{key!r}]" for key in (names or range(count))]


def structured(given: Carry, like: Inputs) -> Inputs:
    """A flat tuple of tensors in the structure of other inputs.

    >>> structured((torch.zeros(1), torch.ones(1)), {"ids": torch.zeros(2), "mask": torch.zeros(2)})
    {'ids': tensor([0.]), 'mask': tensor([1.])}
    """
    tensors = iter(given)
    return map_inputs(lambda _: next(tensors), like)


def run_explained(run: Callable[[Inputs], list[Tensor]], x: Inputs) -> list[Tensor]:
    """The logits of each exit; the error for inputs that the model refuses says what is wrong, where that can be found."""
    try:
        return run(x)
    except Exception as error:
        names = tuple(map(str, x)) if isinstance(x, Mapping) else ()
        explain(tensors_of(x), names, lambda given: run(structured(given, x)), error)
        raise


def explain(given: Carry, names: Sequence[str], run: Callable[[Carry], object], error: Exception) -> None:
    """Raise an error that names what is wrong with inputs that a first stage refused; return if that cannot be found.

    Args:
        given: The inputs.
        names: Their names, if any.
        run: Runs the first stage; raises an error unless it returns logits.
        error: What it raised. Typed errors of the model itself are kept, unless they are about shapes.
    """
    if isinstance(error, AnytimeError) and not isinstance(error, ShapeError):
        return
    called = places(len(given), names)
    for other, found in _alternatives(given, called):
        try:
            with torch.inference_mode():
                run(other)
        except Exception:  # the next one may work
            continue
        raise found from error
    if isinstance(error, IndexError) or _shorter_works(given, run):
        refuse_tokens(given, called, error)


def _shorter_works(given: Carry, run: Callable[[Carry], object]) -> bool:
    """Whether the first half of each row of tokens would be taken: then the rows are too long."""
    tokens = [x for x in given if x.dtype in _INTEGERS and x.ndim > 1 and x.shape[1] > 1]
    if not tokens:
        return False
    length, half = tokens[0].shape[1], max(1, tokens[0].shape[1] // 2)
    shorter = tuple(x[:, :half] if x.ndim > 1 and x.shape[1] == length else x for x in given)
    try:
        with torch.inference_mode():
            run(shorter)
    except Exception:
        return len(tokens[0][0]) > 2 and _shorter_works(shorter, run)
    return True


def refuse_tokens(given: Sequence[Any], called: Sequence[str], error: Exception) -> None:
    """Raise an error that says which integers were given, if any were: tensors or arrays."""
    whole = [place for place, x in enumerate(given) if x.dtype in _INTEGERS or getattr(x.dtype, "kind", "") in ("i", "u")]
    if whole:
        ranges = [f"{called[place]} of shape {tuple(given[place].shape)}" for place in whole]
        first = given[whole[0]]
        raise InputError(
            f"{' and '.join(ranges)}, with numbers from {int(first.min())} to {int(first.max())}",
            expected="token ids of the model's vocabulary, in rows of at most its maximum length",
            fix="encode texts with the model's own tokenizer and maximum length",
        ) from error


def wrong_type(x: Tensor, called: str, wanted: torch.dtype) -> DtypeError:
    """The error for inputs of another type than the model takes."""
    got = f"{called} is {x.dtype}"
    if x.is_floating_point() and not wanted.is_floating_point:
        return DtypeError(
            got, expected="integers, such as token ids", fix="pass the tokenizer's integers, or convert: x.long()"
        )
    if wanted.is_floating_point and not x.is_floating_point():
        return DtypeError(
            got,
            expected=f"floating-point numbers, such as {wanted}",
            fix="convert it; pixels need the scale of the training as well, e.g. x.float() / 255, then mean and std",
        )
    return DtypeError(got, expected=str(wanted), fix=f"convert it: x.to({wanted})")


def not_staged(model: object, before: str = "", *, fix: str = "") -> OptionError:
    """The error for a model that cannot be run stage by stage, where that is needed."""
    how = "define stage(exit, carry) in the model's class"
    if isinstance(model, OutputsModel):
        how = "pass the stages to from_outputs: a list of (body, head)"
    elif isinstance(model, AttachedExits):
        how = "attach the exits with method='trace' or 'replay', which report the obstacle"
    return OptionError(
        f"{before}{type(model).__name__} cannot be run stage by stage",
        expected="a model with stage(exit, carry), see anytime.models.is_staged",
        fix=fix + how,
    )


def check_number(given: Sequence[Any], wanted: int) -> None:
    """Refuse another number of tensors than the model takes."""
    if len(given) != wanted:
        raise InputError(
            f"{len(given)} tensor{'s' * (len(given) > 1)} of inputs",
            expected=f"{wanted}, as in the example that the engine was made with",
            fix="pass the same structure as the example: a tensor, or a tuple or dict of tensors",
        )


def check_like(given: Carry, example: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse inputs of another kind of numbers, or with another number of dimensions, than an example."""
    check_number(given, len(example))
    for x, like, called in zip(given, example, places(len(given), names), strict=True):
        if x.is_floating_point() != like.is_floating_point():
            raise wrong_type(x, called, like.dtype)
        if x.ndim != like.ndim:
            raise no_batch(x, called)


def fits(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether a shape matches; a name stands for any size.

    >>> fits((3, 7), ["batch", "length"]), fits((3, 7), ["batch", 8])
    (True, False)
    """
    return len(shape) == len(wanted) and all(
        one == size or not isinstance(one, int) or not isinstance(size, int) for one, size in zip(wanted, shape, strict=True)
    )


def no_batch(x: Tensor, called: str) -> ShapeError:
    """The error for a single input in place of a batch."""
    return ShapeError(
        f"{called} has shape {tuple(x.shape)}",
        expected="inputs with the batch first",
        fix="add a batch dimension: x[None] for a single input",
    )


def _alternatives(given: Carry, called: Sequence[str]) -> Iterator[tuple[Carry, AnytimeError]]:
    """Inputs that the model may have meant, each with the error that says so."""
    batched = tuple(x[None] for x in given)
    yield batched, no_batch(given[0], called[0])
    for kinds, wanted in (((torch.uint8,), torch.float32), (_INTEGERS, torch.float32), (_FLOATS, torch.int64)):
        wrong = [place for place, x in enumerate(given) if x.dtype in kinds]
        if wrong:
            error = wrong_type(given[wrong[0]], called[wrong[0]], wanted)
            for tensors in (given, batched):
                yield tuple(x.to(wanted) if x.dtype in kinds else x for x in tensors), error
