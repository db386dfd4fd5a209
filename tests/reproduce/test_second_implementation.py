"""The numbers of docs/reproduction.md, computed a second time by `plain.py` from what results/ has stored.

A number that was measured on more rows than those whose logits were stored is recomputed from the stored metrics of each seed;
these metrics are compared with `plain.py` on the stored rows: exactly where all rows were stored, within the error of a sample
elsewhere. Not recomputed: last-layer Laplace, which needs the images; sets and the fitted product in out-of-scope; the rows of
`deviations` that are about the released code alone; and the toy ensembles, which have tests of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytime.reproduce.runs import read_run
from anytime.reproduce.studies.thresholds import fit_adaptive

from . import plain
from .plain import Answers, Array

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "reproduction.md"
RULES: dict[str, Callable[[Array], Answers]] = {
    "latest": plain.latest,
    "caching": lambda logits: plain.caching(plain.softmax(logits)),
    "product": plain.product,
}
NUMBER = re.compile(r"[−+-]?(?:\d{1,3}(?:,\d{3})+|\d*\.?\d+)")


def seeds(prefix: str) -> list[str]:
    return sorted(path.name for path in RESULTS.iterdir() if re.fullmatch(rf"{prefix}-seed\d+", path.name))


C10, C100, IMTA = seeds("msdnet-cifar10"), seeds("msdnet-cifar100"), seeds("imta-cifar100")
GROUPS = {"MSDNet, CIFAR-10": C10, "MSDNet, CIFAR-100": C100, "IMTA, CIFAR-100": IMTA}


@cache
def rows(name: str, split: str = "test") -> tuple[Array, Array]:
    with np.load(RESULTS / name / f"{split}-sample.npz") as file:
        return file["logits"].astype(np.float64), file["labels"].astype(np.int64)


@cache
def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name / "test-metrics.json").read_text())
    return found


def published(names: Sequence[str], rule: str, metric: str) -> Array:
    """A stored metric on all test rows, one row per seed."""
    values = [document(name)["rules"][rule][metric] for name in names]
    return np.array([list(value.values()) if isinstance(value, dict) else value for value in values])


@cache
def measured(name: str, rule: str) -> dict[str, Array]:
    logits, labels = rows(name)
    return plain.measure(RULES[rule](logits), labels)


def kept(names: Sequence[str], make: Callable[[Array], Answers]) -> dict[str, Array]:
    """Metrics of a rule on the stored rows, one row per seed."""
    found = [plain.measure(make(rows(name)[0]), rows(name)[1]) for name in names]
    return {metric: np.array([each[metric] for each in found]) for metric in found[0]}


@cache
def section(study: str) -> str:
    parts = re.split(r"^## (\S+)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[study]


def table(study: str) -> dict[str, list[str]]:
    """Rows of the section's tables by their first cell; of a cell that occurs again the last row."""
    lines = [line.strip("| ").split(" | ") for line in section(study).splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if not cells[0].startswith("---")}


def claim(study: str, what: str) -> str:
    """The numbers behind a claim: what follows its text."""
    for line in section(study).splitlines():
        text = line.removeprefix("- holds: ").removeprefix("- DOES NOT HOLD: ")
        if text != line and text.startswith(what):
            return text[len(what) :]
    raise AssertionError(f"{study} has no claim {what!r}")


def check(text: str, *expected: Any, slack: float = 0.011) -> None:
    """The numbers in a text are the expected ones, up to their last digit and a rounded input or two."""
    wanted = np.concatenate([np.ravel(np.asarray(value, float)) for value in expected])
    found = NUMBER.findall(text)
    assert len(found) == len(wanted), f"{text!r}: {len(found)} numbers, expected {wanted.tolist()}"
    for shown, number in zip(found, wanted, strict=True):
        given = float(shown.replace("−", "-").replace(",", ""))
        digits = len(shown.partition(".")[2])
        room = 0.51 * 10**-digits + (slack if abs(number) > 1 or digits < 3 else 5e-4)
        assert abs(given - number) <= room, f"{text!r}: {shown}, recomputed {number:.5f}"


def check_compared(study: str, expected: dict[str, Array]) -> None:
    """Mean and deviation over seeds of every number that a study compares with the paper's."""
    found = {name: cells for name, cells in table(study).items() if cells[-1] in ("within", "NOT within")}
    assert set(found) == set(expected)
    for name, values in expected.items():
        spread = [values.std(ddof=1)] if len(values) > 1 else []
        check(found[name][1].replace("%", ""), values.mean(), *spread)


