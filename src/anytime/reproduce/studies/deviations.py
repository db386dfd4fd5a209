"""Our own: where the paper's released code differs from its text, and what each difference does to the numbers.

Every row is measured on the kept test rows of each seed and averaged. What the code does is reimplemented here from its
description, with options of this library where it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anytime.calibrate import fit_adaptive_threshold
from anytime.combine import Caching, ClippedReLU, Latest, Product, ThresholdReLU
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.evaluation import evaluate
from anytime.metrics import drop, ece, follow, histogram, oracle_accuracy, oracle_auroc_as_released, reach
from anytime.metrics.calibration import ECE_BINS, ORACLE_BINS
from anytime.metrics.trajectories import Trajectories
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, Measured, each_over_seeds, minus, over_seeds, with_deviation
from anytime.reproduce.group import LABEL_DROPS, rows_in_words
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import Plot, line, over_exits
from anytime.reproduce.runs import Run

THRESHOLD = 2.0
_SEEDS = 10


@dataclass(frozen=True)
class Pair:
    """One metric of one run, by the paper's text and by its code."""

    text: float
    code: float


Measure = Callable[[Run], Pair]


@dataclass(frozen=True)
class Deviation:
    """A difference between text and code.

    Attributes:
        topic: What it is about, with its number in our list of deviations.
        text: What the paper says.
        code: What its code does.
        measures: Name, unit and function of each metric.
    """

    topic: str
    text: str
    code: str
    measures: tuple[tuple[str, str, Measure], ...]


def deviations(draft: Draft) -> Finding:
    """A table of all deviations that logits can show."""
    runs = draft.runs.need(MSDNET_100)
    draft.used += runs
    for each in DEVIATIONS:
        for name, unit, measure in each.measures:
            pairs = [measure(run) for run in runs]
            text, code = over_seeds([pair.text for pair in pairs]), over_seeds([pair.code for pair in pairs])
            change = over_seeds([pair.code - pair.text for pair in pairs]).mean
            digits, suffix = (2, f" {unit}") if unit else (3, "")
            cells = (*(f"{with_deviation(value, digits)}{suffix}" for value in (text, code)), minus(f"{change:+.{digits}f}"))
            draft.table.append((each.topic, each.text, each.code, name, *cells))
            numbers = {"text": text.mean, "code": code.mean, "change": change, "seeds": len(pairs)}
            draft.numbers[f"{each.topic}: {name}"] = numbers
    collapsed = over_seeds([100 * float(_seen(run, Product()).fell_back.any(0).double().mean()) for run in runs])
    strict = draft.numbers["> or ≥ (9): product drops by .01"]["change"]
    weights = draft.numbers["weights (1): product drops by .01"]
    draft.plots += [_weights_plot(runs), _support_plot(runs)]
    draft.claim(
        "counting > in place of ≥ changes nothing visible in a figure", abs(strict) < 0.05, f"{strict:+.3f} points at .01"
    )
    draft.claim(
        "without the fallback hardly any input is lost",
        collapsed.mean < 0.1,
        f"{collapsed.mean:.3f} % of the inputs collapse at some exit",
    )
    draft.claim(
        "the code's default weights are not those of the paper's figures",
        abs(weights["change"]) > 1.0,
        f"drops by .01: {weights['text']:.1f} % with i/M, {weights['code']:.1f} % with ones; the paper has 10 %",
    )
    return draft.finding(
        rows=rows_in_words(runs, kept=True),
        note="Numbers in parentheses count our list of deviations. Not measured here, since logits do not show it: the "
        "split of the training data (13), the validation rows seen through random crops (14), epochs and number of runs "
        "(15, 16), the finetuned network's activation (11), and what was not released (12, 22). ± is one standard deviation "
        "over the seeds. For the adaptive threshold, C is chosen for either form by the same criterion, calibration error and "
        "drops, which ignores accuracy: for max(f, τ) it picks a C that few logits exceed.",
        headings=("topic", "text", "code", "measured", "by the text", "by the code", "change"),
    )


def _seen(run: Run, rule: Product | Caching | Latest) -> Trajectories:
    logits, labels = run.logits()
    return follow(rule(logits), labels)


Metric = Callable[[Trajectories], float]


def _drops(by: float, *, strict: bool = False) -> Metric:
    def measure(seen: Trajectories) -> float:
        drops = drop(seen.label_probability)
        return 100 * float(reach(drops, [by], strict=strict)) / len(drops)

    return measure


