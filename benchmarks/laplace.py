"""Likelihood and calibration of last-layer Laplace at every exit of an MSDNet, on real CIFAR-100 images.

    python benchmarks/laplace.py --root FOLDER      CIFAR-100 in FOLDER, weights of results/msdnet-cifar100-seed0

Fitted to training images, priors and temperatures chosen on images held out of training, measured on test images. Rows of the
table are ways to predict: the network as it is (map), temperature scaling, the probit approximation, and sampled logits; with
caching or the mixture weighted by cost on top where stated. `evidence` and `grid` are how the prior precision was chosen.
Features are kept in a file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import anytime
from anytime.artifacts import read_bundle, tensors_from_bytes
from anytime.calibrate import fit_laplace, fit_temperature
from anytime.data import ImageData, Split, load_cifar, normalise
from anytime.evaluation import evaluate
from anytime.models import MultiExit, create, load_weights, measure_cost
from anytime.models.features import collect_features, last_layers

Rows = tuple[list[Tensor], Tensor]
"""Features of each exit, and labels."""
MIXED = ("map", "temperature")
"""Also shown as the mixture weighted by cost."""
RUN = Path(__file__).parents[1] / "results" / "msdnet-cifar100-seed0"


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    model = network()
    sets = features(model, options)
    layers = last_layers(model, torch.zeros(1, 3, 32, 32))
    costs = measure_cost(model, torch.zeros(1, 3, 32, 32)).macs
    labels = sets["test"][1]
    plain = {name: _logits(layers, sets[name][0]) for name in ("val", "test")}
    shown = sorted({0, len(layers) // 2, len(layers) - 1})
    names = [f"{figure} {exit}" for figure in ("NLL", "ECE") for exit in (*(exit + 1 for exit in shown), "mean")]
    print(f"| prediction | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
    mixed = anytime.Mixture(anytime.combine.Exponential(), weights=costs)
    for name, logits in answers(sets, layers, plain, options.rows):
        rules = {"": anytime.Latest(), ", caching": anytime.Caching(), ", mixture": mixed}
        for kind in ("", ", caching", ", mixture") if name in MIXED else ("", ", caching"):
            figures = evaluate(logits, labels, rules={"it": rules[kind]}, probabilities=name != "map").rules["it"].to_json()
            cells = [number for figure in ("nll", "ece") for number in _shown(figures[figure], shown)]
            print(f"| {name}{kind} | {' | '.join(f'{number:.3f}' for number in cells)} |", flush=True)
    print(f"{len(labels)} test images, {len(sets['val'][1])} held-out images, {len(sets['train'][1])} training images")


def answers(
    sets: dict[str, Rows], layers: list[torch.nn.Linear], plain: dict[str, Tensor], rows: int | None
) -> Iterator[tuple[str, Tensor]]:
    """Names, and what stands in for the logits of the test images."""
    (fitted, labels), (tuning, wanted), (test, _) = (sets[name] for name in ("train", "val", "test"))
    tuned = {"tuning_features": tuning, "tuning_labels": wanted}
    yield "map", plain["test"]
    yield "temperature", fit_temperature(plain["val"], wanted).rule(plain["test"]).log_probs
    evidence = fit_laplace(fitted, labels, layers, rows=rows)
    _say("evidence", evidence.prior_precision)
    for method in ("probit", "sampled"):
        yield f"{method}, evidence", evidence.predict(test, method=method)
    for method in ("probit", "sampled"):
        grid = fit_laplace(fitted, labels, layers, rows=rows, prior_precision="grid", method=method, **tuned)
        _say(f"grid for {method}", grid.prior_precision)
        yield f"{method}, grid", grid.predict(test, method=method)


def network() -> MultiExit:
    weights: dict[str, Tensor] = {}
    for name, data in read_bundle(RUN).items():
        if name.startswith("weights"):
            weights |= {
                key: value.float() if value.is_floating_point() else value for key, value in tensors_from_bytes(data).items()
            }
    model = create("msdnet-cifar", classes=100)
    load_weights(model, weights)
    return model.eval()


def features(model: MultiExit, options: argparse.Namespace) -> dict[str, Rows]:
    """Of training, held-out and test images: from the file, or from the network."""
    counts = {"train": options.train, "val": options.val, "test": options.test}
    file = Path(options.features)
    if not file.exists():
        data = load_cifar("cifar100", options.root)
        train, val = Split.from_json((RUN / "split.json").read_text()).apply(data["train"])
        parts = {"train": train, "val": val, "test": data["test"]}
        tensors = {}
        for name, part in parts.items():
            began = time.perf_counter()
            found, labels = collect_features(model, _batches(part.take(torch.arange(counts[name]))))
            tensors |= {f"{name}.{exit}": now for exit, now in enumerate(found)} | {f"{name}.labels": labels}
            print(f"<!-- {name}: {time.perf_counter() - began:.0f} s -->", flush=True)
        save_file(tensors, file)
    stored = load_file(file)
    return {name: ([stored[f"{name}.{exit}"] for exit in range(7)], stored[f"{name}.labels"]) for name in counts}


@torch.no_grad()
def _logits(layers: list[torch.nn.Linear], features: list[Tensor]) -> Tensor:
    return torch.stack([layer(now) for layer, now in zip(layers, features, strict=True)])


def _batches(data: ImageData, size: int = 100) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(data), size):
        part = slice(start, start + size)
        yield normalise(data.images[part], data.mean, data.std), data.labels[part]


def _say(name: str, numbers: tuple[float, ...]) -> None:
    print(f"<!-- prior precision by {name}: {json.dumps([float(f'{number:.3g}') for number in numbers])} -->", flush=True)


def _shown(numbers: list[float], exits: list[int]) -> list[float]:
    return [*(numbers[exit] for exit in exits), sum(numbers) / len(numbers)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with CIFAR-100")
    parser.add_argument("--train", type=int, default=1000, help="training images to fit to")
    parser.add_argument("--val", type=int, default=1000, help="held-out images to choose on")
    parser.add_argument("--test", type=int, default=2000, help="test images to measure on")
    parser.add_argument("--rows", type=int, default=None, help="training images to stand for, if more")
    parser.add_argument("--features", default="laplace-features.safetensors", help="file that keeps the features")
    return parser.parse_args()


if __name__ == "__main__":
    main()
