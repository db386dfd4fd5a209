"""The frontier: every rule of the family measured on held-out rows, and which of them nothing else beats.

Calibrated beliefs that meet new information must sometimes fall, so steadiness and calibration cannot both be had in full.
`tune` shows what can be had: it fits the family on some of the rows, measures it on the others, and keeps the rules that no
other beats in mean accuracy, drops, ECE and NLL at once. Asked for the least of one figure with bounds on others, a
`Frontier` gives a rule to save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate.certify import (
    ChoiceCertificate,
    Control,
    certify_choice,
    check_rows,
    follow_blocks,
)
from anytime.calibrate.tuning.family import PENALTIES, members
from anytime.calibrate.tuning.tuned import TunedRule, unseen
from anytime.checks import check_fraction, check_number, check_seed, fingerprints
from anytime.combine import Rule, parse_rule
from anytime.combine.advice import FEW_CLASSES
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.metrics import drop, ece, histogram, nll, reach
from anytime.metrics.calibration import ECE_BINS

ALLOWANCE = 0.01
"""How much mean accuracy a wish may cost if it does not say."""
FEWEST = 100
"""Fewer rows than this say nothing about shares of a few percent."""
REFERENCES = ("latest", "caching", "caching at T", "product", "fitted product, λ = 3")
"""Candidates that any other is held against: the paper's rules, and what fitting makes of them."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Candidate:
    """One rule and what it does.

    Attributes:
        name: Short, for tables.
        family: Which part of the family it belongs to.
        text: The rule, as `anytime.parse_rule` reads it.
        figures: Means over the exits of `accuracy`, `ece` and `nll`; under `drop_0.1` the share of inputs that lose 0.1.
    """

    name: str
    family: str
    text: str
    figures: Mapping[str, float]

    @property
    def rule(self) -> Rule[Any]:
        """The rule."""
        return parse_rule(self.text)

    def dominates(self, other: Candidate, figures: Sequence[str]) -> bool:
        """Whether it is at least as good in all of these figures, and better in one."""
        mine, theirs = ([_cost(candidate, figure) for figure in figures] for candidate in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, eq=False)
