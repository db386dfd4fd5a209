"""Numbers of docs/reproduction.md behind which there is a fit or a training, recomputed: see test_page_main_text.py."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.calibrate.tuning.family import PENALTIES
from anytime.data import load_cifar, normalise
from anytime.data.toys import make_simple_1d, make_spiral
from anytime.models import MLP
from anytime.models.features import collect_features, last_layers
from anytime.reproduce.runs import read_run
from anytime.reproduce.studies import ensembles
from anytime.reproduce.studies.text import FITTED, text_rules

from . import plain, plain_fits
from .plain import Answers, Array
from .stored import RESULTS, RULES, cells_of, check, claim, rows, section, seeds, table


def answers_of(probs: Array) -> Answers:
    return Answers(probs, probs.argmax(-1), np.zeros(probs.shape[:2], bool))


def test_geometric_ensemble_of_zero_time_waste() -> None:
    (name,) = seeds("ztw-cifar100")
    (held, known), (logits, labels) = rows(name, "val"), rows(name)
    exits = len(held)
    start = 0.01 * torch.randn(exits, exits, generator=torch.Generator().manual_seed(0))
    v = plain_fits.geometric(held, known, start.double().numpy())
    powers = np.tril(np.exp(v)) / np.arange(1, exits + 1)[:, None]
    total = (powers @ plain_fits.log_softmax(logits).reshape(exits, -1)).reshape(logits.shape)
    ours = plain.measure(answers_of(plain.softmax(total)), labels)
    right, drops = 100 * ours["accuracy"], ours["label_drop_percent"]
    numbers = right.mean(), right[-1], drops[2], drops[-1], ours["hindsight_improvability_percent"][-1], ours["ece"].mean()
    check(" ".join(table("zero-time-waste")["geometric ensemble"]), *numbers)
    every = [plain.measure(RULES[rule](logits), labels)["label_drop_percent"][2] for rule in RULES]
    check(claim("zero-time-waste", "fewer drops of every size under the product than under ZTW's"), *every, drops[2], 0.1)


FRONTIER = {"CIFAR-10": "msdnet-cifar10", "CIFAR-100": "msdnet-cifar100", "Tiny-ImageNet": "msdnet-tiny-imagenet"}
FRONTIER |= {
    title: f"minilm-{title.replace('-', '').replace(' ', '').lower()}"
    for title in ("IMDB", "SST-2", "AG News", "TREC", "Banking77", "CLINC150")
}


def at_temperatures(name: str, rule: str) -> dict[str, Array]:
    """The metrics of a rule that is calibrated by one temperature per exit; caching is of calibrated exits."""
    (held, known), (logits, labels) = rows(name, "val"), rows(name)
    if rule == "product":
        with np.errstate(divide="ignore"):
            held, logits = (np.log(plain.product(values).probs) for values in (held, logits))
    by = np.array([plain_fits.temperature(each, known) for each in held])[:, None, None]
    return plain.measure((RULES["caching"] if rule == "caching" else plain.latest)(logits / by), labels)


@pytest.mark.parametrize("title", FRONTIER)
def test_rules_of_the_paper_on_the_frontier(title: str) -> None:
    """Without the fitted products."""
    checked = 0
    for found, rule, *cells in cells_of("frontier"):
        kind = rule.removesuffix(" at temperatures")
        if found == title and kind in RULES:
            names = seeds(FRONTIER[title])
            every = [
                at_temperatures(name, kind) if kind != rule else plain.measure(RULES[kind](rows(name)[0]), rows(name)[1])
                for name in names
            ]
            ours = {metric: np.mean([each[metric] for each in every], 0) for metric in every[0]}
            drops = ours["label_drop_percent"]
            numbers = 100 * ours["accuracy"].mean(), drops[1], drops[2], ours["ece"].mean(), ours["nll"].mean()
            check(" ".join(cells[:4]), *numbers, slack=0.03)
            checked += 1
    assert checked == 6


def networks(members: list[MLP]) -> list[Array]:
    """The parameters of the layers up to the last head, stacked over members."""
    layers = [[*(layer[0] for layer in member.layers), member.heads[-1]] for member in members]
    pairs = [(part.weight, part.bias) for part in layers[0]]
    return [
        np.stack([getattr(every[at], name).detach().numpy() for every in layers]).astype(np.float64)
        for at in range(len(pairs))
        for name in ("weight", "bias")
    ]


@pytest.mark.long
def test_spiral() -> None:
    train, test = make_spiral(1000, seed=0), make_spiral(2000, seed=1)
    members = networks([ensembles.spiral_member(train, seed, 0) for seed in range(5)])
    inputs = train.inputs.double().numpy()[None]
    plain_fits.train(members, inputs, plain_fits.cross_entropy(train.targets.numpy()), steps=1000, rate=0.01, decays=False)
    axis = np.linspace(-1.3, 1.3, 48)
    plane = np.stack(np.meshgrid(axis, -axis), -1).reshape(1, -1, 2)
    on_plane, on_test = (plain_fits.perceptron(members, x)[-1] for x in (plane, test.inputs.double().numpy()[None]))
    found = plain.product(on_plane, weights=np.ones(5))
    left = np.where(found.collapsed, 0, (found.probs > 0).sum(-1)).mean(1)
    shown = re.search(
        r"mean classes on the plane ([\d., ]+)\. Our.*none is left \(([\d.]+) % .*each member: ([\d., ]+) %", section("spiral")
    )
    assert shown
    right = plain.product(on_test, weights=np.ones(5)).labels == test.targets.numpy()
    check(" ".join(shown.groups()), left, 100 * found.collapsed[-1].mean(), 100 * right.mean(1))


def intersected(lower: Array, upper: Array) -> tuple[Array, Array, Array]:
    """Running intersections over the first axis, and where they are empty."""
    low, high = np.maximum.accumulate(lower, 0), np.minimum.accumulate(upper, 0)
    return low, high, low > high


@pytest.mark.long
def test_regression() -> None:
    train, test = make_simple_1d()
    members = networks(ensembles.interval_members(train, 25, 0))  # type: ignore[arg-type]
    x, y = (part.double().numpy() for part in (train.inputs, train.targets))
    plain_fits.train(members, x[None], plain_fits.interval_score(y), steps=1000, rate=0.005, decays=True)
    grid = np.linspace(x.min() - 1, x.max() + 1, 193)
    beyond = (grid < x.min()) | (grid > x.max())

    def ends_at(points: Array) -> Array:  # (lower and upper, members, ensembles, points)
        found = np.stack(plain_fits.ends(plain_fits.perceptron(members, points[None])[-1]))
        return found.reshape(2, 5, 5, -1).swapaxes(1, 2)

    on_grid, on_test = ends_at(grid[:, None]), ends_at(test.inputs.double().numpy())
    targets, cells = test.targets.double().numpy(), table("regression")
    covered, gone = {}, {}
    for factor in (0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0):
        wide = [(each.mean(0) + factor * (each - each.mean(0))) for each in (on_test, on_grid)]
        low, high, empty = intersected(*wide[0])
        covered[factor] = 100 * ((low <= targets) & (targets <= high) & ~empty).mean((1, 2))
        gone[factor] = 100 * intersected(*wide[1])[2][-1][:, beyond].mean(1)
        check(" ".join(cells[f"{factor:g}"]), covered[factor][[0, -1]], gone[factor].mean())
    low, high, empty = intersected(*on_grid)
    widths = np.where(empty, 0, high - low).mean((1, 2))
    what = "the last members have smaller effects (the last at most half that of the second) (mean width, 0 where empty, "
    check(claim("regression", what), widths)
    check(claim("regression", "the intervals cover the data well, after every member (90 % or more)"), covered[1.0])
    what = "there is no support beyond the data (empty on 99 % or more)"
    check(claim("regression", what), gone[1.0])


@pytest.mark.long
def test_last_layer_laplace(shared: Path) -> None:
    """The network and its images are the library's; the posterior and its predictions are not."""
    run = read_run(RESULTS / "msdnet-cifar100-seed0")
    model, data = run.load(), load_cifar("cifar100", shared / "data" / "cifar100")
    fitted = data["train"].take(torch.from_numpy(np.sort(np.random.RandomState(0).permutation(50_000)[5000:])))
    parts = fitted.take(torch.arange(1000)), data["train"].take(run.indices("val")), data["test"].take(run.indices("test"))
    collected = []
    for part in parts:
        blocks = (
            (normalise(part.images[at : at + 100], part.mean, part.std), part.labels[at : at + 100])
            for at in range(0, len(part), 100)
        )
        features, labels = collect_features(model, blocks)
        with_ones = [np.hstack((each.double().numpy(), np.ones((len(each), 1)))) for each in features]
        collected.append((with_ones, labels.numpy()))
    (fit, known), (tuning, tuned), (test, labels) = collected
    heads = [
        np.hstack((layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()[:, None]))
        for layer in last_layers(model, torch.zeros(1, 3, 32, 32))
    ]
    logs = np.stack(
        [
            plain_fits.laplace(*exit, (rest, tuned), rows)[0]
            for *exit, rest, rows in zip(fit, heads, [known] * 7, tuning, test, strict=True)
        ]
    )
    alone = plain.measure(answers_of(np.exp(logs)), labels)
    cached = plain.measure(plain.caching(np.exp(logs)), labels)
    study, parts_of = "calibrated-baselines", (alone, cached)
    text = claim(study, "every baseline without caching is better calibrated than the backbone").partition(", Laplace ")[2]
    check(text, *(each["ece"].mean() for each in parts_of))
    text = claim(study, "with caching, calibrated exits drop less").partition(", Laplace ")[2]
    check(text, *(each["label_drop_percent"][2] for each in parts_of), slack=0.11)
    text = claim(study, "with calibrated exits fewer inputs drop than under the backbone").partition(", Laplace ")[2]
    check(text, *alone["label_drop_percent"][[2, -1]], slack=0.11)


