"""Mistakes with models that return lists, with collecting logits and with metrics in a loop: each is explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytime
from anytime.errors import (
    AnytimeError,
    DtypeError,
    FileError,
    InputError,
    LabelError,
    NonFiniteError,
    OptionError,
    ShapeError,
)
from anytime.metrics import Metrics
from anytime.models import MLP, MLPConfig, from_outputs
from anytime.train import joint_cross_entropy

X, Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5
LOGITS = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(1))
MODEL = MLP(MLPConfig(classes=5, exits=3)).eval()


def returns(output: Any, **options: Any) -> Callable[[], object]:
    return lambda: from_outputs(lambda x: output, example=X, **options)


def collected(batches: Any, model: Any = MODEL, **options: Any) -> Callable[[], object]:
    return lambda: anytime.collect_logits(model, batches, **options)


def stacks(x: torch.Tensor) -> torch.Tensor:
    """A function of one tensor."""
    return LOGITS[:, : len(x)]


def metrics_of(*batches: tuple[Any, Any]) -> Callable[[], object]:
    def call() -> object:
        metrics = Metrics()
        for logits, labels in batches:
            metrics.update(logits, labels)
        return metrics.compute()

    return call


LIST = list(LOGITS)
CALLS: dict[str, tuple[Callable[[], object], type[AnytimeError], str]] = {
    "a model that stopped early by itself": (returns(LIST[:1]), OptionError, "a threshold that is never reached"),
    "logits and features": (returns((LIST, X)), ShapeError, "select=lambda output: output[0]"),
    "the last exit and a list of those before": (returns((LIST[-1], LIST[:-1])), ShapeError, "[*output[1], output[0]]"),
    "a key per exit": (returns({"exit1": LIST[0]}), OptionError, "select=lambda output: [output['exit1'], ...]"),
    "the loss of a dict": (lambda: joint_cross_entropy({"logits": LIST}, Y), DtypeError, "output['logits']"),  # type: ignore[arg-type]
    "the loss of a generator": (lambda: joint_cross_entropy(iter(LIST), Y), DtypeError, "pass list(model(x))"),  # type: ignore[arg-type]
    "the loss of logits and features": (lambda: joint_cross_entropy([LIST, X], Y), DtypeError, "output[0]"),  # type: ignore[list-item]
    "a batch with row numbers": (collected([(X, torch.arange(6), Y)], stacks), InputError, "too many positional arguments"),
    "a model with exits as a source": (lambda: from_outputs(MODEL, example=X), OptionError, "use it as it is"),
    "a network for a runner": (lambda: anytime.Runner(nn.Linear(2, 5)), OptionError, "from_outputs"),
    "pixels as bytes": (collected([(X.to(torch.uint8), Y)]), DtypeError, "/ 255"),
    "logits that are still in a file": (
        lambda: anytime.certify(anytime.samples.cifar100_msdnet().logits, Y, "product"),
        DtypeError,
        "read it into memory: logits[:]",
    ),
    "neither exits nor an example": (lambda: from_outputs(nn.Linear(2, 5)), OptionError, "example=x"),
    "a model as a name": (lambda: from_outputs(7, exits=3), OptionError, "a module or function"),
    "no exits": (lambda: from_outputs(nn.Linear(2, 5), exits=0), OptionError, "number of logits"),
    "another number of exits": (returns(LIST, exits=4), OptionError, "exits=3"),
    "a model with one output": (returns(LOGITS[0]), ShapeError, "attach_exits"),
    "the batch first": (returns(LOGITS.transpose(0, 1)), ShapeError, "exits_dim=1"),
    "as many exits as inputs": (returns(LOGITS[:1].expand(6, 6, 5)), ShapeError, "exits_dim"),
    "a wrong dimension of the exits": (returns(LOGITS, exits_dim=2), OptionError, "None, 0, 1"),
    "a dict without logits": (returns({"out": LIST, "loss": 1}), OptionError, "out, loss"),
    "a key that is not there": (returns(LIST, key="exits"), OptionError, "without 'exits'"),
    "a nested result": (returns((LIST, X)), ShapeError, "select"),
    "a select that is not a function": (returns(LIST, select=0), OptionError, "lambda"),
    "select and key": (returns(LIST, select=list, key="logits"), OptionError, "inside of select"),
    "an output of nothing": (returns(None), ShapeError, "NoneType"),
    "exits of another batch": (returns([LOGITS[0], LOGITS[1][:3]]), ShapeError, "exit 2"),
    "a model whose exits change": (
        lambda: from_outputs(lambda x: LIST[: 3 if len(x) == 6 else 2], example=X)(X[:2]),
        ShapeError,
        "2 inputs",
    ),
    "a generator that ends early": (
        lambda: from_outputs(lambda x: (each for each in LIST), exits=4)(X),
        ShapeError,
        "returned 3 exits",
    ),
    "an empty list of stages": (lambda: from_outputs([]), OptionError, "at least one"),
    "functions as stages": (lambda: from_outputs([lambda x: x]), OptionError, "torch.nn.Module"),
    "stages and a key": (lambda: from_outputs([nn.Linear(2, 5)], key="logits"), OptionError, "omit them"),
    "a stage without features": (lambda: from_outputs([nn.Linear(2, 5)] * 2)(X), ShapeError, "(body, head)"),
    "a head that does not flatten": (
        lambda: from_outputs([(nn.Identity(), nn.Unflatten(1, (1, 2)))])(X),
        ShapeError,
        "(batch, classes)",
    ),
    "features without a batch": (
        lambda: from_outputs([(nn.Flatten(0), nn.Unflatten(0, (6, 2)))] * 2, example=X),
        ShapeError,
        "batch first",
    ),
    "a list of exits of different classes": (lambda: joint_cross_entropy([LOGITS[0], LOGITS[1][:, :3]], Y), ShapeError, "exit"),
    "an empty list of exits": (lambda: joint_cross_entropy([], Y), ShapeError, "empty list"),
    "a tensor as a loader": (collected(X), InputError, "TensorDataset(x, y)"),
    "a file as a loader": (collected("images/"), InputError, "iterable"),
    "an empty loader": (collected([]), InputError, "empty"),
    "a batch of three": (collected([(X, Y, Y)]), ShapeError, "the last one is the labels"),
    "a batch with texts": (collected([{"x": X, "text": ["a"] * 6, "labels": Y}]), DtypeError, "with_format"),
    "two kinds of labels": (collected([{"x": X, "label": Y, "labels": Y}]), InputError, "remove_columns"),
    "labels of some batches": (collected([(X, Y), (X,)]), LabelError, "every batch"),
    "labels of another data set": (collected([(X, Y + 9)]), LabelError, "class list"),
    "one-hot labels": (collected([(X, torch.eye(5)[Y])]), DtypeError, "argmax"),
    "a model that drops rows": (collected([(X, Y)], lambda x: [LOGITS[0][:4]] * 2), ShapeError, "6 inputs"),
    "classes that change": (collected([X[:3], X], lambda x: [x.T @ x if len(x) == 3 else x] * 2), ShapeError, "inputs"),
    "a model that is not callable": (collected([X], model="msdnet"), OptionError, "from_outputs"),
    "logits with NaN": (collected([X], lambda x: [x / 0] * 2), NonFiniteError, "exit 1, row 0"),
    "a pickle to write": (collected([X], out="logits.pt"), OptionError, "npz"),
    "a folder to write": (collected([X], out=Path(__file__).parent / ".npz" / "a.txt"), OptionError, "ending"),
    "a place that cannot be a folder": (collected([X], out=Path(__file__) / "logits.npz"), FileError, "a file"),
    "resume as a text": (collected([X], resume="no"), OptionError, "True or False"),
    "metrics of nothing": (lambda: Metrics().compute(), OptionError, "update(logits, labels)"),
    "metrics of one exit": (metrics_of((LOGITS[:1], Y)), ShapeError, "one exit"),
    "metrics of another model": (metrics_of((LOGITS, Y), (LOGITS[:2], Y)), ShapeError, "reset()"),
    "metrics with and without labels": (metrics_of((LOGITS, Y), (LOGITS, None)), LabelError, "every batch"),
    "metrics of too few labels": (metrics_of((LOGITS, Y[:-1])), LabelError, "5 labels"),
    "metrics of integers": (metrics_of((LOGITS.long(), Y)), DtypeError, "int64"),
    "metrics of an unknown rule": (lambda: Metrics("prodct"), OptionError, "did you mean"),
    "metrics with odd costs": (lambda: Metrics(costs=[3, 2, 1]).update(LOGITS, Y), OptionError, "cumsum"),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_with_logits_is_explained(mistake: str, explained: Any) -> None:
    explained(*CALLS[mistake])
