"""What the studies of falls and rises share: a curve over thresholds, and a claim that one rule lies below others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anytime.reproduce import paper
from anytime.reproduce.finding import Claim, Panel
from anytime.reproduce.measure import PLAIN, by_limit, curve, limits, stored, title_of
from anytime.reproduce.runs import Run


def curves_and_claims(
    groups: Mapping[tuple[str, str], Sequence[Run]],
    key: str,
    x_title: str,
    what: str,
    *,
    others: Sequence[str] = ("latest", "caching"),
) -> tuple[tuple[Panel, ...], tuple[Claim, ...]]:
    """For each network and data set the panel, and whether the product lies at or below `others` at every threshold.

    Args:
        groups: Runs by network and data set.
        key: The figure, percent of inputs by threshold.
        x_title: Of the panel.
        what: The claim in words.
        others: The rules to compare with.
    """
    panels, claims = [], []
    for (network, data), runs in groups.items():
        figures = stored(runs)
        title = f"{paper.NETWORKS[network]}, {title_of(data)}"
        panels.append(by_limit(title, x_title, figures, key))
        ours = {rule: curve(figures, rule, key) for rule in PLAIN}
        below = all(
            mine.mean <= theirs.mean for rule in others for mine, theirs in zip(ours["product"], ours[rule], strict=True)
        )
        places = limits(figures, key)
        detail = "; ".join(
            f"≥ {places[at]:g}: " + ", ".join(f"{rule} {ours[rule][at].mean:.2f} %" for rule in PLAIN)
            for at in (0, len(places) - 1)
        )
        claims.append(Claim(f"{title}: {what}", below, detail))
    return tuple(panels), tuple(claims)
