"""Appendix B.7: how many inputs grow less certain on the way, by entropy."""

from __future__ import annotations

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Finding
from anytime.reproduce.measure import groups_in_words, names_of, plain_numbers, stored
from anytime.reproduce.needs import MSDNET
from anytime.reproduce.studies.rises import curves_and_claims


def study(context: Context) -> Finding:
    """Rises of entropy under the three rules."""
    groups = {("msdnet", data): runs for data, runs in context.runs.sets(MSDNET).items()}
    panels, claims = curves_and_claims(
        groups, "entropy_rise_percent", "rises by at least, nats", "fewer rises under the product", others=("latest",)
    )
    return context.finding(
        runs=names_of(*groups.values()),
        rows=groups_in_words(groups),
        note="The paper's figure was not read off; its claim is checked at every threshold. Caching keeps the most "
        "confident answer, so its entropy hardly rises by construction; the paper compares with the backbone.",
        panels=panels,
        claims=claims,
        numbers={" ".join(key): plain_numbers(stored(runs), ("entropy_rise_percent",)) for key, runs in groups.items()},
    )
