"""Tuning: every rule of the family measured on held-out rows, and the Pareto set among them.

Calibrated beliefs sometimes drop when new information arrives, so few drops and good calibration cannot both be had in full.
`tune` shows what is possible: it fits the family on some rows, measures it on the others, and finds the rules that no other
dominates in mean accuracy, drops, ECE and NLL. `Frontier.choose` minimises one metric under bounds on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytime.calibrate.certify import ChoiceCertificate, Control, certify_choice, check_rows
from anytime.calibrate.measure import drop_name, measure
from anytime.calibrate.tuning.family import PENALTIES, members
from anytime.calibrate.tuning.figures import chain_table, frontier_figure
from anytime.calibrate.tuning.tuned import TunedRule, unseen
from anytime.checks import check_fraction, check_number, check_seed, fingerprints
from anytime.combine import Rule, parse_rule
from anytime.combine.advice import FEW_CLASSES
from anytime.display.plot import plot_chart
from anytime.display.table import Displayed, Table
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.threads import one_thread_for_few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALLOWANCE = 0.01
"""The mean accuracy that an objective may cost by default."""
FEWEST = 100
"""Fewer rows cannot resolve fractions of a few percent."""
REFERENCES = ("latest", "caching", "caching at T", "product", "fitted product, λ = 3")
"""Candidates to compare any other with: the paper's rules, and their fitted versions."""

Progress = Callable[[int, int], None]
Bounds = Mapping[str, float]


@dataclass(frozen=True)
class Candidate:
    """One rule and its metrics.

    Attributes:
        name: Short, for tables.
        family: The part of the family it belongs to.
        text: The rule, as `anytime.parse_rule` reads it.
        metrics: Means over the exits of `accuracy`, `ece` and `nll`; `drop_0.1` is the fraction of inputs that drop by 0.1.
    """

    name: str
    family: str
    text: str
    metrics: Mapping[str, float]

    @property
    def rule(self) -> Rule[Any]:
        """The rule."""
        return parse_rule(self.text)

    def dominates(self, other: Candidate, metrics: Sequence[str]) -> bool:
        """Whether it is at least as good in all of these metrics, and better in one."""
        mine, theirs = ([_cost(candidate, name) for name in metrics] for candidate in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, eq=False)
