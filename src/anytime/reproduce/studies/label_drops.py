"""Figure 4: how many inputs lose how much of the true class's probability on the way."""

from __future__ import annotations

from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Comparison, Finding, Panel, over_seeds
from anytime.reproduce.measure import (
    PLAIN,
    against_paper,
    backbones,
    by_limit,
    curve,
    groups_in_words,
    names_of,
    plain_numbers,
    stored,
    title_of,
)


def study(context: Context) -> Finding:
    """Falls under the three rules, for MSDNet, and for IMTA where there is a run of it."""
    groups = backbones(context.runs)
    panels: list[Panel] = []
    comparisons: list[Comparison] = []
    claims: list[Claim] = []
    for (network, data), runs in groups.items():
        figures = stored(runs)
        title = f"{paper.NETWORKS[network]}, {title_of(data)}"
        known = {rule: paper.LABEL_DROPS[network, data, rule] for rule in PLAIN if (network, data, rule) in paper.LABEL_DROPS}
        panels.append(by_limit(title, "falls by at least", figures, "label_drop_percent", paper_values=known))
        ours = {rule: curve(figures, rule, "label_drop_percent") for rule in PLAIN}
        for rule, theirs in known.items():
            comparisons += against_paper(
                lambda place, title=title, rule=rule: f"{title}, {rule}, ≥ {paper.DROPS[place]}",  # type: ignore[misc]
                ours[rule],
                theirs,
                tolerance=paper.DROP_TOLERANCE,
                unit="%",
            )
        if (network, data) == ("msdnet", "cifar100"):
            for limit, bound in paper.LABEL_DROP_BOUNDS.items():
                value = over_seeds([each["product"]["label_drop_percent"][str(limit)] for each in figures])
                comparisons.append(
                    Comparison(f"{title}, product, ≥ {limit}, the bound asked for", None, value, at_most=bound, unit="%")
                )
        fewer = all(mine.mean <= base.mean for mine, base in zip(ours["product"], ours["latest"], strict=True))
        claims.append(
            Claim(
                f"{title}: fewer falls of any size under the product than under the backbone",
                fewer,
                f"≥ .01: {ours['product'][0].mean:.2f} % and {ours['latest'][0].mean:.2f} %; ≥ .5: "
                f"{ours['product'][-1].mean:.2f} % and {ours['latest'][-1].mean:.2f} %",
            )
        )
    return context.finding(
        runs=names_of(*groups.values()),
        rows=groups_in_words(groups),
        note="We count falls at or above a threshold, as the paper's text defines; its code counts those above (see the "
        "study deviations). The paper's curves were read off on a logarithmic axis, to ±5 % of a value. The tolerance is "
        "absolute, hence lenient for the product's small shares; the bounds are the sharper test.",
        panels=tuple(panels),
        comparisons=tuple(comparisons),
        claims=tuple(claims),
        numbers={
            f"{network} {data}": plain_numbers(stored(runs), ("label_drop_percent",))
            for (network, data), runs in groups.items()
        },
    )