def _accuracy(exit: int) -> Metric:
    def measure(seen: Trajectories) -> float:
        assert seen.correct is not None
        return 100 * float(seen.correct[exit].double().mean())

    return measure


def _ece(exit: int) -> Metric:
    def measure(seen: Trajectories) -> float:
        assert seen.correct is not None
        return float(ece(histogram(seen.confidence, seen.correct, ECE_BINS))[exit])

    return measure


def _of_rules(text: Product, code: Product, metric: Metric) -> Measure:
    return lambda run: Pair(metric(_seen(run, text)), metric(_seen(run, code)))


def _float32(run: Run) -> Pair:
    """Answers that change when the product is multiplied in float32 instead of summed as logarithms."""
    logits, labels = run.logits()
    exits = len(logits)
    weights = torch.arange(1, exits + 1, dtype=torch.float32) / exits
    evidence = logits.float().clamp(min=0) ** weights[:, None, None]
    answers = evidence.cumprod(0).argmax(-1)
    return Pair(0.0, 100 * float((answers != follow(Product()(logits), labels).answer).any(0).double().mean()))


def _without_fallback(metric: str) -> Measure:
    """A collapsed row is NaN in the code: its answer is class 0, and its comparisons count as a drop at every threshold."""

    def measure(run: Run) -> Pair:
        labels, seen = run.logits()[1], _seen(run, Product())
        assert seen.correct is not None
        lost = seen.fell_back.any(0)
        if metric == "accuracy":
            right = torch.where(seen.fell_back[-1], labels == 0, seen.correct[-1])
            return Pair(_accuracy(-1)(seen), 100 * float(right.double().mean()))
        dropped = (drop(seen.label_probability) >= 0.5) | lost
        return Pair(_drops(0.5)(seen), 100 * float(dropped.double().mean()))

    return measure


def _support(run: Run) -> Pair:
    gate, clamp = _seen(run, _GATE), _seen(run, _CLAMP)
    return Pair(float(gate.support[-1].double().mean()), float(clamp.support[-1].double().mean()))


def _adaptive(metric: Metric) -> Measure:
    def measure(run: Run) -> Pair:
        logits, labels = run.logits("val")
        half = logits.shape[1] // 2
        parts = logits[:, :half], labels[:half]
        others = {"tuning_logits": logits[:, half:], "tuning_labels": labels[half:]}
        gate = fit_adaptive_threshold(*parts, **others, mode="gate").activation
        clamp = fit_adaptive_threshold(*parts, **others, mode="clamp").activation
        return Pair(metric(_seen(run, Product(gate))), metric(_seen(run, Product(clamp))))

    return measure


def _clip(run: Run) -> Pair:
    """The largest difference in a probability between C_b·max(min(f, b), 0) and the same without C_b."""
    logits, _ = run.logits()
    limit = 0.5
    scaled = (max(1.0, 1 / limit) * logits.clamp(max=limit).clamp(min=0)).log()
    weights = torch.arange(1, len(logits) + 1) / len(logits)
    total = (weights[:, None, None] * scaled).cumsum(0)
    alive = total.amax(-1) > -torch.inf
    ours = Product(ClippedReLU(limit))(logits).probs
    return Pair(0.0, float((total.softmax(-1) - ours)[alive].abs().max()))


def _ties(metric: str) -> Measure:
    """Caching with ≥ on softmax confidences in float32, where many round to one; the text's strict > on exact confidences."""

    def measure(run: Run) -> Pair:
        logits, labels = run.logits()
        text = follow(Caching()(logits), labels)
        log_probs = logits.float().log_softmax(-1)
        kept, ties = log_probs[0].clone(), torch.zeros(len(labels), dtype=torch.bool)
        rows = [kept.clone()]
        for now in log_probs[1:]:
            new, old = now.exp().amax(-1), kept.exp().amax(-1)
            ties |= new == old
            kept = torch.where((new >= old)[:, None], now, kept)
            rows.append(kept)
        every = torch.stack(rows)
        code = every.argmax(-1)
        if metric == "ties":
            return Pair(0.0, 100 * float(ties.double().mean()))
        if metric == "accuracy":
            return Pair(_accuracy(-1)(text), 100 * float((code[-1] == labels).double().mean()))
        probability = every.exp().gather(-1, labels.expand(every.shape[:2])[..., None])[..., 0]
        return Pair(_drops(0.01)(text), 100 * float((drop(probability) >= 0.01).double().mean()))

    return measure