class Frontier(Displayed, Fitted, kind="frontier", version=2):
    """The result of `tune`; save it to choose again later.

    Args:
        names, families, texts: Of the candidates.
        columns: The metrics of the candidates on the choosing rows, by name.
        drops: The drops that were counted; the first one defines the Pareto set.
        strict: Whether only drops above these count.
        fitting_rows: The number of rows the family was fitted on.
        choosing_rows: The number of other rows that gave the metrics.
        seed: Of the split.
        seen: Fingerprints of all these rows.
    """

    names: tuple[str, ...]
    families: tuple[str, ...]
    texts: tuple[str, ...]
    columns: dict[str, tuple[float, ...]]
    drops: tuple[float, ...]
    strict: bool
    fitting_rows: int
    choosing_rows: int
    seed: int
    seen: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = {len(values) for values in (self.names, self.families, self.texts, *self.columns.values())}
        if lengths != {len(self.names)} or "latest" not in self.names:
            raise OptionError(
                "the columns of the frontier differ in length", expected="every metric of every candidate", fix="tune again"
            )

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All rules that were tried."""
        rows = zip(self.names, self.families, self.texts, *self.columns.values(), strict=True)
        return tuple(
            Candidate(name, family, text, dict(zip(self.columns, values, strict=True))) for name, family, text, *values in rows
        )

    @property
    def objectives(self) -> tuple[str, ...]:
        """The metrics that define the Pareto set."""
        return ("accuracy", drop_name(self.drops[0]), "ece", "nll")

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """The candidates that no other dominates, by increasing drops; the first of equals."""
        kept: dict[tuple[float, ...], Candidate] = {}
        everyone = self.candidates
        for candidate in everyone:
            if not any(other.dominates(candidate, self.objectives) for other in everyone):
                kept.setdefault(tuple(candidate.metrics[name] for name in self.objectives), candidate)
        return tuple(sorted(kept.values(), key=lambda candidate: candidate.metrics[drop_name(self.drops[0])]))

    @property
    def floor(self) -> dict[str, float]:
        """The default lower bounds: the accuracy of the network (`latest`) minus one point.

        Without them the rule with the smallest ECE is often one that predicts nearly nothing, with matching confidence.
        """
        return {"accuracy": self.columns["accuracy"][self.names.index("latest")] - ALLOWANCE}

    def table(self, least: str = "ece") -> Table:
        """The rules of `chain`, which trade drops for one metric: `ece`, `nll` or `error`. `records` has the Pareto set."""
        return chain_table(self, least)

    def plot(self, metric: str = "ece", *, ax: Axes | None = None) -> Axes:
        """Draw every rule by how often it drops and by a metric, with matplotlib (extra `plot`).

        Args:
            metric: `ece`, `accuracy` or `nll`.
            ax: Axes to draw into; new ones by default.
        """
        figure = frontier_figure(self, metric)
        return plot_chart(figure.chart, title=f"{figure.title} and drops", ax=ax)

    def records(self) -> list[dict[str, str | float]]:
        """The Pareto set as one record per rule."""
        return [{"name": one.name, "family": one.family, **one.metrics, "rule": one.text} for one in self.pareto]

    def chain(self, *, least: str = "ece", drop: float | None = None, at_least: Bounds | None = None) -> tuple[Candidate, ...]:
        """The candidates that trade drops for one metric: by increasing drops, each better in it than all before.

        Args:
            least: The metric to minimise, or `error` for 1 - accuracy.
            drop: One of `drops`; by default the first.
            at_least: Lower bounds by metric, as in `choose`.
        """
        name, lower = drop_name(self.drops[0] if drop is None else drop), self.floor if at_least is None else at_least
        self._check_metrics(least, (name, *lower))
        found: list[Candidate] = []
        for one in sorted(self._within({}, lower, least), key=lambda one: (one.metrics[name], _cost(one, least))):
            if not found or _cost(one, least) < _cost(found[-1], least):
                found.append(one)
        return tuple(found)

    def choose(self, *, least: str = "ece", at_most: Bounds | None = None, at_least: Bounds | None = None) -> TunedRule:
        """The rule that minimises one metric under bounds on others.

        Args:
            least: The metric to minimise, or `error` for 1 - accuracy.
            at_most: Upper bounds by metric, such as `{"drop_0.1": 0.01}`.
            at_least: Lower bounds by metric, such as `{"accuracy": 0.7}`; by default `floor`, `{}` for none.
        """
        upper, lower = at_most or {}, self.floor if at_least is None else at_least
        self._check_metrics(least, (*upper, *lower))
        best = min(self._within(upper, lower, least), key=lambda one: _cost(one, least))
        return self.tuned(best, objective=_objective(least, upper, lower))

    def choose_certified(
        self,
        logits: Any,
        labels: Any,
        *,
        least: str = "ece",
        drop: float | None = None,
        at_most: float = 0.01,
        at_least: Bounds | None = None,
        confidence: float = 0.95,
        control: Control = "sequence",
    ) -> tuple[TunedRule | None, ChoiceCertificate]:
        """The rule that minimises one metric among those with a guarantee on drops.

        The candidates that trade drops for the metric best are ordered by the choosing rows, the safest first, and tested on
        rows that the tuning has not seen, so that the guarantee holds after the choice.

        Args:
            logits: `(exits, rows, classes)`, rows that the tuning has not seen; others are refused.
            labels: `(rows,)`.
            least: The metric to minimise, or `error` for 1 - accuracy.
            drop: One of `drops`; by default the first.
            at_most: The fraction of inputs that may drop.
            at_least: Lower bounds on metrics of the choosing rows, as in `choose`; not part of the guarantee.
            confidence: Of the guarantee.
            control: See `certify_choice`.

        Returns:
            The rule, or None if none is certified, and the certificate.
        """
        limit = self.drops[0] if drop is None else drop
        name, lower = drop_name(limit), self.floor if at_least is None else at_least
        rows, known, prints = self._unseen(logits, labels, "the certificate")
        chain = self.chain(least=least, drop=limit, at_least=lower)
        tested = [one for one in chain if one.metrics[name] <= at_most] or chain[:1]
        found = certify_choice(
            rows,
            known,
            [one.text for one in tested],
            drop=limit,
            at_most=at_most,
            confidence=confidence,
            control=control,
            scores=[_cost(one, least) for one in tested],
            strict=self.strict,
        )
        chosen = next((one for one in tested if one.text == found.chosen), None)
        objective = f"{_objective(least, {}, lower)}; guaranteed with confidence {confidence:g}: {name} at most {at_most:g}"
        # These rows took part in the choice, so the rule must not be tested on them later.
        return None if chosen is None else self.tuned(chosen, objective=objective, also=prints), found

    def measure(self, logits: Any, labels: Any) -> tuple[Candidate, ...]:
        """The candidates with their metrics on rows that the tuning has not seen; others are refused."""
        rows, known, _ = self._unseen(logits, labels, "measuring")
        options: dict[str, Any] = {"drops": self.drops, "strict": self.strict}
        return tuple(replace(one, metrics=measure(one.rule, rows, known, **options)) for one in self.candidates)

    def recommend(self, chosen: TunedRule | None) -> str:
        """The recommendation in words, with the metrics of the chosen rule and of the reference rules.

        Args:
            chosen: From `choose` or `choose_certified`; None if no rule satisfies the bounds.
        """
        known = {one.name: one for one in self.candidates}
        lines = ["No rule satisfies the bounds."] if chosen is None else [f"Recommended: {chosen.name}: {chosen.objective}."]
        shown = dict.fromkeys((*((chosen.name,) if chosen else ()), *REFERENCES))
        words = "; ".join(f"{name} {self._words(known[name])}" for name in shown if name in known)
        lines.append(f"On {self.choosing_rows:,} rows: {words}.")
        if self.classes is not None and self.classes < FEW_CLASSES and {"caching", "product"} <= known.keys():
            caching, product = (known[name].metrics for name in ("caching", "product"))
            pairs = [(caching[name], product[name]) for name in (drop_name(self.drops[0]), "ece")]
            better = {theirs < mine for theirs, mine in pairs}
            verdict = (
                "here each is better in one metric"
                if len(better) > 1
                else f"this {'holds' if True in better else 'does not hold'} here"
            )
            lines.append(
                f"For fewer than {FEW_CLASSES} classes the paper advises caching over the product; {verdict}: under caching "
                f"{100 * pairs[0][0]:.2f} % of inputs drop by {self.drops[0]:g} and the ECE is {pairs[1][0]:.3f}, under the "
                f"product {100 * pairs[0][1]:.2f} % and {pairs[1][1]:.3f}."
            )
        return "\n".join(lines)

    def tuned(self, candidate: Candidate, *, objective: str, also: Tensor | None = None) -> TunedRule:
        """A candidate as an object to save; `also` are the fingerprints of further rows it was chosen by."""
        seen = self.seen if also is None else torch.cat((self.seen, also))
        return TunedRule(
            exits=self.exits,
            classes=self.classes,
            text=candidate.text,
            name=candidate.name,
            objective=objective,
            metrics=dict(candidate.metrics),
            rows=seen.numel(),
            seed=self.seed,
            seen=seen,
        )

    def _words(self, one: Candidate) -> str:
        drops = one.metrics[drop_name(self.drops[0])]
        return f"{100 * one.metrics['accuracy']:.2f} % right, {100 * drops:.2f} % drop, ECE {one.metrics['ece']:.3f}"

    def _unseen(self, logits: Any, labels: Any, purpose: str) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that the tuning has not seen, their labels, and the fingerprints of all rows given."""
        rows, known = check_rows(logits, labels)
        self.check_fits(rows.shape[0], rows.shape[2])
        prints = fingerprints(rows)
        new = unseen(self.seen, prints, purpose=purpose)
        return rows[:, new], known[new], prints

    def _check_metrics(self, least: str, bounded: Sequence[str]) -> None:
        costs = ["error", *(name for name in self.columns if name != "accuracy")]
        for name, known in ((least, costs), *((name, list(self.columns)) for name in bounded)):
            if name not in known:
                raise OptionError(
                    f"there is no metric {name!r} to {'minimise' if known is costs else 'bound'}",
                    expected=f"one of {', '.join(known)}",
                    fix="for other drops, tune again with them: tune(..., drops=(0.1, 0.05))",
                )

    def _within(self, upper: Bounds, lower: Bounds, least: str) -> list[Candidate]:
        """The candidates within the bounds; an error that names the nearest if there are none."""
        everyone = self.candidates
        found = [one for one in everyone if _miss(one, upper, lower) == 0]
        if not found:
            nearest = min(everyone, key=lambda one: _miss(one, upper, lower))
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in nearest.metrics.items())
            raise OptionError(
                f"none of {len(everyone)} rules satisfies: {_objective(least, upper, lower)}",
                expected=f"bounds that some rule satisfies; the nearest is {nearest.name} with {metrics}",
                fix="loosen a bound",
            )
        return found


