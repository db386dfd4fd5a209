"""Bad input for training on your own data and for fitting a policy: typed errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anytime
from anytime.errors import AnytimeError, DivergedError, DtypeError, InputError, LabelError, OptionError, ShapeError
from anytime.models import MLP, MLPConfig, MultiExit
from anytime.train import StrongAugment, TrainConfig, distillation, joint_cross_entropy, product_likelihood

X, Y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
DIGITS = anytime.data.load_digits()["val"]
LOGITS = torch.zeros(2, 40, 3)


def model() -> MLP:
    return MLP(MLPConfig(classes=3, exits=2, width=4))


def normed() -> nn.Module:
    body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    return anytime.models.from_outputs([(body, nn.Linear(4, 3)), (nn.Identity(), nn.Linear(4, 3))], example=X)


def train(data: Any, **settings: Any) -> object:
    return anytime.fit(model(), data, **{"epochs": 1, "batch": 8, **settings})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], Y[0])])


class Uneven(MultiExit):
    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def exits(self, x: Any) -> Iterator[Tensor]:
        yield self.layer(x)
        yield self.layer(x)[:, :2]


MISTAKES: dict[str, tuple[Callable[[], object], type[AnytimeError], tuple[str, ...]]] = {
    "a module without exits": (lambda: anytime.fit(nn.Linear(2, 3), (X, Y)), OptionError, ("Linear", "attach_exits")),
    "a function as the model": (lambda: anytime.fit(lambda x: x, (X, Y)), OptionError, ("function", "torch module")),  # type: ignore[arg-type]
    "a frozen model": (lambda: anytime.fit(model().requires_grad_(False), (X, Y)), OptionError, ("requires a gradient",)),
    "exits of different sizes": (lambda: anytime.fit(Uneven(), (X, Y)), ShapeError, ("(40, 3), (40, 2)", "linear layer")),
    "inputs without labels": (lambda: train(X), InputError, ("shape (40, 2)", "DataLoader")),
    "batches without labels": (lambda: train([X]), LabelError, ("without labels", "(x, y)")),
    "too few labels for a dict": (lambda: train(({"x": X}, Y[:3])), LabelError, ("3", "40 rows")),
    "a dict without labels": (lambda: train([{"x": X}]), LabelError, ("a dict of x", "labels")),
    "pixels as bytes": (lambda: train((X.to(torch.uint8), Y)), DtypeError, ("torch.uint8", "/ 255")),
    "bytes to fit a policy on": (lambda: anytime.fit_stopping(model(), [(X.to(torch.uint8), Y)]), DtypeError, ("/ 255",)),
    "a loss in percent": (lambda: anytime.fit_stopping(model(), (X, Y), loss=1), OptionError, ("loss is 1", "loss=0.01")),
    "a generator": (lambda: train((X, Y) for _ in range(2)), InputError, ("only once", "list(data)")),
    "a path as data": (lambda: train("train.csv"), InputError, ("str", "DataLoader")),
    "no data": (lambda: train([]), InputError, ("empty",)),
    "no batch": (lambda: train(DataLoader([(X[0], 0)], 8, drop_last=True)), InputError, ("no batch", "batch size")),  # type: ignore[arg-type]
    "a stream without a length": (lambda: train(DataLoader(Stream(), 8)), OptionError, ("length", "steps_per_epoch=1000")),
    "a row too few": (lambda: train((X, Y[1:])), ShapeError, ("40", "39")),
    "a label too large": (lambda: train([(X, Y + 1)]), LabelError, ("from 1 to 3", "counted from 1")),
    "one-hot labels": (lambda: train([(X, nn.functional.one_hot(Y).float())]), DtypeError, ("argmax",)),
    "texts as inputs": (lambda: train([(["a", "b"], Y[:2])]), DtypeError, ("inputs of a batch", "list")),
    "an unknown setting": (lambda: train((X, Y), epoch=3), OptionError, ("epoch", "epochs")),
    "a number as the config": (lambda: anytime.fit(model(), (X, Y), 3), OptionError, ("3", "epochs=2")),  # type: ignore[arg-type]
    "no epochs": (lambda: train((X, Y), epochs=0), OptionError, ("epochs",)),
    "an unknown objective": (lambda: train((X, Y), objective="poe"), OptionError, ("poe", "product")),
    "a logger by name": (lambda: train((X, Y), loggers=["tensorboard"]), OptionError, ("tensorboard", "log_metrics")),
    "a logger without a list": (lambda: train((X, Y), loggers=object()), OptionError, ("a list",)),
    "resume without a folder": (lambda: train((X, Y), resume=True), OptionError, ("folder",)),
    "a GPU that is not there": (lambda: train((X, Y), device="cuda:99"), OptionError, ("cuda:99", "cpu")),
    "a graph of batches": (lambda: train((X, Y), graph=True, device="cuda"), OptionError, ("graph=False",)),
    "sample weights of a loader": (
        lambda: anytime.fit(model(), (X, Y), TrainConfig(objective="l2w", batch=8)),
        OptionError,
        ("l2w", "another objective"),
    ),
    "mixup of batches from a loader": (
        lambda: train((X, Y), strong_augment=StrongAugment(mixup=0.8)),
        OptionError,
        ("loader", "ImageData"),
    ),
    "averaged weights with a loader": (lambda: train((X, Y), average_decay=0.99), OptionError, ("0.99", "average_decay=0")),
    "a number as the augmentation": (
        lambda: train((X, Y), strong_augment=2),
        OptionError,
        ("operations, magnitude", "NAME: VALUE"),
    ),
    "mixup of an odd batch": (
        lambda: anytime.fit(model(), DIGITS, batch=33, strong_augment=StrongAugment(mixup=0.8)),
        OptionError,
        ("33", "batch=34"),
    ),
    "mixup with sample weights": (
        lambda: anytime.fit(model(), DIGITS, TrainConfig(objective="l2w", strong_augment=StrongAugment(cutmix=1.0))),
        OptionError,
        ("l2w", "neither mixup nor cutmix"),
    ),
    "smoothed labels with sample weights": (
        lambda: anytime.fit(model(), DIGITS, TrainConfig(objective="l2w", label_smoothing=0.1)),
        OptionError,
        ("l2w", "label_smoothing=0"),
    ),
    "all of a label smoothed": (lambda: train((X, Y), label_smoothing=1.0), OptionError, ("label_smoothing", "below 1")),
    "steps of an epoch of images": (
        lambda: anytime.fit(model(), DIGITS, steps_per_epoch=3),
        OptionError,
        ("digits", "remove steps_per_epoch"),
    ),
    "one row for a batch norm": (
        lambda: anytime.fit(normed(), DataLoader(TensorDataset(X[:9], Y[:9]), 8), epochs=1),
        ShapeError,
        ("one row", "drop_last=True"),
    ),
    "NaN in the inputs": (lambda: train((X * float("nan"), Y)), DivergedError, ("exit 1 is nan", "inputs for NaN")),
    "validation on bytes": (lambda: train((X, Y), val=(X.byte(), Y)), DtypeError, ("torch.uint8", "/ 255")),
    "a file as the folder": (
        lambda: train((X, Y), folder=__file__),
        OptionError,
        ("test_training_mistakes.py", "folder='run'"),
    ),
    "a class to fit a policy for": (lambda: anytime.fit_stopping(MLP, (X, Y)), OptionError, ("the class MLP", "model itself")),
    "a loss of logits without exits": (lambda: joint_cross_entropy(LOGITS[0], Y), ShapeError, ("rank 2", "logits[None]")),
    "a loss of dense logits": (lambda: joint_cross_entropy(LOGITS[..., None], Y), ShapeError, ("rank 4",)),
    "a loss of one-hot labels as integers": (
        lambda: joint_cross_entropy(LOGITS, nn.functional.one_hot(Y)),
        ShapeError,
        ("(40, 3)", "argmax"),
    ),
    "a loss of probabilities of other classes": (
        lambda: joint_cross_entropy(LOGITS, nn.functional.one_hot(Y, 4).float()),
        DtypeError,
        ("torch.float32", "argmax"),
    ),
    "a loss of fewer labels": (lambda: product_likelihood(LOGITS, Y[:3]), LabelError, ("3 labels", "40")),
    "a loss of a label too large": (lambda: product_likelihood(LOGITS, Y + 1), LabelError, ("from 1 to 3", "subtract 1")),
    "a loss with a weight too few": (
        lambda: joint_cross_entropy(LOGITS, Y, weights=(1,)),
        OptionError,
        ("1 weights", "2 exits"),
    ),
    "a teacher of other classes": (
        lambda: distillation(LOGITS, Y, LOGITS[-1][:, :2]),
        ShapeError,
        ("(40, 2)", "teacher=logits[-1]"),
    ),
    "a teacher as text": (lambda: distillation(LOGITS, Y, "last"), DtypeError, ("teacher",)),  # type: ignore[arg-type]
    "a teacher's weight of two": (lambda: distillation(LOGITS, Y, LOGITS[-1], weight=2), OptionError, ("weight is 2",)),
    "a temperature of zero": (lambda: distillation(LOGITS, Y, LOGITS[-1], temperature=0), OptionError, ("temperature is 0",)),
    "validation without labels": (lambda: train((X, Y), val=[X]), LabelError, ("without labels",)),
    "a policy without labels": (lambda: anytime.fit_stopping(model(), [X]), LabelError, ("labels", "(x, y)")),
    "a policy that may lose everything": (
        lambda: anytime.fit_stopping(model(), [(X, Y)], loss=1.5),
        OptionError,
        ("loss is 1.5", "loss=0.01"),
    ),
    "a policy as a calibration": (
        lambda: anytime.Runner(model(), calibration=anytime.fit_stopping(model(), (X, Y), loss=0.5)),
        OptionError,
        ("pass it as policy=",),
    ),
    "a policy for no rule": (lambda: anytime.fit_stopping(model(), [(X, Y)], rule="prodct"), OptionError, ("product",)),
    "an unknown guarantee": (lambda: anytime.fit_stopping(model(), [(X, Y)], method="hope"), OptionError, ("hope", "crc")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str) -> None:
    call, kind, words = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert all((error.got, error.expected, error.fix))
    for word in words:
        assert word in str(error), str(error)
