"""Appendix B.1.1: falls of the probability of the answer given at the last exit, which needs no labels."""

from __future__ import annotations

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Finding
from anytime.reproduce.measure import backbones, groups_in_words, names_of, plain_numbers, stored
from anytime.reproduce.studies.rises import curves_and_claims


def study(context: Context) -> Finding:
    """Falls under the three rules, for MSDNet, and for IMTA where there is a run of it."""
    groups = backbones(context.runs)
    panels, claims = curves_and_claims(
        groups, "final_drop_percent", "falls by at least", "fewer falls under the product than under the backbone or caching"
    )
    return context.finding(
        runs=names_of(*groups.values()),
        rows=groups_in_words(groups),
        note="The paper's figure was not read off; its claim is checked at every threshold. The final answer is each rule's "
        "own.",
        panels=panels,
        claims=claims,
        numbers={" ".join(key): plain_numbers(stored(runs), ("final_drop_percent",)) for key, runs in groups.items()},
    )
