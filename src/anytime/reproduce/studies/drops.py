"""Figure 4, B.1.1 and B.7: how many inputs lose probability or become less certain along the exits, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from anytime.combine import Latest, Product
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Comparison, Finding, at_most, listed, over_seeds
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
from anytime.reproduce.needs import MSDNET
from anytime.reproduce.runs import Run


def label_drops(draft: Draft) -> Finding:
    """Drops of the label's probability under the three rules, for MSDNet, and for IMTA if there is a run of it."""
    for group in backbones(draft.runs):
        ours, known = group.curves(LABEL_DROPS), paper.known(paper.LABEL_DROPS, group.runs[0])
        draft.plots.append(group.plot(group.title, LABEL_DROPS, known=known))
        for rule, theirs in known.items():
            names = [f"{group.title}, {rule}, ≥ {limit}" for limit in paper.DROPS]
            draft.compare(names, ours[rule], theirs, tolerance=paper.DROP_TOLERANCE, unit="%")
        if (group.runs[0].network, group.data) == ("msdnet", "cifar100"):
            for limit, bound in paper.LABEL_DROP_BOUNDS.items():
                what, value = f"{group.title}, product, ≥ {limit}, required bound", group.at("product", LABEL_DROPS, limit)
                draft.comparisons.append(Comparison(what, None, value, at_most=bound, unit="%"))
        draft.claim(
            f"{group.title}: fewer drops of any size under the product than under the backbone",
            at_most(ours["product"], ours["latest"]),
            f"≥ .01: {ours['product'][0].mean:.2f} % and {ours['latest'][0].mean:.2f} %; ≥ .5: "
            f"{ours['product'][-1].mean:.2f} % and {ours['latest'][-1].mean:.2f} %",
        )
        _add(draft, group, LABEL_DROPS)
    return draft.finding(
        note="We count drops at or above a threshold, as the paper's text defines them; its code counts those above (see the "
        "study deviations). The paper's curves were read off on a logarithmic axis, to ±5 % of a value. The tolerance is "
        "absolute, hence lenient for the product's small percentages; the bounds are the stricter test."
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
    for group in published(draft.runs, MSDNET):
        _compare_rules(draft, group, ENTROPY_RISES, "fewer rises under the product", ("latest",))
    return draft.finding(
        note="The paper's figure was not read off; its claim is checked at every threshold. Caching keeps the most confident "
        "answer, so its entropy hardly rises by construction; the paper compares with the backbone."
    )


def set_size_rise(draft: Draft) -> Finding:
    """How many inputs have a prediction set that grows along the exits, and how much set sizes differ between inputs."""
    alike: dict[str, dict[str, float]] = {}
    observed = []
    for group in published(draft.runs, MSDNET):
        _compare_rules(draft, group, SET_SIZE_RISES, "fewer rises under the product", ("latest",))
        near = alike[group.data] = {"latest": _alike(group.runs, Latest()), "product": _alike(group.runs, Product())}
        place = group.limits(SET_SIZE_RISES).index(2)
        rises = [values[place] for values in group.per_seed("latest", SET_SIZE_RISES)]
        observed.append(
            f"{title_of(group.data)}: at any one exit, {near['latest']:.0f} % (latest) and {near['product']:.0f} % (product) "
            f"of the sets are within one class of the most frequent size; under latest "
            f"{', '.join(f'{value:.1f} %' for value in rises)} of the inputs grow by 2 or more, seed by seed"
        )
    draft.numbers["percent_of_sets_within_one_of_the_most_frequent_size"] = alike
    found = draft.finding(
        note="The paper's figure was not read off; its claim is checked at every threshold, on the mean over seeds. The "
        "backbone's number depends on chance: under a saturated softmax the size of a set is decided by the penalty on ranks, "
        "so that all inputs have nearly the same size and grow together wherever the threshold of one exit happens to be "
        f"higher than that of another. {'; '.join(observed)}. The backbone's set sizes therefore tell little about single "
        "inputs; this is our own observation."
    )
    return replace(found, rows=f"{found.rows}; a fifth of the rows calibrates the sets and is not measured")


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


def _alike(runs: Sequence[Run], rule: Latest | Product) -> float:
    """Percent of sets whose size differs by at most one from the most frequent size of their exit, over exits and seeds."""
    sets, percents = Raps(quantile="corrected"), []
    for run in runs:
        logits, labels = run.logits()
        log_probs = rule(logits).log_probs
        ascending = sort_rows(log_probs)
        rank, cut = rank_of(log_probs, ascending, labels), len(labels) // 5
        draws = torch.rand(len(logits), len(labels), generator=torch.Generator().manual_seed(0))
        limit = sets.threshold(sets.label_score(ascending[:, :cut], rank[:, :cut], draws[:, :cut]))
        size = sets.size(ascending[:, cut:], limit, draws[:, cut:])
        near = (size - size.mode(1, keepdim=True).values).abs() <= 1
        percents.append(100 * float(near.double().mean()))
    return over_seeds(percents).mean