def test_sets_and_fitted_product_of_out_of_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """The powers are the library's; the rule with them, the sets and the areas are not."""
    monkeypatch.setattr("anytime.reproduce.studies.text.PENALTIES", PENALTIES)  # the fixtures take two
    name = "minilm-clinc150-seed0"
    (held, known), logits = rows(name, "val"), rows(name)[0]
    with np.load(RESULTS / name / "oos-sample.npz") as file:
        outside = file["logits"].astype(np.float64)
    fitted = text_rules(torch.from_numpy(held).float(), torch.from_numpy(known))[FITTED]
    rules = {**RULES, FITTED: lambda values: plain.powers(values, fitted.past, fitted.now)}
    cells, last = table("out-of-scope"), {}
    for rule, make in rules.items():
        before, inside, beyond = (make(values).probs for values in (held, logits, outside))
        if rule == FITTED:
            ours = {
                "1 − largest probability": [-plain.log_odds(each) for each in (beyond, inside)],
                "entropy": [-(each * np.log(np.maximum(each, 1e-300))).sum(-1) for each in (beyond, inside)],
            }
            for what, pair in ours.items():
                check(" ".join(cells[f"{rule}, {what}"]), [plain.auroc(*both) for both in zip(*pair, strict=True)])
        for what, penalty in (("RAPS set size", 0.01), ("APS set size", 0.0)):
            limit = exact_limit(before, known, penalty)
            sizes = [set_sizes(each, limit, penalty) for each in (beyond, inside)]
            last[rule, what] = [plain.auroc(*both) for both in zip(*sizes, strict=True)]
            check(" ".join(cells[f"{rule}, {what}"]), last[rule, what])
    what = "the size of the product's RAPS set detects them at the last exit (an AUROC of 0.9 or more)"
    check(claim("out-of-scope", what), last["product", "RAPS set size"][-1])


