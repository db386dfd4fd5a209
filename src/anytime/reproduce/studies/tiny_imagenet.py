"""Our own: a third data set, with 200 classes, and how drops depend on the number of classes (a limitation in the paper)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from anytime.combine import Activation, Exponential, Heaviside, Mixture, Product, ReLU, Rule
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, at_most, listed, means
from anytime.reproduce.group import (
    ACCURACY,
    ECE,
    LABEL_DROPS,
    MONOTONE,
    NEVER_CORRECT,
    PLAIN,
    Group,
    published,
    title_of,
)
from anytime.reproduce.needs import REPRODUCED, TINY
from anytime.reproduce.plots import Plot, line, looks
from anytime.reproduce.studies.accuracy import KEPT
from anytime.reproduce.studies.activations import GOOD_ACCURACY, GOOD_DROPS

_ACTIVATIONS: dict[str, Activation] = {"ReLU": ReLU(), "Heaviside": Heaviside(), "exponential": Exponential()}
_COMBINED: dict[str, Rule[Any]] = {f"product, {name}": Product(kind) for name, kind in _ACTIVATIONS.items()}
_COMBINED |= {f"mixture, {name}": Mixture(kind) for name, kind in _ACTIVATIONS.items()}
_DRAWN = (0.01, 0.05, 0.1, 0.2)
"""Thresholds that are drawn over the number of classes."""
_COMPARED = 0.05
"""The threshold at which the rules are compared over the number of classes."""


def tiny_imagenet(draft: Draft) -> Finding:
    """Accuracy, correctness, drops and calibration error with 200 classes, the ablation, and drops by number of classes."""
    group = Group.published(draft.runs.need(TINY))
    combined, title = Group.measured(group.runs, _COMBINED), title_of(group.data)
    draft.plots += [
        group.plot(f"{title}: accuracy", ACCURACY),
        group.plot(f"{title}: label drops", LABEL_DROPS),
        group.plot(f"{title}: calibration error", ECE),
    ]
    _claims(draft, title, group)
    _ablation(draft, title, combined)
    for part in (group, combined):
        rows = f"{part.runs[0].logits()[0].shape[1]:,}" if part.kept else f"{part.runs[0].rows():,}"
        draft.table += [(rule, rows, *_cells(part, rule)) for rule in part.metrics]
    others = published(draft.runs, REPRODUCED)
    for other in others:
        draft.add(other, LABEL_DROPS)
    draft.add(group, ACCURACY, MONOTONE, NEVER_CORRECT, LABEL_DROPS, ECE)
    draft.add(combined, ACCURACY, LABEL_DROPS, ECE, name=f"{group.data}, ablation")
    _by_classes(draft, [*others, group])
    return draft.finding(
        note="The paper has no such data; its claims about other data sets are checked. The network is the MSDNet for "
        "ImageNet with 5 exits and three scales (recipe `tiny-imagenet-msdnet-4`); the published validation images are the "
        "test rows. It fits its 95,000 training images almost perfectly (loss of the last exit .006 in the last epoch of its "
        "`log.csv`), so that its accuracy is low and its confidence too high. Its exit 4 is less accurate than exit 3. Drops "
        "over the number of classes compare different networks: those for CIFAR have 7 exits, and more exits leave more "
        "chances to drop.",
        headings=("rule", "rows", "accuracy, first and last", "monotone", "never correct", "≥ .05", "≥ .1", "ECE"),
    )


def _cells(group: Group, rule: str) -> tuple[str, ...]:
    right, error = group.curve(rule, ACCURACY), group.curve(rule, ECE)
    counts = [f"{group.curve(rule, metric)[0].mean:.1f} %" for metric in (MONOTONE, NEVER_CORRECT)]
    drops = [f"{group.at(rule, LABEL_DROPS, limit).mean:.2f} %" for limit in (0.05, 0.1)]
    return f"{right[0].mean:.1f}, {right[-1].mean:.1f} %", *counts, *drops, f"{error[0].mean:.3f}, {error[-1].mean:.3f}"


def _claims(draft: Draft, title: str, group: Group) -> None:
    right, drops, error = (group.curves(metric) for metric in (ACCURACY, LABEL_DROPS, ECE))
    draft.claim(
        f"{title}: the product keeps the accuracy (at most {KEPT:g} point lower at every exit)",
        all(mine.mean >= base.mean - KEPT for mine, base in zip(right["product"], right["latest"], strict=True)),
        "; ".join(f"{rule} {means(values)} %" for rule, values in right.items()),
    )
    for rule in ("latest", "caching"):
        other = "the backbone" if rule == "latest" else rule
        draft.claim(
            f"{title}: fewer drops of any size under the product than under {other}",
            at_most(drops["product"], drops[rule]),
            f"{means(drops['product'], 2)} % and {means(drops[rule], 2)} %",
        )
    monotone = {rule: group.curve(rule, MONOTONE)[0].mean for rule in PLAIN}
    draft.claim(
        f"{title}: product and caching have more monotone inputs than the backbone",
        min(monotone["product"], monotone["caching"]) > monotone["latest"],
        listed(monotone, digits=1),
    )
    draft.claim(
        f"{title}: the product's calibration error is above the backbone's at the first exit",
        error["product"][0].mean > error["latest"][0].mean,
        "; ".join(f"{rule} {means(values, 3)}" for rule, values in error.items()),
    )


def _ablation(draft: Draft, title: str, group: Group) -> None:
    last = {rule: values[-1].mean for rule, values in group.curves(ACCURACY).items()}
    drops = group.all_at(LABEL_DROPS, 0.1)
    good = [rule for rule in last if last[rule] >= max(last.values()) - GOOD_ACCURACY and drops[rule] <= GOOD_DROPS]
    relu = ["product, ReLU", "mixture, ReLU"]
    draft.claim(
        f"{title}: the ReLU product is the only combination good in both accuracy and drops (caption of the paper's ablation)",
        good == relu[:1],
        f"good are {', '.join(good) or 'none'}: within {GOOD_ACCURACY:g} point of the best last exit, and at most "
        f"{GOOD_DROPS:g} % dropping by .1",
    )
    draft.claim(f"{title}: only ReLU, multiplied or averaged, is good in both (its text)", good == relu, "as listed")


def _by_classes(draft: Draft, groups: list[Group]) -> None:
    """Drops over the number of classes: of the product at several thresholds, and of the three rules at one."""
    groups = sorted(groups, key=lambda group: group.runs[0].classes())
    counts = [group.runs[0].classes() for group in groups]
    marks = tuple((float(count), f"{count}") for count in dict.fromkeys(counts))
    of_product = {f"≥ {limit:g}": [group.at("product", LABEL_DROPS, limit) for group in groups] for limit in _DRAWN}
    of_rules = {rule: [group.at(rule, LABEL_DROPS, _COMPARED) for group in groups] for rule in PLAIN}
    for name, curves in (("under the product", of_product), (f"by ≥ {_COMPARED:g}", of_rules)):
        drawn = [line(label, curves[label], look, x=counts) for label, look in looks(tuple(curves)).items()]
        draft.plots.append(Plot(f"Drops {name}", "classes", LABEL_DROPS.axis, tuple(drawn), kind="symlog", x_marks=marks))
    draft.numbers["drops_by_classes"] = {
        f"{count}": group.all_at(LABEL_DROPS, _COMPARED) for count, group in zip(counts, groups, strict=True)
    }
    words = "; ".join(
        f"{title_of(group.data)}, {count} classes: {means(group.curve('product', LABEL_DROPS), 2)} %"
        for count, group in zip(counts, groups, strict=True)
    )
    limits = groups[0].limits(LABEL_DROPS)
    fewer = [
        all(less.mean <= more.mean for more, less in pairwise([group.at("product", LABEL_DROPS, limit) for group in groups]))
        for limit in limits
    ]
    draft.claim("the more classes, the fewer drops by .05 or more under the product", all(fewer[1:]), words)
    draft.claim("the more classes, the fewer drops of any size under the product", all(fewer), "from .01, as listed")
