"""Mistakes with inputs of any structure, runners in other processes and exports: typed errors with a fix."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime import Runner
from anytime.errors import AnytimeError, DtypeError, InputError, OptionError, ShapeError, StateError
from anytime.models import MLP, Carry, MLPConfig, MultiExit
from anytime.policy import Confidence
from anytime.policy.compact import run_batch
from anytime.run import profile_model
from anytime.run.engines import make_engine
from anytime.run.export import export

IDS, MASK = torch.randint(0, 9, (3, 5)), torch.ones(3, 5)


class Pair(MultiExit):
    """Takes ids and a mask."""

    num_exits = 2
    input_names = ("ids", "mask")

    def __init__(self) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, 5) for _ in range(2))

    def carry_size(self, exit: int) -> int:
        return 2

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        self._check_carry(exit, carry)
        x = (self.words(carry[0]) * carry[1][..., None]).mean(1)
        return (carry if exit == 0 else ()), self.heads[exit](x)


@cache
def pair() -> Runner:
    return Runner(Pair().eval(), "latest")


@cache
def points() -> Runner:
    return Runner(MLP(MLPConfig(classes=5)).eval(), "latest")


def exported(example: Any, names: tuple[str, ...] = ("ids", "mask"), **options: Any) -> Path:
    model = Pair().eval()
    model.input_names = names
    return export(model, Path(tempfile.mkdtemp()) / "stages", rule="latest", example=example, **options)


def with_engine_object() -> bytes:
    model = MLP(MLPConfig(classes=5)).eval()
    with Runner(model, "latest", make_engine(model, "eager")) as runner:
        return pickle.dumps(runner)


CALLS: dict[str, tuple[Callable[[], object], type[AnytimeError], str]] = {
    "one tensor for two": (lambda: pair().predict(IDS), InputError, "ids, mask"),
    "three tensors for two": (lambda: pair().predict((IDS, MASK, MASK)), InputError, "3 tensors"),
    "a dict of other names": (lambda: pair().predict({"input_ids": IDS, "mask": MASK}), InputError, "input_ids, mask"),
    "a missing tensor": (lambda: pair().predict({"ids": IDS}), InputError, "the names ids, mask"),
    "a text in a dict": (lambda: pair().predict({"ids": "who", "mask": MASK}), DtypeError, "x['ids'] is a str"),
    "lists of numbers in a dict": (lambda: pair().predict({"ids": [[1]], "mask": MASK}), DtypeError, "x['ids']"),
    "an empty dict": (lambda: pair().predict({}), InputError, "x is empty"),
    "no inputs at all": (lambda: pair().predict(()), InputError, "x is empty"),
    "different numbers of rows": (lambda: pair().predict((IDS, MASK[:2])), ShapeError, "x[0] 3, x[1] 2"),
    "no rows": (lambda: pair().predict((IDS[:0], MASK[:0])), ShapeError, "x[0] has shape (0, 5)"),
    "token ids as floats": (lambda: pair().predict((IDS.float(), MASK)), DtypeError, "x.long()"),
    "unknown token ids": (lambda: pair().predict((IDS + 9, MASK)), InputError, "vocabulary"),
    "pixels to a float model": (lambda: points().predict(torch.zeros(1, 2, dtype=torch.uint8)), DtypeError, "x.float() / 255"),
    "no batch dimension": (lambda: points().predict(torch.zeros(2)), ShapeError, "x[None]"),
    "no batch dimension, streamed": (lambda: next(points().stream(torch.zeros(2))), ShapeError, "x[None]"),
    "an example without a batch": (
        lambda: make_engine(MLP(MLPConfig(classes=5)), "folded", example=torch.zeros(2)),
        ShapeError,
        "x[None]",
    ),
    "progress of an export as a flag": (lambda: exported((IDS, MASK), progress=True), OptionError, "progress=print"),
    "an export without a batch": (lambda: exported((IDS[0], MASK[0])), ShapeError, "x[None]"),
    "one tensor in an example for two": (lambda: make_engine(Pair(), "folded", example=IDS), InputError, "ids, mask"),
    "one tensor in a profile for two": (lambda: profile_model(pair().engine, IDS, repeats=1), InputError, "ids, mask"),
    "one tensor in a batch for two": (
        lambda: run_batch(Pair().eval(), IDS, pair().rule, Confidence(0.5)),  # type: ignore[arg-type]
        InputError,
        "ids, mask",
    ),
    "one tensor in an export for two": (lambda: exported(IDS), InputError, "ids, mask"),
    "an input with a name of the stages": (lambda: exported((IDS, MASK), ("probs", "mask")), OptionError, "'probs'"),
    "an input with a name of two words": (lambda: exported((IDS, MASK), ("the ids", "mask")), OptionError, "'the ids'"),
    "a runner with an engine object in another process": (with_engine_object, StateError, "engine='auto'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_says_what_was_passed_and_how_to_fix_it(name: str, explained: Any) -> None:
    explained(*CALLS[name])


@pytest.fixture(autouse=True, scope="module")
def _close() -> Any:
    yield
    pair().close()
    points().close()