def mean(values: Array) -> Array:
    return np.asarray(values.mean(0))


def over_exits(name: str, values: Array, *, first: int = 1) -> dict[str, Array]:
    """One entry per exit from `(seeds, exits)`, named as the page does."""
    return {f"{name}, exit {exit}": values[:, exit - 1] for exit in range(first, values.shape[1] + 1)}


# What the published metrics are


@pytest.mark.parametrize("name", [*C10[:1], *C100[:1], "minilm-imdb-seed0", "minilm-trec-seed0", "imta-cifar100-seed0"])
@pytest.mark.parametrize("rule", list(RULES))
def test_the_stored_metrics_are_those_of_the_stored_logits(name: str, rule: str) -> None:
    check_stored(name, rule)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/test-sample.npz")))
def test_the_stored_metrics_of_every_run_are_those_of_its_logits(name: str) -> None:
    for rule in RULES:
        check_stored(name, rule)


def check_stored(name: str, rule: str) -> None:
    total, stored, ours = document(name)["samples"], document(name)["rules"][rule], measured(name, rule)
    here = len(rows(name)[1])
    for metric, value in ours.items():
        if metric not in stored or metric in ("learned", "forgot"):
            continue
        theirs = np.array(list(stored[metric].values()) if isinstance(stored[metric], dict) else stored[metric], float)
        percent = "percent" in metric
        if here == total:  # the metrics are of float32 logits, of which float16 was stored
            room = np.full(theirs.shape, 0.25 if percent else 2e-3 * np.maximum(1, np.abs(theirs)).max())
        else:
            # A percentage of some rows of a finite set, 4.5 standard errors; means of other quantities by a bound on theirs.
            scale = 100.0 if percent else 1.0
            part = np.clip(theirs / scale, 0.002, 0.998) if percent or metric in BOUNDED else None
            error = np.sqrt(part * (1 - part)) if part is not None else np.maximum(np.abs(theirs), 0.3) * 2
            room = 4.5 * scale * error / np.sqrt(here) * np.sqrt(1 - here / total)
            if metric.startswith("hindsight"):  # of the wrong answers alone
                room = room / np.sqrt(np.maximum(1 - ours["accuracy"], 1 / here))
            if metric == "ece":  # biased with few rows
                room = room * 2.5
        assert np.all(np.abs(value - theirs) <= room), f"{name}, {rule}, {metric}: {value} and {theirs}"


BOUNDED = ("accuracy", "label_probability", "ece", "confidence")


# Study by study


def test_accuracy() -> None:
    expected: dict[str, Array] = {}
    for title, names in GROUPS.items():
        each = {rule: 100 * published(names, rule, "accuracy") for rule in RULES}
        for rule, values in each.items():
            if (title, rule) != ("IMTA, CIFAR-100", "caching"):
                expected |= over_exits(f"{title}, {rule}", values, first=1 if rule == "latest" else 2)
        last = [mean(each[rule])[-1] for rule in ("product", "latest", "caching")]
        check(claim("accuracy", f"{title}: the product is at least as accurate as the backbone at the last exit"), last)
        average = [each[rule].mean() for rule in ("product", "caching", "latest")]
        check(claim("accuracy", f"{title}: the product is more accurate than caching, on average over the exits"), average)
    check_compared("accuracy", expected)


def test_label_and_final_answer_drops() -> None:
    expected: dict[str, Array] = {}
    for title, names in GROUPS.items():
        each = {rule: published(names, rule, "label_drop_percent") for rule in RULES}
        for rule, values in each.items():
            if (title, rule) != ("IMTA, CIFAR-100", "caching"):
                expected |= {f"{title}, {rule}, ≥ {by}": values[:, at] for at, by in enumerate(plain.DROPS)}
        product, cached, base = (mean(each[rule]) for rule in ("product", "caching", "latest"))
        for rule, ours in (("the product", product), ("caching", cached)):
            ends = (0.01, ours[0], base[0], 0.5, ours[-1], base[-1])
            check(claim("label-drops", f"{title}: fewer drops of any size under {rule} than under the backbone"), ends)
        pairs = [(by, product[at], cached[at]) for at, by in enumerate(plain.DROPS)]
        what = (
            "on par with caching at thresholds up to 0.1 (within 2.5 points; the paper's own differ by up to 2.3)"
            if names is C10
            else "fewer drops of any size under the product than under caching"
        )
        check(claim("label-drops", f"{title}: {what}"), pairs)
        final = {rule: mean(published(names, rule, "final_drop_percent")) for rule in RULES}
        ends = [(by, *(final[rule][at] for rule in RULES)) for at, by in ((0, 0.01), (-1, 0.5))]
        what = f"{title}: fewer drops under the product than under the backbone or caching"
        check(claim("final-answer-drops", what), ends)
    check_compared("label-drops", expected)


