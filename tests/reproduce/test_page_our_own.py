"""The sections of docs/reproduction.md on texts, on the released code and on Tiny-ImageNet, recomputed: see
test_page_main_text.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from . import plain
from .plain import Array
from .stored import (
    C10,
    MOST,
    PAGE,
    RESULTS,
    RULES,
    cells_of,
    check,
    claim,
    document,
    mean,
    published,
    rows,
    section,
    seeds,
)

TEXTS = {
    "IMDB": ("imdb", 2),
    "SST-2": ("sst2", 2),
    "AG News": ("agnews", 4),
    "TREC": ("trec", 6),
    "Banking77": ("banking77", 77),
    "CLINC150": ("clinc150", 150),
}
SHIFTED, FITTED = "product, shift 1/K", "fitted product"
Found = dict[str, dict[str, Array]]


def without_names(text: str) -> str:
    """The text without the numbers in names of data sets and rules."""
    return re.sub(r"SST-2|Banking77|CLINC150|shift 1/K|Tiny-ImageNet|CIFAR-100?", "", text)


def text_metrics(metric: str) -> Found:
    rules = (*RULES, SHIFTED, FITTED)
    return {
        title: {rule: mean(published(seeds(f"minilm-{data}"), rule, metric)) for rule in rules}
        for title, (data, _) in TEXTS.items()
    }


def single_head(data: str) -> float:
    return 100 * float(document(f"minilm-{data}-single-seed0")["rules"]["latest"]["accuracy"][-1])


def test_the_table_of_texts() -> None:
    lines = cells_of("text")
    right, drops, gone = (text_metrics(metric) for metric in ("accuracy", "label_drop_percent", "collapsed_percent"))
    error, nll = text_metrics("ece"), text_metrics("nll")
    for title, (data, classes) in TEXTS.items():
        heads = [single_head(data)] if (RESULTS / f"minilm-{data}-single-seed0").is_dir() else []
        shown = {line[1]: line[2:] for line in lines if line[0] == f"{title} ({classes})"}
        assert set(shown) == {*right[title], *(["single head"] if heads else [])}
        for rule, accuracy in right[title].items():
            less = [100 * accuracy[-1] - head for head in heads]
            numbers = (100 * accuracy[[0, -1]], 100 * accuracy.mean(), less, drops[title][rule][[2, -1]], gone[title][rule][-1])
            check(" ".join(shown[rule]), *numbers, error[title][rule].mean(), nll[title][rule].mean())
        for head in heads:
            check(" ".join(shown["single head"]), head)
            (row,) = (line for line in lines if line[0].startswith(f"{title}: accuracy of a single head"))
            check(row[2], head - 100 * right[title]["latest"][-1])


def test_the_claims_about_texts() -> None:
    accuracy, drops = text_metrics("accuracy"), text_metrics("label_drop_percent")
    error, nll = text_metrics("ece"), text_metrics("nll")
    few, many = (["IMDB", "SST-2", "AG News"], ["TREC", "Banking77", "CLINC150"])

    def each(
        found: Found, rules: Sequence[str], at: int | None, some: Sequence[str] = tuple(TEXTS), *, factor: float = 1
    ) -> list[float]:
        return [
            factor * (found[title][rule].mean() if at is None else found[title][rule][at]) for title in some for rule in rules
        ]

    def of(what: str) -> str:
        return without_names(claim("text", what))

    of_the_paper, of_ours = ("latest", "caching", SHIFTED), ("latest", "caching", "product", FITTED)
    what = "accuracy is comparable under both rules (at most 1 point, mean over exits)"
    check(of(what), each(accuracy, of_the_paper, None, factor=100))
    what = "on every data set fewer inputs drop under one of the two than under the network (by .1 or more"
    check(of(what), each(drops, of_the_paper, 2))
    for by, at in ((".1", 2), (".5", -1)):
        what = f"with fewer than 5 classes caching has fewer drops by {by} or more than the product"
        check(of(what), each(drops, ("caching", "product", SHIFTED), at, few))
    what = (
        "our own: with fewer than 5 classes fewer inputs drop under the fitted product than under caching, and it is at least "
        "as accurate (drops by .1"
    )
    pair = ("caching", FITTED)
    check(of(what), each(drops, pair, 2, few), each(accuracy, pair, None, few, factor=100))
    what = "our own: with 5 classes or more fewer inputs drop under the product than under caching (by .1 or more"
    check(of(what), each(drops, ("caching", "product"), 2, many))
    check(of("our own: on every data set the product is calibrated worse than caching"), each(error, of_ours, None))
    check(of("our own: the fitted product has the lowest NLL of all, on every data set"), each(nll, of_ours, None))
    left = [100 * drops[title]["product"][2] / drops[title]["latest"][2] for title in ("IMDB", "CLINC150")]
    what = "the product prevents more drops where there are more classes: the fraction of drops that it leaves"
    check(of(what), left)


@pytest.mark.parametrize(
    ("title", "data", "counts"), [("CLINC150", "clinc150", (2, 3, 5, 10, 20, 50, 100)), ("Banking77", "banking77", (3, 5, 10))]
)
def test_with_how_many_classes_the_product_drops_less(title: str, data: str, counts: tuple[int, ...]) -> None:
    runs = {count: f"minilm-{data}-classes{count}-seed0" for count in counts} | {TEXTS[title][1]: f"minilm-{data}-seed0"}
    drops = {count: [published([name], rule, "label_drop_percent")[0, 2] for rule in RULES] for count, name in runs.items()}
    right = {count: [100 * published([name], rule, "accuracy").mean() for rule in RULES] for count, name in runs.items()}
    words = (
        rf"Of {title}'s classes ([\d, ]+) were used\. (?:With ([\d, ]+) no input .*? rules\. )?Fewer inputs drop .*? caching "
    )
    words += r"with ([\d, ]+); .*? is (\S+) points to the network and (\S+) to caching"
    shown = re.search(words, section("text"))
    assert shown
    check(shown[1], list(runs))
    steady = [count for count, found in drops.items() if not any(found)]
    check(shown[2] or "", steady)
    rest = [count for count in runs if count not in steady]
    behind = [place for place, count in enumerate(rest) if drops[count][2] >= drops[count][1]]
    check(shown[3], rest[max(behind, default=-1) + 1 :])
    for text, other in ((shown[4], 0), (shown[5], 1)):
        check(text, max((found[2] - found[other] for found in right.values()), key=abs))


def test_tiny_imagenet() -> None:
    (name,) = seeds("msdnet-tiny-imagenet")
    lines = {line[0]: line[1:] for line in cells_of("tiny-imagenet")}
    stored = {rule: document(name)["rules"][rule] for rule in RULES}
    logits, labels = rows(name)
    activations = {
        "ReLU": plain.log_relu,
        "Heaviside": lambda values: np.where(values > 0, 0.0, -np.inf),
        "exponential": lambda values: values,
    }
    for rule, found in stored.items():
        values = [
            np.array(list(found[metric].values()) if isinstance(found[metric], dict) else found[metric]) for metric in SHOWN
        ]
        check(" ".join(lines[rule]), *row(document(name)["samples"], *values))
    for kind, combine in (("product", plain.product), ("mixture", plain.mixture)):
        for activation, function in activations.items():
            ours = plain.measure(combine(logits, function), labels)
            check(
                " ".join(lines[f"{kind}, {activation}"]),
                *row(len(labels), *(np.asarray(ours[metric]) for metric in SHOWN)),
                slack=0.14,
            )
    right, drops, error = (
        {
            rule: np.array(list(found[metric].values()) if isinstance(found[metric], dict) else found[metric])
            for rule, found in stored.items()
        }
        for metric in ("accuracy", "label_drop_percent", "ece")
    )
    what = "Tiny-ImageNet: the product keeps the accuracy (at most 1 point lower at every exit)"
    check(claim("tiny-imagenet", what), *(100 * values for values in right.values()))
    for rule, other in (("latest", "the backbone"), ("caching", "caching")):
        what = f"Tiny-ImageNet: fewer drops of any size under the product than under {other}"
        check(claim("tiny-imagenet", what), drops["product"], drops[rule])
    what = "Tiny-ImageNet: product and caching have more monotone inputs than the backbone"
    check(claim("tiny-imagenet", what), [found["correct_monotone_percent"] for found in stored.values()])
    what = "Tiny-ImageNet: the product's calibration error is above the backbone's at the first exit"
    check(claim("tiny-imagenet", what), *error.values())
    what = "the more classes, the fewer drops by .05 or more under the product"
    by_classes = [
        number
        for names, count in ((C10, 10), (MOST, 100), ([name], 200))
        for number in (count, *mean(published(names, "product", "label_drop_percent")))
    ]
    check(without_names(claim("tiny-imagenet", what)), by_classes)


SHOWN = ("accuracy", "correct_monotone_percent", "never_correct_percent", "label_drop_percent", "ece")


def row(count: int, accuracy: Array, monotone: Array, never: Array, drops: Array, error: Array) -> tuple[object, ...]:
    return count, 100 * accuracy[[0, -1]], monotone, never, drops[1:3], error[[0, -1]]


def test_fewer_classes_of_ag_news_in_the_advice_on_texts() -> None:
    """The table of docs/text.md: the network on four classes, with some of them to choose from."""
    logits, labels = rows("minilm-agnews-seed0")
    lines = [line.strip("| ").split(" | ") for line in (PAGE.parent / "text.md").read_text().splitlines()]
    shown = {line[0]: line[1:] for line in lines if len(line) == 5 and line[0] in "432"}
    for count in (4, 3, 2):
        every = []
        for some in map(list, combinations(range(4), count)):
            chosen = np.isin(labels, some)
            part, known = logits[:, chosen][..., some], np.searchsorted(some, labels[chosen])
            true = (make(part).probs[:, np.arange(len(known)), known] for make in RULES.values())
            every.append([100 * np.mean(plain.drop(curve) >= 0.1) for curve in true])
        found = np.array(every)
        assert (found[:, 1] < found[:, 2]).all()  # caching drops less for each choice
        check(" ".join(shown[f"{count}"]), len(every), found.mean(0))