@one_thread_for_few
def tune(
    logits: Any,
    labels: Any,
    *,
    drops: float | Sequence[float] = (0.1, 0.05),
    fitting: float = 0.5,
    penalties: Sequence[float] = PENALTIES,
    strict: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Frontier:
    """Search the family of rules on held-out rows.

    Args:
        logits: `(exits, rows, classes)`, rows that the network was not trained on, 100 or more.
        labels: `(rows,)`.
        drops: Drops of the label's probability to count, the most important first.
        fitting: The fraction of rows for fitting temperatures and powers; the others give the metrics.
        penalties: The weights of drops in the fitted products, one product each.
        strict: Count drops above a threshold, not at or above it.
        seed: Of the split.
        progress: Called with the number of rules done and the number of rules.
    """
    rows, known = check_rows(logits, labels)
    limits = _check_drops(drops)
    check_fraction(fitting, "fitting")
    count = rows.shape[1]
    if count < FEWEST:
        raise LabelError(f"there are {count} rows", expected=f"at least {FEWEST}", fix="pass more held-out rows")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(check_seed(seed))).to(rows.device)
    cut = min(max(round(fitting * count), 1), count - 1)
    fit, choose = order[:cut], order[cut:]
    family = list(members(rows[:, fit], known[fit], penalties=tuple(penalties)))
    held, wanted = rows[:, choose].contiguous(), known[choose]
    metrics = []
    for done, member in enumerate(family, 1):
        metrics.append(measure(member.rule, held, wanted, drops=limits, strict=strict))
        if progress is not None:
            progress(done, len(family))
    return Frontier(
        exits=rows.shape[0],
        classes=rows.shape[2],
        names=tuple(member.name for member in family),
        families=tuple(member.family for member in family),
        texts=tuple(repr(member.rule) for member in family),
        columns={name: tuple(one[name] for one in metrics) for name in metrics[0]},
        drops=limits,
        strict=strict,
        fitting_rows=cut,
        choosing_rows=count - cut,
        seed=seed,
        seen=fingerprints(rows),
    )


