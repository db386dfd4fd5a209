"""Appendix B.7: how many inputs see their prediction set grow on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anytime.combine import Latest, Product
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Finding, over_seeds
from anytime.reproduce.measure import groups_in_words, names_of, plain_numbers, stored, title_of
from anytime.reproduce.needs import MSDNET
from anytime.reproduce.runs import Run
from anytime.reproduce.studies.rises import curves_and_claims


def study(context: Context) -> Finding:
    """Rises of the set size under the three rules, and how much sets differ between inputs at all."""
    groups = {("msdnet", data): runs for data, runs in context.runs.sets(MSDNET).items()}
    panels, claims = curves_and_claims(
        groups, "set_size_rise_percent", "grows by at least, classes", "fewer rises under the product", others=("latest",)
    )
    alike = {
        data: {rule.__class__.__name__.lower(): _alike(runs, rule) for rule in (Latest(), Product())}
        for (_, data), runs in groups.items()
    }
    words = "; ".join(
        f"{title_of(data)}: at one exit, {found['latest']:.0f} % (latest) and {found['product']:.0f} % (product) of the sets "
        f"are within one class of the most frequent size; under latest {_by_seed(groups['msdnet', data])} of the inputs grow "
        "by 2 or more, seed by seed"
        for data, found in alike.items()
    )
    return context.finding(
        runs=names_of(*groups.values()),
        rows=f"{groups_in_words(groups)}; a fifth of the rows calibrates the sets and is not measured",
        note="The paper's figure was not read off; its claim is checked at every threshold, on the mean over seeds. The "
        "backbone's number hangs on chance: a saturated softmax leaves the size of a set to the penalty on ranks, so that "
        "all inputs have nearly the same size and grow together wherever an exit's threshold happens to be higher than "
        f"another's. {words}. Set sizes of the backbone therefore say little about single inputs; this is our own "
        "observation.",
        panels=panels,
        claims=claims,
        numbers={" ".join(key): plain_numbers(stored(runs), ("set_size_rise_percent",)) for key, runs in groups.items()}
        | {"percent_of_sets_within_one_of_the_most_frequent_size": alike},
    )


def _alike(runs: Sequence[Run], rule: Latest | Product) -> float:
    """Percent of the sets of one exit whose size is at most one off the most frequent, over exits and seeds."""
    sets, shares = Raps(quantile="corrected"), []
    for run in runs:
        logits, labels = run.logits()
        log_probs = rule(logits).log_probs
        ascending = sort_rows(log_probs)
        rank, cut = rank_of(log_probs, ascending, labels), len(labels) // 5
        draws = torch.rand(len(logits), len(labels), generator=torch.Generator().manual_seed(0))
        limit = sets.threshold(sets.label_score(ascending[:, :cut], rank[:, :cut], draws[:, :cut]))
        size = sets.size(ascending[:, cut:], limit, draws[:, cut:])
        near = (size - size.mode(1, keepdim=True).values).abs() <= 1
        shares.append(100 * float(near.double().mean()))
    return over_seeds(shares).mean


def _by_seed(runs: Sequence[Run]) -> str:
    return ", ".join(f"{run.figures()['latest']['set_size_rise_percent']['2']:.1f} %" for run in runs)