def _raps(metric: str, exit: int) -> Measure:
    """The original RAPS, which the text cites, and the sets of the code."""

    def measure(run: Run) -> Pair:
        logits, labels = run.logits()
        found = []
        for sets in (Raps(variant="original", quantile="plain"), CODE):
            product = evaluate(logits, labels, rules=("product",), sets=sets).rules["product"]
            assert product.set_size is not None
            assert product.set_coverage is not None
            found.append(product.set_size[exit] if metric == "size" else 100 * product.set_coverage[exit])
        return Pair(*found)

    return measure


def _seeds(run: Run) -> Pair:
    """Standard deviation of the mean set size at the last exit over random seeds: zero with a fixed seed."""
    logits, labels = run.logits()
    found = [evaluate(logits, labels, rules=("product",), seed=seed).rules["product"] for seed in range(_SEEDS)]
    return Pair(0.0, over_seeds([each.set_size[-1] for each in found if each.set_size is not None]).deviation or 0.0)


def _unrandomised(metric: str) -> Measure:
    """Deterministic sets from deterministic scores (text), and from randomised scores (code), at the last exit."""

    def measure(run: Run) -> Pair:
        logits, labels = run.logits()
        log_probs = Product()(logits[:, :]).log_probs[-1:]
        cut = logits.shape[1] // 5
        ascending = sort_rows(log_probs)
        rank = rank_of(log_probs, ascending, labels)
        draws = torch.rand(1, len(labels), generator=torch.Generator().manual_seed(0))
        plain, drawn = Raps(randomised=False, quantile="corrected"), CODE
        found = []
        for calibrating in (plain, drawn):
            limit = calibrating.threshold(calibrating.label_score(ascending[:, :cut], rank[:, :cut], draws[:, :cut]))
            size = plain.size(ascending[:, cut:], limit, draws[:, cut:])
            values: Tensor = size if metric == "size" else 100 * (rank[:, cut:] < size)
            found.append(float(values.double().mean()))
        return Pair(*found)

    return measure


def _bins(bins: int, *, leave_out_one: bool = False) -> Measure:
    """ECE of the backbone's last exit with other bins, or without the inputs whose confidence is exactly 1."""

    def measure(run: Run) -> Pair:
        seen = _seen(run, Latest())
        assert seen.correct is not None
        keep = seen.confidence[-1] < 1 if leave_out_one else torch.ones_like(seen.confidence[-1], dtype=torch.bool)
        # Rows that are left out still count in the total, as in code that drops them from the bins only.
        table = histogram(seen.confidence[-1:, keep], seen.correct[-1:, keep], bins)
        return Pair(_ece(-1)(seen), float(ece(table)[0]) * float(keep.double().mean()))

    return measure


def _oracle(exit: int) -> Measure:
    """The product's lead over the backbone with the oracle, in percent: corrected, and as released."""

    def measure(run: Run) -> Pair:
        labels = run.logits()[1]
        corrected, released = [], []
        for rule in (Latest(), Product()):
            seen = _seen(run, rule)
            assert seen.correct is not None
            corrected.append(100 * float(oracle_accuracy(histogram(seen.confidence, seen.correct, ORACLE_BINS))[exit]))
            released.append(100 * float(oracle_auroc_as_released(seen.confidence, seen.answer, labels)[exit]))
        return Pair(corrected[1] - corrected[0], released[1] - released[0])

    return measure


def _strictly(rule: Product | Latest, by: float) -> Measure:
    def measure(run: Run) -> Pair:
        seen = _seen(run, rule)
        return Pair(_drops(by)(seen), _drops(by, strict=True)(seen))

    return measure


_ONES = Product(weights="ones")
CODE = Raps(quantile="corrected")
"""Prediction sets as in the paper's released code."""
_GATE, _CLAMP = Product(ThresholdReLU(THRESHOLD)), Product(ThresholdReLU(THRESHOLD, "clamp"))

DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "weights (1)",
        "i/M",
        "ones by default",
        (
            ("product accuracy, last exit", "%", _of_rules(Product(), _ONES, _accuracy(-1))),
            ("product drops by .01", "%", _of_rules(Product(), _ONES, _drops(0.01))),
            ("product drops by .1", "%", _of_rules(Product(), _ONES, _drops(0.1))),
            ("product ECE, last exit", "", _of_rules(Product(), _ONES, _ece(-1))),
        ),
    ),
    Deviation(
        "number format (2)",
        "–",
        "float64 weights make everything float64; here float32 multiplication",
        (("inputs with another answer at some exit", "%", _float32),),
    ),
    Deviation(
        "collapse (3)",
        "fall back to the softmax",
        "no fallback: NaN",
        (
            ("product drops by .5", "%", _without_fallback("drops")),
            ("product accuracy, last exit", "%", _without_fallback("accuracy")),
        ),
    ),
    Deviation(
        "static threshold (4), b = 2",
        "classes below b leave",
        "max(f, b): none leaves",
        (
            ("mean support, last exit", "classes", _support),
            ("accuracy, last exit", "%", _of_rules(_GATE, _CLAMP, _accuracy(-1))),
            ("drops by .05", "%", _of_rules(_GATE, _CLAMP, _drops(0.05))),
            ("ECE, last exit", "", _of_rules(_GATE, _CLAMP, _ece(-1))),
        ),
    ),
    Deviation(
        "adaptive threshold (5)",
        "classes below τ leave",
        "printed formula max(f, τ); not released",
        (
            ("accuracy, last exit", "%", _adaptive(_accuracy(-1))),
            ("drops by .1", "%", _adaptive(_drops(0.1))),
            ("ECE, first exit", "", _adaptive(_ece(0))),
        ),
    ),
    Deviation("clip (6), b = .5", "scaled by C_b", "not scaled", (("largest change of a probability", "", _clip),)),
    Deviation(
        "ties of caching (8)",
        "keep the earlier",
        "take the later, on float32 confidences",
        (
            ("inputs with a tie", "%", _ties("ties")),
            ("caching accuracy, last exit", "%", _ties("accuracy")),
            ("caching drops by .01", "%", _ties("drops")),
        ),
    ),
    Deviation(
        "> or ≥ (9)",
        "drops ≥ τ",
        "drops > τ",
        (
            ("product drops by .01", "%", _strictly(Product(), 0.01)),
            ("latest drops by .5", "%", _strictly(Latest(), 0.5)),
        ),
    ),
    Deviation(
        "RAPS (17)",
        "cites RAPS: as its authors' code",
        "randomises the penalty too, corrects the quantile, allows empty sets",
        (
            ("product set size, first exit", "classes", _raps("size", 0)),
            ("product set size, last exit", "classes", _raps("size", -1)),
            ("product coverage, last exit", "%", _raps("coverage", -1)),
        ),
    ),
    Deviation("RAPS seeds (18)", "–", "not seeded", (("deviation of the last exit's set size", "classes", _seeds),)),
    Deviation(
        "deterministic RAPS (19)",
        "no randomness",
        "calibration scores stay randomised",
        (("set size, last exit", "classes", _unrandomised("size")), ("coverage, last exit", "%", _unrandomised("coverage"))),
    ),
    Deviation(
        "ECE bins (20)",
        "15 equal bins, 1.0 in the last",
        "the same; other code uses 10 bins or drops 1.0",
        (
            ("latest ECE, last exit, 10 bins", "", _bins(10)),
            ("latest ECE, last exit, 15 bins, 1.0 dropped", "", _bins(ECE_BINS, leave_out_one=True)),
        ),
    ),
    Deviation(
        "OC-AUROC (21)",
        "deferral to an oracle; here its accuracy",
        "a binary metric on class indices",
        (
            ("product's lead over latest, first exit", "%", _oracle(0)),
            ("product's lead over latest, last exit", "%", _oracle(-1)),
        ),
    ),
)


def _weights_plot(runs: tuple[Run, ...]) -> Plot:
    lines = []
    for name, rule, look in (("product, i/M", Product(), 2), ("product, ones", _ONES, 1)):
        curves = [[_drops(by)(seen) for by in paper.DROPS] for seen in (_seen(run, rule) for run in runs)]
        lines.append(line(name, each_over_seeds(curves), look, x=paper.DROPS))
    return Plot("Weights: label drops", LABEL_DROPS.x_title, LABEL_DROPS.axis, tuple(lines), kind="symlog")


def _support_plot(runs: tuple[Run, ...]) -> Plot:
    lines = []
    rules = ((f"gate, b = {THRESHOLD:g}", _GATE), (f"clamp, b = {THRESHOLD:g}", _CLAMP), ("ReLU", Product()))
    for look, (name, rule) in enumerate(rules, 3):
        sizes: list[Measured] = each_over_seeds([_seen(run, rule).support.double().mean(1).tolist() for run in runs])
        lines.append(line(name, sizes, look))
    return over_exits("Threshold: classes left", "mean classes", lines, zero=True)