def test_marginal_and_conditional_and_trajectories() -> None:
    study = "marginal-and-conditional"
    check(claim(study, "accuracy rises at every exit"), 100 * mean(published(C100, "latest", "accuracy")))
    values = 100 * mean(published(C100, "latest", "label_probability"))
    check(claim(study, "the label's mean probability rises at every exit"), values)
    half = published(C100, "latest", "label_drop_percent")[:, -1].mean()
    forgets = 100 - published(C100, "latest", "correct_monotone_percent").mean()
    found = re.search(r"or more for ([\d.]+) %.* and ([\d.]+) % lose", section(study))
    assert found
    check(" ".join(found.groups()), half, forgets)
    logits, labels = rows(C100[0])
    curves = [RULES[rule](logits).probs[:, np.arange(len(labels)), labels] for rule in ("product", "latest")]
    start = claim("trajectories", "the product's probabilities start lower than the backbone's (mean at exit 1: ")
    check(start, [curve[0].mean() for curve in curves])
    found = re.search(r"mean drop is ([\d.]+) under the product and ([\d.]+) under", section("trajectories"))
    assert found
    check(" ".join(found.groups()), [plain.drop(curve).mean() for curve in curves])


@cache
def splits(name: str, rule: str) -> dict[str, Array]:
    logits, labels = rows(name)
    return plain.random_splits(RULES[rule](logits).probs, labels)


@pytest.mark.long
def test_sets_over_random_splits() -> None:
    study, expected = "uncertainty", {}
    ends = {"latest": (1, 7), "caching": (7,), "product": range(1, 8)}
    sizes = {rule: np.array([splits(name, rule)["size"] for name in C100]) for rule in RULES}  # (seeds, splits, exits)
    for rule, shown in ends.items():
        entropy = over_exits(f"entropy, {rule}", published(C100, rule, "entropy"))
        expected |= {f"entropy, {rule}, exit {exit}": entropy[f"entropy, {rule}, exit {exit}"] for exit in shown}
        values = sizes[rule].reshape(-1, sizes[rule].shape[-1])
        expected |= over_exits(f"set size, {rule}", values, first=2 if rule == "caching" else 1)
    check_compared(study, expected)
    each = {rule: values.mean((0, 1)) for rule, values in sizes.items()}
    covered = 100 * np.array([splits(name, "product")["coverage"] for name in C100]).mean((0, 1))
    what = "the product's sets are less than half as large at the last exit as at the first"
    check(claim(study, what), each["product"], covered)
    what = "the sets of the backbone and of caching vary less over the exits than the product's"
    check(claim(study, what), [values.max() / values.min() for values in each.values()])
    lines = [line for line in section(study).splitlines() if re.match(r"\| (latest|caching|product) \|", line)]
    wanted = [
        (values[..., exit].mean(), values[..., exit].std(1, ddof=1).mean(), values[..., exit].mean(1).std(ddof=1))
        for values in sizes.values()
        for exit in (0, -1)
    ]
    for line, numbers in zip(lines, wanted, strict=True):
        check(line, numbers)


@pytest.mark.long
def test_set_size_rises() -> None:
    for title, names in (("MSDNet, CIFAR-10", C10), ("MSDNet, CIFAR-100", C100)):
        rises = [np.array([splits(name, rule)["rises"] for name in names]).mean((0, 1)) for rule in RULES]
        ends = [(by, *(values[at] for values in rises)) for at, by in ((0, 1), (-1, 10))]
        check(claim("set-size-rise", f"{title}: fewer rises under the product"), ends)


def test_entropy_and_calibration_gap() -> None:
    entropy = mean(published(C100, "product", "entropy"))
    check(claim("uncertainty", "the product's entropy decreases at every exit"), entropy)
    errors = {rule: published(C100, rule, "ece") for rule in RULES}
    expected = over_exits("ECE, product", errors["product"])
    expected |= {f"ECE, latest, exit {exit}": errors["latest"][:, exit - 1] for exit in (1, 7)}
    expected["ECE, caching, exit 7"] = errors["caching"][:, -1]
    check_compared("calibration-gap", expected)
    what = "the product's error at the first exit is far above the backbone's"
    check(claim("calibration-gap", what), mean(errors["product"]), mean(errors["latest"]))
    for title, names in (("MSDNet, CIFAR-10", C10), ("MSDNet, CIFAR-100", C100)):
        rises = {rule: mean(published(names, rule, "entropy_rise_percent")) for rule in RULES}
        ends = [(by, *(rises[rule][at] for rule in RULES)) for at, by in ((0, 0.01), (-1, 1))]
        check(claim("entropy-rise", f"{title}: fewer rises under the product"), ends)


