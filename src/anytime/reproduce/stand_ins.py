"""Small runs in place of missing ones: the packaged sample, and networks trained on handwritten digits.

With them every study runs everywhere, in seconds or minutes. Findings from stand-ins are never compared with the paper's
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anytime.data.digits import doubled, load_digits
from anytime.evaluation import LogitsFile
from anytime.models import DViT, DViTConfig, MSDNet, ResNet, ResNetConfig, measure_cost
from anytime.models.base import MultiExit
from anytime.reproduce.needs import Need
from anytime.reproduce.runs import Run
from anytime.reproduce.stand_in_texts import on_texts
from anytime.train.config import L2W, TrainConfig
from anytime.train.data.logits import ExitEvaluation
from anytime.train.digits import NETWORK
from anytime.train.loop import fit

_TEST_FRACTION = 0.6


@dataclass(frozen=True)
class Size:
    """Training images, epochs, number of seeds, and rows per test and validation set at most."""

    rows: int
    epochs: int
    seeds: int
    held_out: int


SMOKE = Size(rows=150, epochs=2, seeds=2, held_out=300)
SMALL = Size(rows=400, epochs=20, seeds=3, held_out=2000)


def from_sample(sample: LogitsFile) -> Run:
    """The packaged logits of an MSDNet on CIFAR-100 as a run: three fifths of the rows for test, the rest for validation."""
    logits, labels = sample.logits[:].float(), sample.labels
    assert labels is not None
    cut = int(_TEST_FRACTION * logits.shape[1])
    parts = {"test": (logits[:, :cut], labels[:cut].long()), "val": (logits[:, cut:], labels[cut:].long())}
    run = Run("packaged-sample", "msdnet", "cifar100", 0, model="msdnet-cifar", stored=parts)
    network = run._network()
    return replace(run, costs=tuple(float(cost) for cost in measure_cost(network, torch.zeros(1, 3, 32, 32)).macs))


def on_digits(size: Size) -> Callable[[Need], Sequence[Run]]:
    """A function that trains runs on handwritten digits or synthetic texts for a need, each network once."""
    made: dict[str, tuple[Run, ...]] = {}

    def make(need: Need) -> Sequence[Run]:
        if texts := on_texts(need, rows=size.rows, epochs=size.epochs):
            return texts
        if need.network not in _NETWORKS:
            raise need.missing("the folder of runs (there is no stand-in)", 0)
        if need.network not in made:
            made[need.network] = tuple(_train(need.network, seed, size) for seed in range(size.seeds))
        return made[need.network]

    return make


def _train(network: str, seed: int, size: Size) -> Run:
    """One network on digits, with the logits of its validation and test rows."""
    sets = load_digits(channels=3)  # the same rows for every seed, so that seeds can be averaged
    train = doubled(sets["train"].take(torch.arange(size.rows), split="train"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _NETWORKS[network]()
    recipe = TrainConfig(epochs=size.epochs, batch=32, lr=0.1, schedule="cosine", augment=False, seed=seed)
    fit(model, train, replace(recipe, **_RECIPES.get(network, {})))
    parts = {}
    for name in ("test", "val"):
        rows = torch.arange(min(len(sets[name]), size.held_out))
        data = doubled(sets[name].take(rows, split=name))
        parts[name] = ExitEvaluation(model, data).logits(), data.labels
    costs = measure_cost(model, torch.zeros(1, 3, 16, 16)).macs
    name = f"{network}-digits-seed{seed} (stand-in)"
    return Run(name, network, "digits", seed, stored=parts, costs=tuple(float(cost) for cost in costs))


def _cascade() -> MultiExit:
    """A small ResNet with ZTW's heads, trained in one phase: at this size there is no network to freeze first."""
    config = ResNetConfig(classes=10, depth=8, width=8, image_size=16, at=("blocks.0", "blocks.1"), heads="cascade")
    return ResNet(config)


def _transformers() -> MultiExit:
    """A DViT with two blocks in each of its three transformers."""
    cuts = (((7, 4, 2), (3, 2, 1)), ((5, 3, 1), (3, 2, 1)), ((3, 2, 1), (3, 2, 1)))
    config = DViTConfig(
        classes=10, image_size=16, unfolds=cuts, width=32, depth=2, performer_width=16, random_features=8, reuse_hidden=16
    )
    return DViT(config)


_NETWORKS: dict[str, Callable[[], MultiExit]] = {
    "msdnet": lambda: MSDNet(NETWORK),
    "msdnet-finetuned": lambda: MSDNet(NETWORK),
    "l2w": lambda: MSDNet(replace(NETWORK, exits=3, base=1)),  # its look-ahead costs several steps
    "dvit": _transformers,
    "ztw": _cascade,
}
_RECIPES: dict[str, dict[str, Any]] = {
    "msdnet-finetuned": {"objective": "joint-then-product"},
    "l2w": {"objective": "l2w", "l2w": L2W(meta_every=4)},
    "dvit": {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.03},
}