def _cost(candidate: Candidate, metric: str) -> float:
    """A metric of which less is better."""
    return 1 - candidate.metrics["accuracy"] if metric in ("accuracy", "error") else candidate.metrics[metric]


def _miss(candidate: Candidate, upper: Bounds, lower: Bounds) -> float:
    """The sum of relative violations of the bounds; 0 if there are none."""
    over = [(candidate.metrics[name] - bound, bound) for name, bound in upper.items()]
    under = [(bound - candidate.metrics[name], bound) for name, bound in lower.items()]
    return sum(max(miss, 0.0) / (abs(bound) or 1.0) for miss, bound in over + under)


def _objective(least: str, upper: Bounds, lower: Bounds) -> str:
    bounds = [f"{name} at most {bound:.4g}" for name, bound in upper.items()]
    bounds += [f"{name} at least {bound:.4g}" for name, bound in lower.items()]
    return f"least {least}" + (f" with {' and '.join(bounds)}" if bounds else "")


def _check_drops(drops: float | Sequence[float]) -> tuple[float, ...]:
    limits = (float(drops),) if isinstance(drops, int | float) else tuple(float(limit) for limit in drops)
    for limit in limits:
        check_number(limit, "drop", above=0, most=1)
    if not limits or len(set(map(drop_name, limits))) < len(limits):
        raise OptionError(f"drops are {limits}", expected="at least one drop, each once", fix="pass drops=(0.1, 0.05)")
    return limits
