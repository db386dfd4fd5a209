"""Figure 4, B.1.1 and B.7: how many inputs lose probability or become less certain along the exits, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, at_most, listed, over_seeds, with_deviation
from anytime.reproduce.group import (
    ENTROPY_RISES,
    FINAL_DROPS,
    LABEL_DROPS,
    SET_SIZE_RISES,
    Group,
    Metric,
    backbones,
    published,
    title_of,
)
from anytime.reproduce.needs import MSDNET, REPRODUCED
from anytime.reproduce.sets import SPLIT_WORDS, with_random_sets

_SMALL = 0.1
"""Up to this, a threshold is one of the paper's smaller ones."""


def label_drops(draft: Draft) -> Finding:
    """Drops of the label's probability under the three rules, for MSDNet, and for IMTA if there is a run of it."""
    for group in backbones(draft.runs):
        ours, known = group.curves(LABEL_DROPS), paper.known(paper.LABEL_DROPS, group.runs[0])
        draft.plots.append(group.plot(group.title, LABEL_DROPS, known=known))
        for rule, theirs in known.items():
            names = [f"{group.title}, {rule}, ≥ {limit}" for limit in paper.DROPS]
            bounded = rule == "product" and (paper.network(group.runs[0]), group.data) == ("msdnet", "cifar100")
            bounds = {paper.DROPS.index(limit): bound for limit, bound in paper.LABEL_DROP_BOUNDS.items()} if bounded else {}
            draft.compare(names, ours[rule], theirs, tolerance=paper.drop_tolerance, unit="%", bounds=bounds)
        for rule in ("product", "caching"):
            draft.claim(
                f"{group.title}: fewer drops of any size under {'the product' if rule == 'product' else rule} than under the "
                "backbone",
                at_most(ours[rule], ours["latest"]),
                f"≥ .01: {ours[rule][0].mean:.2f} % and {ours['latest'][0].mean:.2f} %; ≥ .5: "
                f"{ours[rule][-1].mean:.2f} % and {ours['latest'][-1].mean:.2f} %",
            )
        _against_caching(draft, group)
        _add(draft, group, LABEL_DROPS)
    return draft.finding(
        note="We count drops at or above a threshold, as the paper's text defines them; its code counts those above (see the "
        "study deviations). The paper's curves were read off on a logarithmic axis, to ±5 % of a value. The bounds, for the "
        "product on CIFAR-100, were required beforehand."
    )


def _against_caching(draft: Draft, group: Group) -> None:
    """The paper: fewer drops than caching with 100 classes; with 10, on par at small thresholds, fewer at large ones."""
    mine, cached, limits = *(group.curve(rule, LABEL_DROPS) for rule in ("product", "caching")), group.limits(LABEL_DROPS)
    words = "; ".join(
        f"≥ {limit:g}: {product.mean:.2f} % and {other.mean:.2f} %"
        for limit, product, other in zip(limits, mine, cached, strict=True)
    )
    if group.data != "cifar10":
        draft.claim(
            f"{group.title}: fewer drops of any size under the product than under caching", at_most(mine, cached), words
        )
        return
    small = [place for place, limit in enumerate(limits) if limit <= _SMALL]
    apart, allowed = max(abs(mine[place].mean - cached[place].mean) for place in small), paper.DROP_TOLERANCE
    draft.claim(
        f"{group.title}: on par with caching at thresholds up to {_SMALL:g} (within {allowed:g} points; the paper's own differ "
        "by up to 2.3)",
        apart <= allowed,
        words,
    )
    draft.claim(
        f"{group.title}: fewer drops under the product than under caching at larger thresholds",
        all(mine[place].mean <= cached[place].mean for place in range(len(limits)) if place not in small),
        f"above {_SMALL:g}, as listed",
    )


def final_answer_drops(draft: Draft) -> Finding:
    """Drops of the probability of the answer given at the last exit, which need no labels."""
    for group in backbones(draft.runs):
        _compare_rules(
            draft, group, FINAL_DROPS, "fewer drops under the product than under the backbone or caching", ("latest", "caching")
        )
    return draft.finding(
        note="The paper's figure was not read off; its claim is checked at every threshold. Each rule has its own final answer."
    )


def entropy_rise(draft: Draft) -> Finding:
    """How many inputs become less certain along the exits, measured by the entropy."""
    for group in published(draft.runs, REPRODUCED):
        _compare_rules(draft, group, ENTROPY_RISES, "fewer rises under the product", ("latest",))
    return draft.finding(
        note="The paper's figure was not read off; its claim is checked at every threshold. Caching keeps the most confident "
        "answer, so its entropy hardly rises by construction; the paper compares with the backbone."
    )


def set_size_rise(draft: Draft) -> Finding:
    """How many inputs have a prediction set that grows along the exits, and how much set sizes differ between inputs."""
    alike: dict[str, dict[str, float]] = {}
    observed = []
    for data, runs in draft.runs.by_data(MSDNET).items():
        group, splits = with_random_sets(runs)
        _compare_rules(draft, group, SET_SIZE_RISES, "fewer rises under the product", ("latest",))
        near = alike[data] = {
            rule: over_seeds([sets.alike for seed in splits[rule] for sets in seed]).mean for rule in ("latest", "product")
        }
        by_two = {rule: group.at(rule, SET_SIZE_RISES, 2) for rule in ("latest", "product")}
        observed.append(
            f"{title_of(data)}: at any one exit, {near['latest']:.0f} % (latest) and {near['product']:.0f} % (product) "
            f"of the sets are within one class of the most frequent size; over seeds and splits "
            f"{with_deviation(by_two['latest'], 1)} % (latest) and {with_deviation(by_two['product'], 1)} % (product) of the "
            "inputs grow by 2 or more"
        )
    draft.numbers["percent_of_sets_within_one_of_the_most_frequent_size"] = alike
    found = draft.finding(
        note="The paper's figure was not read off; its claim is checked at every threshold, on the mean over seeds and splits. "
        "The backbone's number depends on chance: under a saturated softmax the size of a set is decided by the penalty on "
        "ranks, so that all inputs have nearly the same size and grow together wherever the threshold of one exit happens to "
        f"be higher than that of another. {'; '.join(observed)}. The backbone's set sizes therefore tell little about single "
        "inputs; this is our own observation."
    )
    return replace(found, rows=f"{found.rows}; {SPLIT_WORDS}")


def _add(draft: Draft, group: Group, metric: Metric) -> None:
    draft.add(group, metric, name=f"{group.runs[0].network} {group.data}")


def _compare_rules(draft: Draft, group: Group, metric: Metric, what: str, others: Sequence[str]) -> None:
    """Draw a metric over thresholds, and check that the product is at or below `others` at every threshold."""
    ours, limits = group.curves(metric), group.limits(metric)
    draft.plots.append(group.plot(group.title, metric))
    draft.claim(
        f"{group.title}: {what}",
        all(at_most(ours["product"], ours[rule]) for rule in others),
        "; ".join(f"≥ {limit:g}: {listed(group.all_at(metric, limit))}" for limit in (limits[0], limits[-1])),
    )
    _add(draft, group, metric)