class Frontier(Fitted, kind="frontier", version=2):
    """What `tune` found; it can be saved, and asked again later.

    Args:
        exits: How many exits.
        classes: How many classes.
        names, families, texts: Of the candidates, one each.
        columns: The figures of the candidates on the choosing rows, by name.
        drops: The losses of probability that were counted; the first is the one the frontier is about.
        strict: Whether only losses above these count.
        fitting_rows: How many rows the family was fitted on.
        choosing_rows: How many other rows its figures are from.
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
            raise OptionError("a frontier with gaps", expected="all figures of all candidates", fix="tune again")

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All rules that were tried."""
        rows = zip(self.names, self.families, self.texts, *self.columns.values(), strict=True)
        return tuple(
            Candidate(name, family, text, dict(zip(self.columns, values, strict=True))) for name, family, text, *values in rows
        )

    @property
    def objectives(self) -> tuple[str, ...]:
        """The figures the frontier is about."""
        return ("accuracy", drop_name(self.drops[0]), "ece", "nll")

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """The candidates that no other beats, from the steadiest to the least steady; of equals the first."""
        kept: list[Candidate] = []
        everyone = self.candidates
        for candidate in everyone:
            values = [candidate.figures[name] for name in self.objectives]
            twin = any(values == [other.figures[name] for name in self.objectives] for other in kept)
            if not twin and not any(other.dominates(candidate, self.objectives) for other in everyone):
                kept.append(candidate)
        return tuple(sorted(kept, key=lambda candidate: candidate.figures[drop_name(self.drops[0])]))

    @property
    def floor(self) -> dict[str, float]:
        """The lower bounds of a wish that names none: a point of accuracy less than the network as it is.

        Without it "the least ECE" is often that of a rule which knows nothing and says so.
        """
        latest = self.columns["accuracy"][self.names.index("latest")]
        return {"accuracy": latest - ALLOWANCE}

    def table(self, *, everyone: bool = False) -> list[dict[str, str | float]]:
        """The Pareto set, or everyone, as one record a rule."""
        shown = self.candidates if everyone else self.pareto
        return [{"name": one.name, "family": one.family, **one.figures, "rule": one.text} for one in shown]

    def chain(
        self, *, least: str = "ece", drop: float | None = None, at_least: Mapping[str, float] | None = None
    ) -> tuple[Candidate, ...]:
        """The candidates that trade drops for one figure: from the steadiest on, each better in it than all before.

        Args:
            least: A figure, or `error` for 1 - accuracy.
            drop: One of `drops`; the first without.
            at_least: Lower bounds by figure, as in `choose`.
        """
        share, lower = drop_name(self.drops[0] if drop is None else drop), self.floor if at_least is None else dict(at_least)
        self._check_figures(least, (share, *lower))
        found: list[Candidate] = []
        for one in sorted(self._within({}, lower, least), key=lambda one: (one.figures[share], _cost(one, least))):
            if not found or _cost(one, least) < _cost(found[-1], least):
                found.append(one)
        return tuple(found)

    def choose(
        self,
        *,
        least: str = "ece",
        at_most: Mapping[str, float] | None = None,
        at_least: Mapping[str, float] | None = None,
    ) -> TunedRule:
        """The rule with the least of one figure among those within bounds on others.

        Args:
            least: A figure, or `error` for 1 - accuracy.
            at_most: Upper bounds by figure, such as `{"drop_0.1": 0.01}`.
            at_least: Lower bounds by figure, such as `{"accuracy": 0.7}`; `floor` if left out, `{}` for none.
        """
        upper, lower = dict(at_most or {}), self.floor if at_least is None else dict(at_least)
        self._check_figures(least, (*upper, *lower))
        best = min(self._within(upper, lower, least), key=lambda one: _cost(one, least))
        return self.tuned(best, wish=_wish(least, upper, lower))

    def choose_certified(
        self,
        logits: Any,
        labels: Any,
        *,
        least: str = "ece",
        drop: float | None = None,
        at_most: float = 0.01,
        at_least: Mapping[str, float] | None = None,
        confidence: float = 0.95,
        control: Control = "sequence",
    ) -> tuple[TunedRule | None, ChoiceCertificate]:
        """The rule with the least of one figure among those that can be promised to let few inputs drop.

        The candidates that best trade drops for the wished figure are put in order by the choosing rows, the safest first.
        They are then tested on rows that the tuning has not seen, so that the promise holds after the choice.

        Args:
            logits: `(exits, rows, classes)`, rows that the tuning has not seen; others are refused.
            labels: `(rows,)`.
            least: A figure, or `error` for 1 - accuracy.
            drop: One of `drops`; the first without.
            at_most: The share of inputs that may lose so much.
            at_least: Lower bounds on figures of the choosing rows, as in `choose`; these are not part of the promise.
            confidence: How sure the promise should be.
            control: See `certify_choice`.

        Returns:
            The rule, None where nothing can be promised, and the certificate.
        """
        limit = self.drops[0] if drop is None else drop
        share, lower = drop_name(limit), self.floor if at_least is None else dict(at_least)
        rows, known = check_rows(logits, labels)
        self.check_fits(rows.shape[0], rows.shape[2])
        prints = fingerprints(rows)
        new = unseen(self.seen, prints, purpose="the certificate")
        rows, known = rows[:, new], known[new]
        chain = self.chain(least=least, drop=limit, at_least=lower)
        hopeful = [one for one in chain if one.figures[share] <= at_most] or chain[:1]
        found = certify_choice(
            rows,
            known,
            [one.text for one in hopeful],
            drop=limit,
            at_most=at_most,
            confidence=confidence,
            control=control,
            scores=[_cost(one, least) for one in hopeful],
            strict=self.strict,
        )
        chosen = next((one for one in hopeful if one.text == found.chosen), None)
        wish = f"{_wish(least, {}, lower)}; promised with confidence {confidence:g}: {share} at most {at_most:g}"
        # These rows have had their say in the choice too: a later test on them would flatter it.
        return None if chosen is None else self.tuned(chosen, wish=wish, also=prints), found

    def measure(self, logits: Any, labels: Any) -> tuple[Candidate, ...]:
        """The candidates with their figures on rows that the tuning has not seen; others are refused."""
        rows, known = check_rows(logits, labels)
        self.check_fits(rows.shape[0], rows.shape[2])
        new = unseen(self.seen, fingerprints(rows), purpose="measuring")
        rows, known = rows[:, new], known[new]
        return tuple(
            replace(one, figures=measure(one.rule, rows, known, drops=self.drops, strict=self.strict))
            for one in self.candidates
        )

    def recommend(self, chosen: TunedRule | None) -> str:
        """What these rows recommend, in words, with the figures that led to it beside those of the plain rules.

        Args:
            chosen: What `choose` or `choose_certified` gave; None where nothing keeps the bounds.
        """
        known = {one.name: one for one in self.candidates}
        lines = ["No rule keeps the bounds."] if chosen is None else [f"Recommended: {chosen.name}: {chosen.wish}."]
        shown = dict.fromkeys((*((chosen.name,) if chosen else ()), *REFERENCES))
        figures = "; ".join(f"{name} {self._words(known[name])}" for name in shown if name in known)
        lines.append(f"On {self.choosing_rows:,} rows: {figures}.")
        if self.classes is not None and self.classes < FEW_CLASSES and {"caching", "product"} <= known.keys():
            caching, product = (known[name].figures for name in ("caching", "product"))
            pairs = [(caching[name], product[name]) for name in (drop_name(self.drops[0]), "ece")]
            better = {theirs < mine for theirs, mine in pairs}
            verdict = (
                "it is the one or the other here" if len(better) > 1 else "so it is here" if True in better else "not so here"
            )
            lines.append(
                f"For fewer than {FEW_CLASSES} classes the paper advises caching over the product; {verdict}: under caching "
                f"{100 * pairs[0][0]:.2f} % of inputs drop by {self.drops[0]:g} and the ECE is {pairs[1][0]:.3f}, under the "
                f"product {100 * pairs[0][1]:.2f} % and {pairs[1][1]:.3f}."
            )
        return "\n".join(lines)

    def _words(self, one: Candidate) -> str:
        share = one.figures[drop_name(self.drops[0])]
        return f"{100 * one.figures['accuracy']:.2f} % right, {100 * share:.2f} % drop, ECE {one.figures['ece']:.3f}"

    def tuned(self, candidate: Candidate, *, wish: str, also: Tensor | None = None) -> TunedRule:
        """A candidate as an object to save; `also` are the fingerprints of further rows it was chosen by."""
        seen = self.seen if also is None else torch.cat((self.seen, also))
        return TunedRule(
            exits=self.exits,
            classes=self.classes,
            text=candidate.text,
            name=candidate.name,
            wish=wish,
            figures=dict(candidate.figures),
            rows=seen.numel(),
            seed=self.seed,
            seen=seen,
        )

    def _check_figures(self, least: str, bounded: Sequence[str]) -> None:
        costs = ["error", *(name for name in self.columns if name != "accuracy")]
        for name, known in ((least, costs), *((name, list(self.columns)) for name in bounded)):
            if name not in known:
                raise OptionError(
                    f"there is no figure {name!r} to {'have the least of' if known is costs else 'bound'}",
                    expected=f"one of {', '.join(known)}",
                    fix="shares of drops are there for the thresholds that the tuning was given: tune(..., drops=(0.1, 0.05))",
                )

    def _within(self, upper: Mapping[str, float], lower: Mapping[str, float], least: str) -> list[Candidate]:
        """The candidates that keep the bounds; an error that names the nearest where none does."""
        everyone = self.candidates
        found = [one for one in everyone if _miss(one, upper, lower) == 0]
        if not found:
            nearest = min(everyone, key=lambda one: _miss(one, upper, lower))
            figures = ", ".join(f"{name} {value:.4g}" for name, value in nearest.figures.items())
            raise OptionError(
                f"none of {len(everyone)} rules fits the wish: {_wish(least, upper, lower)}",
                expected=f"bounds that a rule can keep; the nearest is {nearest.name} with {figures}",
                fix="loosen a bound",
            )
        return found


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
        drops: Losses of the label's probability to count, the most important first.
        fitting: The share of rows for fitting temperatures and powers; the others are for the figures.
        penalties: How much drops weigh in the fitted products, one each.
        strict: Count losses above a threshold, not at or above it.
        seed: Of the split.
        progress: Called with the number of rules done and the number of rules.
    """
    rows, known = check_rows(logits, labels)
    limits = _check_drops(drops)
    check_fraction(fitting, "fitting")
    count = rows.shape[1]
    if count < FEWEST:
        raise LabelError(f"there are {count} rows", expected=f"at least {FEWEST}", fix="give more held-out rows")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(check_seed(seed))).to(rows.device)
    cut = min(max(round(fitting * count), 1), count - 1)
    fit, choose = order[:cut], order[cut:]
    family = list(members(rows[:, fit], known[fit], penalties=tuple(penalties)))
    held, wanted = rows[:, choose].contiguous(), known[choose]
    figures = []
    for done, member in enumerate(family):
        figures.append(measure(member.rule, held, wanted, drops=limits, strict=strict))
        if progress is not None:
            progress(done + 1, len(family))
    return Frontier(
        exits=rows.shape[0],
        classes=rows.shape[2],
        names=tuple(member.name for member in family),
        families=tuple(member.family for member in family),
        texts=tuple(repr(member.rule) for member in family),
        columns={name: tuple(one[name] for one in figures) for name in figures[0]},
        drops=limits,
        strict=strict,
        fitting_rows=cut,
        choosing_rows=count - cut,
        seed=seed,
        seen=fingerprints(rows),
    )


def measure(
    rule: Rule[Any], logits: Tensor, labels: Tensor, *, drops: Sequence[float], strict: bool = False
) -> dict[str, float]:
    """Mean accuracy, ECE and NLL over the exits, and the share of inputs that lose each of `drops`, of checked rows."""
    exits, rows, _ = logits.shape
    right = surprise = 0.0
    table = torch.zeros(exits, ECE_BINS, 3, dtype=torch.float64, device=logits.device)
    fallen = torch.zeros(len(drops), dtype=torch.int64, device=logits.device)
    for seen in follow_blocks(rule, logits, labels):
        assert seen.correct is not None
        assert seen.label is not None
        right += float(seen.correct.double().sum())
        surprise += float(nll(seen.label).double().sum())
        table += histogram(seen.confidence, seen.correct, ECE_BINS)
        fallen += reach(drop(seen.label_probability), drops, strict=strict)
    shares = {drop_name(limit): share / rows for limit, share in zip(drops, fallen.tolist(), strict=True)}
    means = {"accuracy": right / (exits * rows), "ece": float(ece(table).mean()), "nll": surprise / (exits * rows)}
    return {**means, **shares}


def drop_name(limit: float) -> str:
    """The name of the share of inputs that lose `limit`.

    >>> drop_name(0.1)
    'drop_0.1'
    """
    return f"drop_{limit:g}"


def _cost(candidate: Candidate, figure: str) -> float:
    """A figure of which less is better."""
    return 1 - candidate.figures["accuracy"] if figure in ("accuracy", "error") else candidate.figures[figure]


def _miss(candidate: Candidate, upper: Mapping[str, float], lower: Mapping[str, float]) -> float:
    """By how much it misses the bounds, each in parts of the bound; 0 where it keeps them all."""
    over = [(candidate.figures[name] - bound, bound) for name, bound in upper.items()]
    under = [(bound - candidate.figures[name], bound) for name, bound in lower.items()]
    return sum(max(miss, 0.0) / (abs(bound) or 1.0) for miss, bound in over + under)


def _wish(least: str, upper: Mapping[str, float], lower: Mapping[str, float]) -> str:
    bounds = [f"{name} at most {bound:.4g}" for name, bound in upper.items()]
    bounds += [f"{name} at least {bound:.4g}" for name, bound in lower.items()]
    return f"least {least}" + (f" with {' and '.join(bounds)}" if bounds else "")


def _check_drops(drops: float | Sequence[float]) -> tuple[float, ...]:
    limits = (float(drops),) if isinstance(drops, int | float) else tuple(float(limit) for limit in drops)
    if not limits:
        raise OptionError("no drops to count", expected="at least one", fix="0.1 is a usual choice")
    for limit in limits:
        check_number(limit, "drop", above=0, most=1)
    if len({drop_name(limit) for limit in limits}) < len(limits):
        raise OptionError(f"drops are {limits}", expected="each once", fix="leave one out")
    return limits
