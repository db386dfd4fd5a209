"""Our own: queries that belong to no class. Do the product's support or the size of a prediction set tell them apart?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from anytime.conformal import Raps, fit_conformal_sets
from anytime.errors import MissingFileError
from anytime.metrics import follow
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Measured, Panel, each_over_seeds
from anytime.reproduce.measure import line, names_of, title_of
from anytime.reproduce.needs import OUT_OF_SCOPE
from anytime.reproduce.runs import Run
from anytime.reproduce.studies.text import FITTED, text_rules

SUPPORT, APS, RAPS, ENTROPY, DOUBT = "support size", "APS set size", "RAPS set size", "entropy", "1 − largest probability"
LOGIT = "− largest logit"
GOOD = 0.9
"""An AUROC that we call telling apart."""
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


def study(context: Context) -> Finding:
    """How well each score tells queries without a class from test rows, at each exit."""
    runs = [run for run in context.runs.need(OUT_OF_SCOPE) if run.outside_logits() is not None]
    if not runs:
        raise MissingFileError(
            f"the runs in {context.runs.where} have no logits of out-of-scope queries",
            expected="oos-sample.npz in a run on CLINC150",
            fix="publish the run again: python results/publish.py RUN FOLDER/NAME",
            path=context.runs.where,
        )
    found = [_scores(run) for run in runs]
    keys = tuple(found[0][0])
    areas = {key: each_over_seeds([auroc(outside[key], inside[key]).tolist() for inside, outside in found]) for key in keys}
    exits = len(areas[keys[0]])
    last = {key: values[-1].mean for key, values in areas.items()}
    best = max(last, key=lambda key: last[key])
    logits, outside = runs[0].logits()[0], runs[0].outside_logits()
    assert outside is not None
    return context.finding(
        runs=names_of(runs),
        rows=f"{title_of(runs[0].data)}: {logits.shape[1]:,} test rows and {outside.shape[1]:,} out-of-scope queries whose "
        f"logits were kept, {len(runs)} seed{'s' if len(runs) > 1 else ''}; sets are calibrated and powers fitted on "
        f"{runs[0].logits('val')[0].shape[1]:,} validation rows",
        note="The area under the ROC curve is the probability that a query without a class has the higher score than one with "
        "a class; equal scores count half. Sets are for 95 %, as the paper's released code computes them; APS is without the "
        "penalty on ranks. A row that collapsed has the support of the softmax that it falls back on, all classes. The "
        "network never saw an out-of-scope query, and nothing was fitted on one.",
        panels=(
            Panel(
                "Told apart",
                "exit",
                "area under the ROC curve",
                tuple(line(", ".join(key), areas[key], look) for look, key in enumerate(_DRAWN)),
                exits=exits,
            ),
            _both("Support of the product", ("product", SUPPORT), found),
            _both("RAPS sets of the product", ("product", RAPS), found),
        ),
        claims=(
            _tells("the size of the product's support", ("product", SUPPORT), last),
            _tells("the size of the product's RAPS set", ("product", RAPS), last),
            Claim(
                "at the last exit they do so better than the network's own largest probability",
                max(last["product", SUPPORT], last["product", RAPS]) > last["latest", DOUBT],
                f"{_words(last, (('product', SUPPORT), ('product', RAPS), ('latest', DOUBT)))}; best of all "
                f"{_words(last, (best,))}",
            ),
        ),
        numbers={", ".join(key): [value.mean for value in values] for key, values in areas.items()},
        headings=("score", *(f"exit {exit}" for exit in range(1, exits + 1))),
        table=tuple((", ".join(key), *(f"{value.mean:.3f}" for value in values)) for key, values in areas.items()),
    )


def auroc(outside: Tensor, inside: Tensor) -> Tensor:
    """The probability that a score of `outside` is higher than one of `inside`, equal ones counted half, at each exit.

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
    held, known = run.logits("val")
    outside = run.outside_logits()
    assert outside is not None
    rules = text_rules(held, known)
    inside: dict[tuple[str, str], Tensor] = {}
    beyond: dict[tuple[str, str], Tensor] = {}
    for name in _RULES:
        rule = rules[name]
        sets = {
            kind: fit_conformal_sets(held, known, rule=rule, raps=raps)
            for kind, raps in ((RAPS, Raps()), (APS, Raps(lam_reg=0)))
        }
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


def _both(title: str, key: tuple[str, str], found: Sequence[tuple[Scores, Scores]]) -> Panel:
    """The mean of a size over test rows and over queries without a class."""
    means: list[list[Measured]] = [
        each_over_seeds([pair[side][key].double().mean(1).tolist() for pair in found]) for side in (0, 1)
    ]
    names = ("with a class", "out of scope")
    lines = tuple(line(name, values, look) for name, values, look in zip(names, means, (6, 7), strict=True))
    return Panel(title, "exit", "classes", lines, exits=len(means[0]), zero=True)


def _tells(what: str, key: tuple[str, str], last: Mapping[tuple[str, str], float]) -> Claim:
    return Claim(
        f"{what} tells them apart at the last exit (an area of {GOOD:g} or more)", last[key] >= GOOD, f"{last[key]:.3f}"
    )


def _words(last: Mapping[tuple[str, str], float], keys: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{', '.join(key)} {last[key]:.3f}" for key in keys)
