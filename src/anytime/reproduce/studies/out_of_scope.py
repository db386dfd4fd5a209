"""Our own: queries that belong to no class. Do the product's support or the size of a prediction set detect them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anytime.conformal import Raps, fit_conformal_sets
from anytime.errors import MissingFileError
from anytime.metrics import follow
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, each_over_seeds
from anytime.reproduce.group import seeds_in_words, title_of
from anytime.reproduce.needs import OUT_OF_SCOPE
from anytime.reproduce.plots import Plot, line, over_exits
from anytime.reproduce.runs import Run
from anytime.reproduce.studies.text import FITTED, text_rules

SUPPORT, APS, RAPS, ENTROPY, DOUBT = "support size", "APS set size", "RAPS set size", "entropy", "1 − largest probability"
LOGIT = "− largest logit"
GOOD = 0.9
"""An AUROC that we call good."""
_RULES = ("latest", "caching", "product", FITTED)
_DRAWN = (
    ("latest", LOGIT),
    ("latest", DOUBT),
    ("latest", RAPS),
    ("product", DOUBT),
    ("product", SUPPORT),
    ("product", RAPS),
)

Scores = Mapping[tuple[str, str], Tensor]
"""By rule and score, `(exits, rows)`: the higher, the less a row seems to belong to a class."""


def out_of_scope(draft: Draft) -> Finding:
    """How well each score separates queries without a class from test rows, at each exit."""
    runs = [run for run in draft.runs.need(OUT_OF_SCOPE) if run.outside_logits() is not None]
    if not runs:
        raise MissingFileError(
            f"the runs in {draft.runs.where} have no logits of out-of-scope queries",
            expected="oos-sample.npz in a run on CLINC150",
            fix="publish the run again: python results/publish.py RUN FOLDER/NAME",
            path=draft.runs.where,
        )
    found = [_scores(run) for run in runs]
    keys = tuple(found[0][0])
    areas = {key: each_over_seeds([auroc(outside[key], inside[key]).tolist() for inside, outside in found]) for key in keys}
    last = {key: values[-1].mean for key, values in areas.items()}
    best = max(last, key=lambda key: last[key])
    draft.used += runs
    draft.plots += [
        over_exits("Detection", "AUROC", [line(", ".join(key), areas[key], look) for look, key in enumerate(_DRAWN)]),
        _both("Support of the product", ("product", SUPPORT), found),
        _both("RAPS sets of the product", ("product", RAPS), found),
    ]
    for what, key in (("support", ("product", SUPPORT)), ("RAPS set", ("product", RAPS))):
        claim = f"the size of the product's {what} detects them at the last exit (an AUROC of {GOOD:g} or more)"
        draft.claim(claim, last[key] >= GOOD, f"{last[key]:.3f}")

    def words(*keys: tuple[str, str]) -> str:
        return "; ".join(f"{', '.join(key)} {last[key]:.3f}" for key in keys)

    draft.claim(
        "at the last exit they detect them better than the network's own largest probability",
        max(last["product", SUPPORT], last["product", RAPS]) > last["latest", DOUBT],
        f"{words(('product', SUPPORT), ('product', RAPS), ('latest', DOUBT))}; best of all {words(best)}",
    )
    draft.table += [(", ".join(key), *(f"{value.mean:.3f}" for value in values)) for key, values in areas.items()]
    draft.numbers = {", ".join(key): [value.mean for value in values] for key, values in areas.items()}
    logits, outside = runs[0].logits()[0], runs[0].outside_logits()
    assert outside is not None
    return draft.finding(
        rows=f"{title_of(runs[0].data)}: {logits.shape[1]:,} test rows and {outside.shape[1]:,} out-of-scope queries whose "
        f"logits were kept, {seeds_in_words(runs)}; sets are calibrated and powers fitted on "
        f"{runs[0].logits('val')[0].shape[1]:,} validation rows",
        note="The AUROC is the probability that a query without a class has a higher score than one with a class; equal "
        "scores count half. Sets are for 95 %, with the score of the paper's released code and an exact quantile; APS has no "
        "penalty on ranks. A row that collapsed has the support of the softmax that it falls back to, all classes. The "
        "network never saw an out-of-scope query, and nothing was fitted on one.",
        headings=("score", *(f"exit {exit}" for exit in range(1, len(logits) + 1))),
    )


def auroc(outside: Tensor, inside: Tensor) -> Tensor:
    """The probability at each exit that a score of `outside` is higher than one of `inside`; equal ones count half.

    Args:
        outside: `(exits, rows)`.
        inside: `(exits, other rows)`.

    Example:
        >>> auroc(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([0.8750], dtype=torch.float64)
    """
    ascending = inside.double().sort(-1).values.contiguous()
    places = outside.double().contiguous()
    below, to = (torch.searchsorted(ascending, places, right=right).double() for right in (False, True))
    return ((below + to) / 2).mean(-1) / inside.shape[-1]


def _scores(run: Run) -> tuple[Scores, Scores]:
    """The scores of the test rows and of the queries without a class."""
    held_out, known = run.logits("val")
    outside = run.outside_logits()
    assert outside is not None
    rules = text_rules(held_out, known)
    inside: dict[tuple[str, str], Tensor] = {}
    beyond: dict[tuple[str, str], Tensor] = {}
    for name in _RULES:
        rule = rules[name]
        raps = {RAPS: Raps(), APS: Raps(lam_reg=0)}
        sets = {kind: fit_conformal_sets(held_out, known, rule=rule, raps=each) for kind, each in raps.items()}
        for scores, logits in ((inside, run.logits()[0]), (beyond, outside)):
            prediction = rule(logits)
            seen = follow(prediction)
            scores[name, DOUBT], scores[name, ENTROPY] = 1 - seen.confidence, seen.entropy
            if name == "latest":
                scores[name, LOGIT] = -logits.amax(-1)
            if name == "product":  # under the others every class keeps some probability
                scores[name, SUPPORT] = seen.support
            for kind, fitted in sets.items():
                scores[name, kind] = fitted.sizes(prediction.log_probs)
    return inside, beyond


def _both(title: str, key: tuple[str, str], found: Sequence[tuple[Scores, Scores]]) -> Plot:
    """The mean of a size over test rows and over queries without a class."""
    lines = []
    for side, name, look in ((0, "with a class", 6), (1, "out of scope", 7)):
        means = each_over_seeds([pair[side][key].double().mean(1).tolist() for pair in found])
        lines.append(line(name, means, look))
    return over_exits(title, "classes", lines, zero=True)
