"""The appendix of docs/reproduction.md, recomputed: see test_page_main_text.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from . import plain, plain_fits
from .plain import Answers, Array
from .stored import (
    C10,
    C100,
    NUMBER,
    PAGE,
    RESULTS,
    RULES,
    cells_of,
    check,
    claim,
    kept,
    mean,
    published,
    rows,
    section,
    seeds,
    table,
)


def log_heaviside(values: Array) -> Array:
    return np.where(values > 0, 0.0, -np.inf)


ACTIVATIONS = {"ReLU": plain.log_relu, "Heaviside": log_heaviside, "exponential": lambda values: values}


def test_ablation() -> None:
    cells, found = table("ablation"), {}
    for kind, combine in (("product", plain.product), ("mixture", plain.mixture)):
        for name, activation in ACTIVATIONS.items():
            ours = found[f"{kind}, {name}"] = kept(C100, lambda logits, c=combine, a=activation: c(logits, a))  # type: ignore[misc]
            accuracy, error, sure = (mean(ours[metric]) for metric in ("accuracy", "ece", "confidence"))
            drops = ours["label_drop_percent"][:, 2].mean()
            numbers = (100 * accuracy[[0, -1]], drops, error[[0, -1]], 100 * sure[[0, -1]])
            check(" ".join(cells[f"{kind}, {name}"]), *numbers, slack=0.06)
    average = [100 * found[f"product, {name}"]["accuracy"].mean() for name in ("Heaviside", "ReLU")]
    check(claim("ablation", "of the products, the one with the Heaviside is the least accurate"), average, slack=0.06)
    drops = [found[name]["label_drop_percent"][:, 2].mean() for name in ("product, exponential", "mixture, exponential")]
    relu = found["product, ReLU"]["label_drop_percent"][:, 2].mean()
    what = "averaging or multiplying softmaxes is not enough (more than 5 % drop by .1) (drops by .1: "
    check(claim("ablation", what), drops, relu)
    both = [found[f"{kind}, ReLU"] for kind in ("product", "mixture")]
    what = "only ReLU, multiplied or averaged, is good in both (the text) (label drops by .1: "
    check(claim("ablation", what), [each["label_drop_percent"][:, 2].mean() for each in both])
    what = "of these, only the product becomes confident (more than 2 times as much at the last exit as at the first)"
    check(claim("ablation", what), [100 * mean(each["confidence"])[[0, -1]] for each in both])


def test_sigmoid() -> None:
    ours, relu = kept(C100, lambda logits: plain.product(logits, plain.log_sigmoid)), kept(C100, plain.product)
    accuracy, base = 100 * mean(ours["accuracy"]), 100 * mean(relu["accuracy"])
    costs = base - accuracy
    what = "the sigmoid costs accuracy on average over the exits, and at no exit 3 points or more"
    check(claim("sigmoid", what), costs.mean(), costs.min(), costs.max(), accuracy, base)
    errors = mean(ours["ece"]), mean(relu["ece"])
    what = "the sigmoid worsens calibration, on average over the exits"
    check(claim("sigmoid", what), errors[0].mean(), errors[1].mean(), *errors)


def test_collaboration() -> None:
    areas = []
    for rule in RULES:
        found = []
        for name in C100:
            logits, labels = rows(name)
            answers = RULES[rule](logits)
            odds, right = plain.log_odds(answers.probs), answers.labels == labels
            found.append([plain.auroc(odds[exit][right[exit]], odds[exit][~right[exit]]) for exit in range(len(odds))])
        areas.append(np.mean(found, 0))
    text = claim("collaboration", "the product's calibration gap disappears").partition(" AUROC) ")[2]
    worse = [exit for exit, gap in enumerate(areas[0] - areas[2], 1) if gap > 0.01]
    check(text, *areas, worse)
    oracle = {rule: 100 * mean(published(C100, rule, "oracle_accuracy")) for rule in ("product", "latest")}
    found = re.search(r"the accuracy itself \((.*?)\), so it says nothing", section("collaboration"))
    assert found
    check(found[1], *oracle.values())
    both = [(plain.product(rows(name)[0]), rows(name)[1]) for name in C100]
    released = np.mean([plain.as_released(*each) for each in both], 0)
    recall = np.mean([(answers.labels == 0)[:, labels == 0].mean(1) for answers, labels in both], 0)
    found = re.search(r"the recall of class 0 \(product: (.*?)\)", section("collaboration"))
    assert found
    check(found[1], released, recall)


def test_thresholds_and_clipping() -> None:
    def gate(limit: float) -> Callable[[Array], Array]:
        return lambda values: plain.log_relu(np.where(values > limit, values, 0))

    accuracy = [kept(C100, lambda logits, b=b: plain.product(logits, gate(b)))["accuracy"] for b in (0, 1, 2, 4, 6)]  # type: ignore[misc]
    what = "b up to 2 hardly change the accuracy at the last exit (by less than half a point)"
    expected = [(b, 100 * values[:, -1].mean()) for b, values in zip((0, 1, 2, 4, 6), accuracy, strict=True)]
    check(claim("static-threshold", what), expected)

    shown = re.search(
        r"at the first exit (.*?) classes, and (.*?)\. The gate.*at the last exit for (.*?) of the inputs",
        section("static-threshold"),
    )
    assert shown
    gated = [kept(C100, lambda logits, b=b: plain.product(logits, gate(b))) for b in (0, 1, 2, 4, 6)]  # type: ignore[misc]
    inside = [
        np.mean([(gate(b)(rows(name)[0][0]) > -np.inf)[np.arange(1000), rows(name)[1]].mean() for name in C100])
        for b in (0, 1, 2, 4, 6)
    ]
    for text, values in (
        (shown[1], [each["support_size"][:, 0].mean() for each in gated]),
        (shown[2], [100 * each for each in inside]),
        (shown[3], [each["collapsed_percent"][:, -1].mean() for each in gated]),
    ):
        check(text, list(zip((0, 1, 2, 4, 6), values, strict=True)))

    def clipped(limit: float) -> Callable[[Array], Array]:
        return lambda values: plain.log_relu(np.minimum(values, limit))

    for title, names in (("CIFAR-10", C10), ("CIFAR-100", C100)):
        chosen = {None: log_heaviside, **{b: clipped(b) for b in (0.5, 2.0, 5.0, 10.0)}, 0.0: plain.log_relu}
        found = {b: kept(names, lambda logits, a=a: plain.product(logits, a)) for b, a in chosen.items()}  # type: ignore[misc]
        last, drops = [], []
        for b, ours in found.items():
            named = [b] if b else []
            last += [*named, 100 * ours["accuracy"][:, -1].mean()]
            drops += [*named, ours["final_drop_percent"][:, 0].mean()]
        check(claim("clip", f"{title}: the higher the limit, the better the last exit"), last)
        check(claim("clip", f"{title}: the higher the limit, the more final answers drop"), drops, 0.01, slack=0.03)


@pytest.mark.parametrize(("study", "name", "title"), [("dvit", "dvit", "DViT"), ("l2w", "l2w", "L2W")])
def test_other_networks(study: str, name: str, title: str) -> None:
    names = seeds(f"{name}-cifar100")
    right = [100 * mean(published(names, rule, "accuracy")) for rule in RULES]
    what = f"{title}, CIFAR-100: the product keeps the accuracy (at most 1 point lower at the last exit)"
    check(claim(study, what), *right)
    drops = [published(names, rule, "label_drop_percent")[:, 2].mean() for rule in RULES]
    check(claim(study, f"{title}, CIFAR-100: fewer drops of every size under the product than under the backbone"), drops, 0.1)
    final = [published(names, rule, "final_drop_percent")[:, 0].mean() for rule in RULES]
    what = f"{title}, CIFAR-100: the final answer's probability drops less often under the product than under the backbone or"
    check(claim(study, what), final, 0.01)


def test_zero_time_waste() -> None:
    names, study = seeds("ztw-cifar100"), "zero-time-waste"
    drops = [published(names, rule, "label_drop_percent")[:, 2].mean() for rule in RULES]
    check(claim(study, "fewer drops of every size under the product ("), drops, 0.1)
    hindsight = [mean(published(names, rule, "hindsight_improvability_percent"))[-1] for rule in RULES]
    check(claim(study, "less hindsight improvability at every exit after the first"), hindsight)
    accuracy = [100 * mean(published(names, rule, "accuracy")) for rule in RULES]
    what = "at a minor cost in accuracy (at most 3 points at the last exit)"
    check(claim(study, what), [(values.mean(), values[-1]) for values in accuracy])
    cells = table(study)
    for rule in RULES:
        ours = kept(names, RULES[rule])
        right, by = 100 * mean(ours["accuracy"]), mean(ours["label_drop_percent"])
        last = mean(ours["hindsight_improvability_percent"])[-1]
        check(" ".join(cells[rule]), right.mean(), right[-1], by[2], by[-1], last, ours["ece"].mean())


def test_calibrated_baselines() -> None:
    scaled: dict[str, list[dict[str, Array]]] = {"temperature": [], "temperature, caching": []}
    for name in C100:
        (held, known), (logits, labels) = rows(name, "val"), rows(name)
        by = np.array([plain_fits.temperature(each, known) for each in held])[:, None, None]
        scaled["temperature"].append(plain.measure(plain.latest(logits / by), labels))
        scaled["temperature, caching"].append(plain.measure(plain.caching(plain.softmax(logits / by)), labels))
    probs, labels = np.mean([plain.softmax(rows(name)[0]) for name in C100], 0), rows(C100[0])[1]
    none = np.zeros(probs.shape[:2], bool)
    scaled["ensemble"] = [plain.measure(Answers(probs, probs.argmax(-1), none), labels)]
    scaled["ensemble, caching"] = [plain.measure(plain.caching(probs), labels)]
    text = claim("calibrated-baselines", "with caching, calibrated exits drop less (by .1: ")
    drops = [np.mean([each["label_drop_percent"][2] for each in found]) for found in scaled.values()]
    check(text.partition(", Laplace")[0], drops, slack=0.03)
    text = claim("calibrated-baselines", "every baseline without caching is better calibrated than the backbone (mean ECE ")
    errors = [kept(C100, RULES[rule])["ece"].mean() for rule in ("latest", "product")]
    errors += [np.mean([each["ece"].mean() for each in found]) for found in scaled.values()]
    check(text.partition(", Laplace")[0], errors)
    scaled |= {
        rule: [plain.measure(RULES[rule](rows(name)[0]), rows(name)[1]) for name in C100] for rule in ("latest", "product")
    }
    drops = {name: np.mean([each["label_drop_percent"] for each in found], 0) for name, found in scaled.items()}
    text = claim(
        "calibrated-baselines", "with calibrated exits fewer inputs drop than under the backbone, at every threshold (by .1"
    )
    some = ("latest", "product", "temperature", "ensemble")
    check(text.partition(", Laplace")[0], 0.5, [drops[name][[2, -1]] for name in some], slack=0.06)
    text = claim("calibrated-baselines", "none of them drops less than the product, at any threshold")
    check(text, drops["product"][0], 0.01, drops["product"][2], 0.1)


@cache
def costs(name: str) -> Array:
    """MACs up to each exit, from our notes, in millions."""
    return np.array(
        [15.13, 25.48, 37.06, 46.28, 57.28, 66.89, 75.86]
        if "cifar10-" in name
        else [15.14, 25.51, 37.10, 46.33, 57.34, 66.96, 75.94]
    )


def test_budgeted_batch() -> None:
    for title, names in (("CIFAR-10", C10), ("CIFAR-100", C100)):
        curves = {
            rule: [plain.budget(make(rows(name, "val")[0]), make(rows(name)[0]), rows(name)[1], costs(name)) for name in names]
            for rule, make in RULES.items()
        }
        every = [cost for found in curves.values() for cost, _ in found]
        grid = np.linspace(max(cost.min() for cost in every), min(cost.max() for cost in every), 20)
        at = {rule: np.mean([interpolate(grid, *each) for each in found], 0) for rule, found in curves.items()}
        led = at["latest"] >= at["product"]
        text = claim("budgeted-batch", f"{title}: the backbone is ahead of the product at most costs")
        check(text, led.sum(), 20, grid[0], grid[-1], grid[led][-1], slack=0.5)
        text = claim("budgeted-batch", f"{title}: at the largest costs the product is ahead")
        best = 100 * np.array([at["product"][-1], at["latest"][-1], at["latest"].max()])
        check(text, best, slack=0.02)
        for rule, what in (("latest", "the backbone's accuracy drops again"), ("product", "the product's does not drop")):
            text = claim("budgeted-batch", f"{title}: as costs grow {what} (by 0.1 point or more)")
            check(text, 100 * (at[rule].max() - at[rule][-1]), slack=0.02)


def interpolate(grid: Array, cost: Array, accuracy: Array) -> Array:
    order = np.argsort(cost)
    return np.interp(grid, cost[order], accuracy[order])


def test_adaptive_threshold() -> None:
    found, collapsed, scales = [], [], []
    for name in C100:
        gate, scale = plain_fits.adaptive_threshold(*rows(name, "val"))
        logits, labels = rows(name)
        found.append(plain.measure(plain.product(logits, gate), labels))
        collapsed.append(found[-1]["collapsed_percent"])
        scales.append(scale)
    shown = re.search(r"C is ([\d., ]+), seed by seed", section("adaptive-threshold"))
    assert shown
    check(shown[1], scales)
    base = {rule: kept(C100, RULES[rule]) for rule in RULES}
    error = [np.mean([each["ece"] for each in found]), base["product"]["ece"].mean(), base["latest"]["ece"].mean()]
    check(claim("adaptive-threshold", "the adaptive threshold lowers the product's calibration error"), error)
    drops = [np.mean([each["label_drop_percent"][2] for each in found])]
    drops += [base[rule]["label_drop_percent"][:, 2].mean() for rule in ("product", "latest")]
    what = "fewer inputs drop than under the backbone at every threshold, and more than under the plain product (by .1"
    check(claim("adaptive-threshold", what), drops, slack=0.03)
    accuracy = 100 * np.mean([each["accuracy"] for each in found], 0), 100 * mean(base["product"]["accuracy"])
    check(claim("adaptive-threshold", "it costs some accuracy"), *accuracy)
    shown = re.search(r"fall back to the exit's softmax: ([\d., ]+) %", section("adaptive-threshold"))
    assert shown
    check(shown[1], np.mean(collapsed, 0))


def test_finetune() -> None:
    lines = [line.strip("| ").split(" | ") for line in section("finetune").splitlines() if line.startswith("| CIFAR-")]
    ones = np.ones(7)
    softplus, relu = (lambda f, a=a: plain.product(f, a, ones) for a in (plain.log_softplus, plain.log_relu))
    made = {
        "latest": ("msdnet", plain.latest),
        "product": ("msdnet", plain.product),
        "softplus product": ("msdnet", softplus),
        "finetuned": ("msdnet-finetuned", softplus),
        "finetuned, ReLU": ("msdnet-finetuned", relu),
        "heads alone finetuned": ("msdnet-heads", softplus),
        "trained with the product alone": ("msdnet-product", softplus),
    }
    for title, rule, *cells in (line for line in lines if len(line) == 5):
        data = title.replace("-", "").lower()
        if rule not in made:  # an earlier epoch, of which only metrics are stored
            epoch = NUMBER.findall(rule)[0]
            stored = json.loads((RESULTS / f"msdnet-finetuned-{data}-seed0" / "epochs.json").read_text())["test"][epoch]
            one = stored["product, softplus, ones"]
            check(" ".join(cells), 100 * np.array(one["accuracy"]), one["ece"], one["label_drop_percent_0.1"])
            continue
        network, make = made[rule]
        ours = kept(seeds(f"{network}-{data}"), make)
        check(" ".join(cells), 100 * mean(ours["accuracy"]), mean(ours["ece"]), ours["label_drop_percent"][:, 2].mean())
    for title, network in (("CIFAR-10", "cifar10"), ("CIFAR-100", "cifar100")):
        ours = {rule: kept(seeds(f"{made[rule][0]}-{network}"), made[rule][1]) for rule in ("latest", "product", "finetuned")}
        what = f"{title}: finetuning lowers the product's mean calibration error"
        check(claim("finetune", what), [ours[rule]["ece"].mean() for rule in ("finetuned", "product")])
        what = f"{title}: finetuned, fewer drops of every size than under the backbone"
        check(claim("finetune", what), [each["label_drop_percent"][:, 2].mean() for each in ours.values()], 0.1)
        what = f"{title}: at a minor cost in accuracy (at most 3 points to the product before, at the last exit)"
        check(claim("finetune", what), *(100 * mean(each["accuracy"]) for each in ours.values()))
    what = "CIFAR-100: finetuned, the calibration error is at or below the backbone's at every exit"
    check(claim("finetune", what), mean(ours["finetuned"]["ece"]), mean(ours["latest"]["ece"]))
    for exit in (1, 7):
        (shown,) = (line[2] for line in cells_of("finetune") if line[0] == f"CIFAR-100, ECE, finetuned, exit {exit}")
        check(shown, ours["finetuned"]["ece"][0, exit - 1])


def test_out_of_scope() -> None:
    """Scores of single rows; those of prediction sets and of the fitted product have tests with the library's own."""
    cells, name = table("out-of-scope"), "minilm-clinc150-seed0"
    with np.load(RESULTS / name / "oos-sample.npz") as file:
        both = rows(name)[0], file["logits"].astype(np.float64)
    for rule in RULES:
        inside, outside = (RULES[rule](logits) for logits in both)
        scores: dict[str, Callable[[Answers], Array]] = {
            "1 − largest probability": lambda answers: -plain.log_odds(answers.probs),
            "entropy": lambda answers: -np.where(answers.probs > 0, answers.probs * np.log(answers.probs + 1e-300), 0).sum(-1),
        }
        if rule == "product":
            scores["support size"] = lambda answers: (answers.probs > 0).sum(-1)
        for what, score in scores.items():
            pairs = zip(score(outside), score(inside), strict=True)
            check(" ".join(cells[f"{rule}, {what}"]), [plain.auroc(*pair) for pair in pairs])
    height = [plain.auroc(*pair) for pair in zip(-both[1].max(-1), -both[0].max(-1), strict=True)]
    check(" ".join(cells["latest, − largest logit"]), height)
    inside, outside = ((plain.product(logits).probs > 0).sum(-1)[-1] for logits in both)
    support = plain.auroc(outside, inside)
    what = "the size of the product's support detects them at the last exit (an AUROC of 0.9 or more)"
    check(claim("out-of-scope", what), support)
    text = claim("out-of-scope", "at the last exit they detect them better than the network's own largest probability")
    inside, outside = (plain.log_odds(plain.softmax(logits[-1])) for logits in both)
    check(
        text.replace("1 − largest", "").replace("product, RAPS set size 0.932; ", ""),
        support,
        plain.auroc(-outside, -inside),
        height[-1],
    )


def test_every_study_is_recomputed_or_named_here() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_page_*.py"))
    missing = {study for study in re.findall(r"^## (\S+)$", PAGE.read_text(), flags=re.M) if f'"{study}"' not in tests}
    assert not missing - NOT_RECOMPUTED


NOT_RECOMPUTED = {"Missing"}