def test_correctness_overthinking_and_forgetting() -> None:
    expected: dict[str, Array] = {}
    cells = table("overthinking")
    for title, names in (("CIFAR-10", C10), ("CIFAR-100", C100)):
        kept_right, never, ever, over = (
            {rule: published(names, rule, f"{metric}_percent") for rule in RULES}
            for metric in ("correct_monotone", "never_correct", "ever_correct", "overthinking")
        )
        last = {rule: 100 * published(names, rule, "accuracy")[:, -1] for rule in RULES}
        for rule in RULES:
            expected |= {f"{title}, {rule}, monotone": kept_right[rule], f"{title}, {rule}, never correct": never[rule]}
            shown = [number for values in (over, ever, last) for number in (values[rule].mean(), values[rule].std(ddof=1))]
            check(" ".join(cells[f"{title}, {rule}"]), shown)
        gained = [values["product"].mean() - values["latest"].mean() for values in (kept_right, never)]
        check(claim("correctness", f"{title}: the product makes more inputs monotone than it makes never correct"), gained)
        what = f"{title}: caching has more monotone inputs than the product, and more that are never correct"
        check(claim("correctness", what), [values[rule].mean() for values in (kept_right, never) for rule in RULES])
        what = f"{title}: product and caching overthink less than the backbone"
        check(claim("overthinking", what), [over[rule].mean() for rule in RULES])
        what = f"{title}: mostly because fewer inputs are ever correct, not because the last exit is better"
        parts = [
            number
            for rule in ("product", "caching")
            for number in (ever[rule].mean() - ever["latest"].mean(), last[rule].mean() - last["latest"].mean())
        ]
        check(claim("overthinking", what), parts)
    check_compared("correctness", expected)
    total = document(C100[0])["samples"]
    for what, metric in (
        ("at every exit after the first, product and caching forget fewer inputs than the backbone", "forgot"),
        ("and learn fewer for the first time", "learned"),
    ):
        later = [100 * mean(published(C100, rule, metric))[1:] / total for rule in RULES]
        check(claim("learn-and-forget", what), later)


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
    check(claim("ablation", "averaging or multiplying softmaxes is not enough (drops by .1: "), drops, relu)


def test_sigmoid() -> None:
    ours, relu = kept(C100, lambda logits: plain.product(logits, plain.log_sigmoid)), kept(C100, plain.product)
    accuracy, base = 100 * mean(ours["accuracy"]), 100 * mean(relu["accuracy"])
    costs = base - accuracy
    what = "the sigmoid costs accuracy: a point on average over the exits, and at no exit more than three"
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


def test_thresholds_and_clipping() -> None:
    def gate(limit: float) -> Callable[[Array], Array]:
        return lambda values: plain.log_relu(np.where(values > limit, values, 0))

    accuracy = [kept(C100, lambda logits, b=b: plain.product(logits, gate(b)))["accuracy"] for b in (0, 1, 2, 4, 6)]  # type: ignore[misc]
    what = "b up to 2 hardly change the accuracy at the last exit (by less than half a point)"
    expected = [(b, 100 * values[:, -1].mean()) for b, values in zip((0, 1, 2, 4, 6), accuracy, strict=True)]
    check(claim("static-threshold", what), expected)

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
        by = np.array([plain.temperature(each, known) for each in held])[:, None, None]
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


def interpolate(grid: Array, cost: Array, accuracy: Array) -> Array:
    order = np.argsort(cost)
    return np.interp(grid, cost[order], accuracy[order])


def test_text() -> None:
    titles = {"IMDB (2)": "imdb", "SST-2 (2)": "sst2", "TREC (6)": "trec", "Banking77 (77)": "banking77"}
    titles["CLINC150 (150)"] = "clinc150"
    lines = [line.strip("| ").split(" | ") for line in section("text").splitlines() if line.startswith("| ")]
    for title, data in titles.items():
        single = 100 * document(f"minilm-{data}-single-seed0")["rules"]["latest"]["accuracy"][-1]
        names = seeds(f"minilm-{data}")
        for _, rule, *cells in (line for line in lines if line[0] == title and line[1] != "single head"):
            right, error, nll = (mean(published(names, rule, metric)) for metric in ("accuracy", "ece", "nll"))
            drops, gone = (mean(published(names, rule, f"{metric}_percent")) for metric in ("label_drop", "collapsed"))
            numbers = (100 * right[[0, -1]], 100 * right.mean(), 100 * right[-1] - single, drops[[2, -1]], gone[-1])
            check(" ".join(cells), *numbers, error.mean(), nll.mean())