def scores(probs: Array, penalty: float, uniform: Array) -> tuple[Array, Array]:
    """The released code's score of each rank, and the ranking."""
    order = np.argsort(-probs, -1, kind="stable")
    values = np.take_along_axis(probs, order, -1) + penalty * (np.arange(1, probs.shape[-1] + 1) > 5)
    return np.cumsum(values, -1) - uniform[..., None] * values, order


def exact_limit(probs: Array, labels: Array, penalty: float) -> Array:
    """The ⌈(n + 1)(1 - α)⌉-th smallest score of the labels at each exit."""
    uniform = np.random.default_rng([0, 1]).random((len(labels), len(probs))).T
    every, order = scores(probs, penalty, uniform)
    rank = (order == labels[:, None]).argmax(-1)[..., None]
    own = np.sort(np.take_along_axis(every, rank, -1)[..., 0], -1)
    return np.asarray(own[:, int(np.ceil((len(labels) + 1) * 0.95 - 1e-9)) - 1])


def set_sizes(probs: Array, limit: Array, penalty: float) -> Array:
    uniform = np.random.default_rng([0, 2]).random((probs.shape[1], len(probs))).T
    return np.asarray((scores(probs, penalty, uniform)[0] <= limit[:, None, None] + 1e-6).sum(-1))
