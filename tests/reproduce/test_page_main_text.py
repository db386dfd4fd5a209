"""The numbers of docs/reproduction.md, computed a second time by `plain.py` from what results/ has stored.

A number that was measured on more rows than those whose logits were stored is recomputed from the stored metrics of each seed;
these metrics are compared with `plain.py` on the stored rows: exactly where all rows were stored, within the error of a sample
elsewhere, and exactly for the single inputs that are stored with them. Not recomputed are the rows of `frontier` with the
fitted product. Given by the library and used by a second implementation are the powers of the fitted product in
`out-of-scope`, the initial weights of the toy ensembles and of ZTW's ensemble, and the features of the network in last-layer
Laplace. Numbers in notes about how something was trained come from `config.json` and `log.csv` of a run.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from . import plain
from .plain import Array
from .stored import (
    C10,
    C100,
    GROUPS,
    MOST,
    RESULTS,
    RULES,
    cells_of,
    check,
    check_compared,
    claim,
    document,
    mean,
    measured,
    over_exits,
    published,
    rows,
    section,
    table,
)


@pytest.mark.parametrize("name", [*C10[:1], *C100[:1], *MOST, "minilm-imdb-seed0", "minilm-trec-seed0", "imta-cifar100-seed0"])
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
            if metric == "nll":  # the product's has a heavy tail: labels outside of its support
                error = np.maximum(ours["nll_deviation"], 1.0)
            room = 4.5 * scale * error / np.sqrt(here) * np.sqrt(1 - here / total)
            if metric.startswith("hindsight"):  # of the wrong answers alone
                room = room / np.sqrt(np.maximum(1 - ours["accuracy"], 1 / here))
            if metric == "ece":  # biased with few rows
                room = room * 2.5
        assert np.all(np.abs(value - theirs) <= room), f"{name}, {rule}, {metric}: {value} and {theirs}"


STORED_INPUTS = {MOST[1]: 2, C10[0]: 5, C10[1]: 12, C10[2]: 8, C100[3]: 3, C100[4]: 2, "msdnet-tiny-imagenet-seed0": 2}
"""Of the 20 test inputs with the largest drops, how many are among those whose logits were kept."""


@pytest.mark.parametrize("name", STORED_INPUTS)
def test_single_inputs_that_are_stored_with_the_metrics_have_the_probabilities_of_their_logits(name: str) -> None:
    with np.load(RESULTS / name / "test-sample.npz") as file:
        places = {int(row): at for at, row in enumerate(file["indices"])}
    (logits, labels), compared = rows(name), 0
    for one in document(name)["worst"]:
        if (at := places.get(one["row"])) is None:
            continue
        assert labels[at] == one["label"]
        for rule, make in RULES.items():
            answers = make(logits[:, at : at + 1])
            probability = answers.probs[:, 0, labels[at]]
            np.testing.assert_allclose(probability, one["probability"][rule], atol=5e-3)  # logits were stored in float16
            np.testing.assert_allclose(plain.drop(probability), one["drop"][rule], atol=5e-3)
            assert answers.labels[:, 0].tolist() == one["answers"][rule]
        compared += 1
    assert compared == STORED_INPUTS[name]


BOUNDED = ("accuracy", "label_probability", "ece", "confidence")


def test_accuracy() -> None:
    expected: dict[str, Array] = {}
    for title, names in GROUPS.items():
        each = {rule: 100 * published(names, rule, "accuracy") for rule in RULES}
        for rule, values in each.items():
            if rule not in {"IMTA, CIFAR-100": ["caching"], "IMTA, CIFAR-10": ["product", "caching"]}.get(title, []):
                expected |= over_exits(f"{title}, {rule}", values, first=1 if rule == "latest" else 2)
        last = [mean(each[rule])[-1] for rule in ("product", "latest", "caching")]
        check(claim("accuracy", f"{title}: the product is at least as accurate as the backbone at the last exit"), last)
        average = [each[rule].mean() for rule in ("product", "caching", "latest")]
        check(claim("accuracy", f"{title}: the product is more accurate than caching, on average over the exits"), average)
    check_compared("accuracy", expected)
    others = [line for line in cells_of("accuracy") if line[0] == "msdnet-cifar100"]
    assert [line[1] for line in others] == list(RULES)
    for _, rule, shown in others:
        check(shown, 100 * mean(published(C100, rule, "accuracy")))


def test_label_and_final_answer_drops() -> None:
    expected: dict[str, Array] = {}
    for title, names in GROUPS.items():
        each = {rule: published(names, rule, "label_drop_percent") for rule in RULES}
        for rule, values in each.items():
            if title != "IMTA, CIFAR-10" and (title, rule) != ("IMTA, CIFAR-100", "caching"):
                expected |= {f"{title}, {rule}, ≥ {by}": values[:, at] for at, by in enumerate(plain.DROPS)}
        product, cached, base = (mean(each[rule]) for rule in ("product", "caching", "latest"))
        for rule, ours in (("the product", product), ("caching", cached)):
            ends = (0.01, ours[0], base[0], 0.5, ours[-1], base[-1])
            check(claim("label-drops", f"{title}: fewer drops of any size under {rule} than under the backbone"), ends)
        pairs = [(by, product[at], cached[at]) for at, by in enumerate(plain.DROPS)]
        what = (
            "on par with caching at thresholds up to 0.1 (within 2.5 points; the paper's own differ by up to 2.3)"
            if title.endswith("CIFAR-10")
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
    check(claim(study, "accuracy rises at every exit"), 100 * mean(published(MOST, "latest", "accuracy")))
    values = 100 * mean(published(MOST, "latest", "label_probability"))
    check(claim(study, "the label's mean probability rises at every exit"), values)
    half = published(MOST, "latest", "label_drop_percent")[:, -1].mean()
    forgets = 100 - published(MOST, "latest", "correct_monotone_percent").mean()
    found = re.search(r"or more for ([\d.]+) %.* and ([\d.]+) % lose", section(study))
    assert found
    check(" ".join(found.groups()), half, forgets)
    what = "the product rectifies the backbone's drops to a large extent (the mean drop is at most a tenth)"
    check(claim("trajectories", what), [published(MOST, rule, "mean_label_drop").mean() for rule in ("product", "latest")])
    logits, labels = rows(MOST[0])
    curves = {rule: RULES[rule](logits).probs[:, np.arange(len(labels)), labels] for rule in ("product", "latest")}
    chosen = np.argsort(plain.drop(curves["latest"]), kind="stable")[((np.arange(10) + 0.5) / 10 * len(labels)).astype(int)]
    found = re.search(r"of the ten is ([\d.]+) under .* and ([\d.]+) under", section("trajectories"))
    assert found
    check(" ".join(found.groups()), [plain.drop(curve[:, chosen]).max() for curve in curves.values()])
    found = re.search(r"at exit 1 is ([\d.]+) and ([\d.]+):", section("trajectories"))
    assert found
    check(" ".join(found.groups()), [published(MOST, rule, "label_probability")[:, 0].mean() for rule in curves])


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
        entropy = over_exits(f"entropy, {rule}", published(MOST, rule, "entropy"))
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
        near, by_two = (
            np.array([splits(name, rule)[key] for name in names for rule in ("latest", "product")])
            for key in ("alike", "rises")
        )
        near, by_two = near.reshape(len(names), 2, -1), by_two.reshape(len(names), 2, -1, 4)[..., 1]
        shown = re.search(rf"{title.rpartition(' ')[2]}: at any one exit, (.*?) of the inputs grow", section("set-size-rise"))
        assert shown
        numbers = [(100 * near[:, at].mean(), by_two[:, at].mean(), by_two[:, at].std(ddof=1)) for at in (0, 1)]
        (one, *first), (other, *second) = numbers
        check(shown[1].replace("grow by 2", ""), one, other, first, second)


def test_entropy_and_calibration_gap() -> None:
    entropy = mean(published(MOST, "product", "entropy"))
    check(claim("uncertainty", "the product's entropy decreases at every exit"), entropy)
    errors = {rule: published(MOST, rule, "ece") for rule in RULES}
    expected = over_exits("ECE, product", errors["product"])
    expected |= {f"ECE, latest, exit {exit}": errors["latest"][:, exit - 1] for exit in (1, 7)}
    expected["ECE, caching, exit 7"] = errors["caching"][:, -1]
    check_compared("calibration-gap", expected)
    shown = re.search(r"the mean sizes are (.*) classes", section("uncertainty"))
    assert shown
    check(shown[1], *(mean(published(MOST, rule, "set_size")) for rule in RULES))
    what = "the product's error at the first exit is far above the backbone's"
    check(claim("calibration-gap", what), mean(errors["product"]), mean(errors["latest"]))
    for title, names in (("MSDNet, CIFAR-10", C10), ("MSDNet, CIFAR-100", MOST)):
        rises = {rule: mean(published(names, rule, "entropy_rise_percent")) for rule in RULES}
        ends = [(by, *(rises[rule][at] for rule in RULES)) for at, by in ((0, 0.01), (-1, 1))]
        check(claim("entropy-rise", f"{title}: fewer rises under the product"), ends)


def test_correctness_overthinking_and_forgetting() -> None:
    expected: dict[str, Array] = {}
    cells = table("overthinking")
    for title, names in (("CIFAR-10", C10), ("CIFAR-100", MOST)):
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
    total = document(MOST[0])["samples"]
    for what, metric in (
        ("at every exit after the first, product and caching forget fewer inputs than the backbone", "forgot"),
        ("and learn fewer for the first time", "learned"),
    ):
        later = [100 * mean(published(MOST, rule, metric))[1:] / total for rule in RULES]
        check(claim("learn-and-forget", what), later)
    gaps = np.subtract(*(100 * published(MOST, rule, "learned")[:, 1:] / total for rule in ("latest", "product")))
    least = int(gaps.mean(0).argmin())
    shown = re.search(r"in what is learned is (.*?), at exit (\d)", section("learn-and-forget"))
    assert shown
    check(" ".join(shown.groups()), gaps[:, least].mean(), gaps[:, least].std(ddof=1), least + 2)