def test_adaptive_threshold() -> None:
    """The regression and C are the library's; the rule with them is not."""
    found, collapsed = [], []
    for name in C100:
        fitted = fit_adaptive(read_run(RESULTS / name)).activation

        def gate(values: Array, fitted: Any = fitted) -> Array:
            top = -np.sort(-values, -1)[..., : len(fitted.coefficients)]
            chance = 1 / (1 + np.exp(-(top @ np.array(fitted.coefficients) + fitted.intercept)))
            return plain.log_relu(np.where(values > fitted.scale * chance[..., None], values, 0))

        logits, labels = rows(name)
        found.append(plain.measure(plain.product(logits, gate), labels))
        collapsed.append(found[-1]["collapsed_percent"])
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


def test_frontier() -> None:
    """The rules without fitted numbers."""
    lines = [line.strip("| ").split(" | ") for line in section("frontier").splitlines() if line.startswith("| ")]
    data = {"CIFAR-10": C10, "CIFAR-100": C100}
    data |= {title: seeds(f"minilm-{title.replace('-', '').lower()}") for title in ("IMDB", "SST-2", "TREC")}
    checked = 0
    for title, rule, *cells in lines:
        if title in data and rule in RULES:
            ours = kept(data[title], RULES[rule])
            accuracy, drops = 100 * ours["accuracy"].mean(), mean(ours["label_drop_percent"])
            check(" ".join(cells[:4]), accuracy, drops[1], drops[2], ours["ece"].mean(), ours["nll"].mean())
            checked += 1
    assert checked == 3 * len(data)


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
    pairs = zip(-both[1].max(-1), -both[0].max(-1), strict=True)
    check(" ".join(cells["latest, − largest logit"]), [plain.auroc(*pair) for pair in pairs])


def test_deviations() -> None:
    lines = [line.strip("| ").split(" | ") for line in section("deviations").splitlines() if line.startswith("| ")]
    cells = {(line[0], line[3]): line[4:6] for line in lines}
    ones = np.ones(7)
    text, code = kept(C100, plain.product), kept(C100, lambda logits: plain.product(logits, weights=ones))
    gates = (lambda values: plain.log_relu(np.where(values > 2, values, 0))), (lambda values: np.log(np.maximum(values, 2)))
    gated = [kept(C100, lambda logits, a=a: plain.product(logits, a)) for a in gates]  # type: ignore[misc]
    for topic, name, values in (
        ("weights (1)", "product accuracy, last exit", [100 * each["accuracy"][:, -1] for each in (text, code)]),
        ("weights (1)", "product drops by .01", [each["label_drop_percent"][:, 0] for each in (text, code)]),
        ("weights (1)", "product drops by .1", [each["label_drop_percent"][:, 2] for each in (text, code)]),
        ("weights (1)", "product ECE, last exit", [each["ece"][:, -1] for each in (text, code)]),
        ("static threshold (4), b = 2", "mean support, last exit", [each["support_size"][:, -1] for each in gated]),
        ("static threshold (4), b = 2", "accuracy, last exit", [100 * each["accuracy"][:, -1] for each in gated]),
        ("static threshold (4), b = 2", "drops by .05", [each["label_drop_percent"][:, 1] for each in gated]),
        ("static threshold (4), b = 2", "ECE, last exit", [each["ece"][:, -1] for each in gated]),
    ):
        for shown, found in zip(cells[topic, name], values, strict=True):
            check(shown.replace("%", ""), found.mean(), found.std(ddof=1))


def test_every_study_is_recomputed_or_named_here() -> None:
    tested = "".join(Path(__file__).read_text().partition("# Study by study")[2].partition("def test_every_study")[0])
    missing = [study for study in re.findall(r"^## (\S+)$", PAGE.read_text(), flags=re.M) if f'"{study}"' not in tested]
    assert set(missing) <= NOT_RECOMPUTED, f"no second implementation for {sorted(set(missing) - NOT_RECOMPUTED)}"


NOT_RECOMPUTED = {"spiral", "regression", "tiny-imagenet", "Missing"}
