"""The table and the chart of a certificate: what was observed on its rows, and what it bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytime.display.chart import Axis, Chart, Look, Series, scattered
from anytime.display.numbers import exact, number, rounded_down, rounded_up
from anytime.display.scale import LinearScale, linear
from anytime.display.table import Table

if TYPE_CHECKING:
    from anytime.calibrate.certify import Certificate, ChoiceCertificate

_LOOKS = {"observed": Look("s0", "circle"), "bound": Look("s2", "diamond"), "bound, both at once": Look("s4", "square")}


def certificate_table(known: Certificate) -> Table:
    """One row per guarantee: what was observed, the bound, and the bound if both are to hold at once."""
    sign = ">" if known.strict else "≥"
    lost, kept = 100 * known.drops / known.rows, 100 * (1 - known.losses / known.rows)
    drops = rounded_up(known.drop_bound), rounded_up(known.joint_drop_bound)
    monotone = rounded_down(known.monotone_bound), rounded_down(known.joint_monotone_bound)
    return Table(
        f"{known.text}: {known.rows:,} rows, {100 * known.confidence:g} % confidence",
        ("inputs", "observed", "bound", "both at once"),
        (
            (f"drop {sign} {known.drop:g}", exact(lost), *(f"at most {bound}" for bound in drops)),
            ("correct stays correct", exact(kept), *(f"at least {bound}" for bound in monotone)),
        ),
    )


def certificate_chart(known: Certificate) -> Chart:
    """The observed percentages of inputs that get worse, below their bounds."""
    rows = known.rows
    found = {
        "observed": (known.drops / rows, known.losses / rows),
        "bound": (known.drop_bound, 1 - known.monotone_bound),
        "bound, both at once": (known.joint_drop_bound, 1 - known.joint_monotone_bound),
    }
    series = tuple(
        scattered(Series(name, (1.0, 2.0), tuple(100 * value for value in values), _LOOKS[name], (name, name)))
        for name, values in found.items()
    )
    sign = ">" if known.strict else "≥"
    marks = ((1.0, f"drop {sign} {known.drop:g}"), (2.0, "right, then wrong"))
    most = 100 * max(found["bound, both at once"])
    return Chart(
        f"Percent of inputs that get worse, observed and at most with {100 * known.confidence:g} % confidence",
        Axis("between two exits", LinearScale(0.5, 2.5, 1.0), marks),
        Axis("% of inputs", linear((0.0, most), zero=True)),
        series,
    )


def choice_table(known: ChoiceCertificate) -> Table:
    """One row per tested rule."""
    sign = ">" if known.strict else "≥"
    rows = zip(known.rules, known.drops, known.p_values, known.passed, strict=True)
    return Table(
        f"drops of at most {100 * known.at_most:g} % of inputs: {known.rows:,} rows, {100 * known.confidence:g} % confidence",
        ("rule", f"drop {sign} {known.drop:g}", "p", "certified"),
        tuple((rule, exact(100 * drops / known.rows), number(p), "yes" if ok else "no") for rule, drops, p, ok in rows),
    )
