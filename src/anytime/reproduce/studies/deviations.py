"""Our own: where the paper's released code does otherwise than its text, and what each difference does to the numbers.

Every row is measured on the kept test rows of each seed and averaged. What the code does is re-made here from its description,
as options of this library where it has them.
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
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Measured, Panel, each_over_seeds, over_seeds
from anytime.reproduce.measure import line, names_of, rows_in_words
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.runs import Run

THRESHOLD = 2.0
_SEEDS = 10


@dataclass(frozen=True)
class Pair:
    """One figure by the paper's text and by its code, for one run."""

    text: float
    code: float


@dataclass(frozen=True)
class Deviation:
    """A difference between text and code.

    Attributes:
        topic: What it is about, with its number in METHODS.md §1.2.
        text: What the paper says.
        code: What its code does.
        measures: What is measured for it: a name, a unit and digits, and how to get it from a run.
    """

    topic: str
    text: str
    code: str
    measures: tuple[tuple[str, str, Callable[[Run], Pair]], ...]


def study(context: Context) -> Finding:
    """A table of all deviations that logits can show."""
    runs = context.runs.need(MSDNET_100)
    table, numbers = [], {}
    for each in DEVIATIONS:
        for name, unit, measure in each.measures:
            pairs = [measure(run) for run in runs]
            text, code = over_seeds([pair.text for pair in pairs]), over_seeds([pair.code for pair in pairs])
            change = over_seeds([pair.code - pair.text for pair in pairs])
            table.append(
                (each.topic, each.text, each.code, name, _written(text, unit), _written(code, unit), _signed(change, unit))
            )
            numbers[f"{each.topic}: {name}"] = {
                "text": text.mean,
                "code": code.mean,
                "change": change.mean,
                "seeds": len(pairs),
            }
    collapsed = over_seeds([100 * float(_seen(run, Product()).fell_back.any(0).double().mean()) for run in runs])
    strict = numbers["> or ≥ (9): product falls by .01"]["change"]
    weights = numbers["weights (1): product falls by .01"]
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs, kept=True),
        note="Numbers in brackets are the rows of METHODS.md §1.2. Not measured here, since logits do not show it: the "
        "split of the training data (13), the validation rows seen through random crops (14), epochs and number of runs "
        "(15, 16), the finetuned network's activation (11), and what was not released (12, 22). ± is one deviation over the "
        "seeds. For the adaptive threshold C is chosen for either form by the same criterion, calibration error and falls, "
        "which does not look at accuracy: for max(f, τ) it picks a C that few logits exceed.",
        panels=(_weights_panel(runs), _support_panel(runs)),
        claims=(
            Claim(
                "counting > in place of ≥ changes nothing that a figure could show",
                abs(strict) < 0.05,
                f"{strict:+.3f} points at .01",
            ),
            Claim(
                "without the fallback hardly any input is lost",
                collapsed.mean < 0.1,
                f"{collapsed.mean:.3f} % of the inputs collapse at some exit",
            ),
            Claim(
                "the code's default weights are not what the paper's figures show",
                abs(weights["change"]) > 1.0,
                f"falls by .01: {weights['text']:.1f} % with i/M, {weights['code']:.1f} % with ones; the paper has 10 %",
            ),
        ),
        headings=("topic", "text", "code", "measured", "by the text", "by the code", "change"),
        table=tuple(table),
        numbers=numbers,
    )


def _seen(run: Run, rule: Product | Caching | Latest) -> Trajectories:
    logits, labels = run.logits()
    return follow(rule(logits), labels)


def _falls(seen: Trajectories, limit: float, *, strict: bool = False) -> float:
    drops = drop(seen.label_probability)
    return 100 * float(reach(drops, [limit], strict=strict)) / len(drops)


def _accuracy(seen: Trajectories, exit: int) -> float:
    assert seen.correct is not None
    return 100 * float(seen.correct[exit].double().mean())


def _ece(seen: Trajectories, exit: int) -> float:
    assert seen.correct is not None
    return float(ece(histogram(seen.confidence, seen.correct, ECE_BINS))[exit])


def _of_rules(
    text: Product | Caching, code: Product | Caching, figure: Callable[[Trajectories], float]
) -> Callable[[Run], Pair]:
    return lambda run: Pair(figure(_seen(run, text)), figure(_seen(run, code)))


def _float32(run: Run) -> Pair:
    """Answers that change when the product is multiplied out in float32 instead of added up as logarithms."""
    logits, labels = run.logits()
    exits = len(logits)
    weights = torch.arange(1, exits + 1, dtype=torch.float32) / exits
    evidence = logits.float().clamp(min=0) ** weights[:, None, None]
    answers = evidence.cumprod(0).argmax(-1)
    return Pair(0.0, 100 * float((answers != follow(Product()(logits), labels).answer).any(0).double().mean()))


def _without_fallback(figure: str) -> Callable[[Run], Pair]:
    """A collapsed row is NaN in the code: its answer is class 0, and its comparisons count as a fall at every threshold."""

    def measure(run: Run) -> Pair:
        labels, seen = run.logits()[1], _seen(run, Product())
        assert seen.correct is not None
        lost = seen.fell_back.any(0)
        if figure == "accuracy":
            right = torch.where(seen.fell_back[-1], labels == 0, seen.correct[-1])
            return Pair(_accuracy(seen, -1), 100 * float(right.double().mean()))
        fell = (drop(seen.label_probability) >= 0.5) | lost
        return Pair(_falls(seen, 0.5), 100 * float(fell.double().mean()))

    return measure


def _support(run: Run) -> Pair:
    gate, clamp = _seen(run, _GATE), _seen(run, _CLAMP)
    return Pair(float(gate.support[-1].double().mean()), float(clamp.support[-1].double().mean()))


def _adaptive(figure: Callable[[Trajectories], float]) -> Callable[[Run], Pair]:
    def measure(run: Run) -> Pair:
        logits, labels = run.logits("val")
        half = logits.shape[1] // 2
        parts = (logits[:, :half], labels[:half])
        others = {"tuning_logits": logits[:, half:], "tuning_labels": labels[half:]}
        gate, clamp = (fit_adaptive_threshold(*parts, **others, mode=mode).activation for mode in ("gate", "clamp"))  # type: ignore[arg-type]
        return Pair(figure(_seen(run, Product(gate))), figure(_seen(run, Product(clamp))))

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


def _ties(figure: str) -> Callable[[Run], Pair]:
    """Caching with ≥ on softmax confidences in float32, where many round to one; the text's strict > on true confidences."""

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
        if figure == "ties":
            return Pair(0.0, 100 * float(ties.double().mean()))
        if figure == "accuracy":
            return Pair(_accuracy(text, -1), 100 * float((code[-1] == labels).double().mean()))
        quality = every.exp().gather(-1, labels.expand(every.shape[:2])[..., None])[..., 0]
        return Pair(_falls(text, 0.01), 100 * float((drop(quality) >= 0.01).double().mean()))

    return measure


def _raps(key: str, code: Raps, exit: int) -> Callable[[Run], Pair]:
    """The original RAPS as the text cites it, and the code's way."""

    def measure(run: Run) -> Pair:
        logits, labels = run.logits()
        found = [
            evaluate(logits, labels, rules=("product",), sets=sets).rules["product"].to_json()[key][exit]
            for sets in (Raps(variant="original", quantile="plain"), code)
        ]
        return Pair(*(100 * value if key == "set_coverage" else value for value in found))

    return measure


def _seeds(run: Run) -> Pair:
    """The deviation of the mean set size at the last exit over seeds of the draws: none with a fixed seed."""
    logits, labels = run.logits()
    found = [evaluate(logits, labels, rules=("product",), seed=seed).rules["product"] for seed in range(_SEEDS)]
    sizes = [each.set_size[-1] for each in found if each.set_size is not None]
    return Pair(0.0, over_seeds(sizes).deviation or 0.0)


def _unrandomised(key: str) -> Callable[[Run], Pair]:
    """Sets without draws from scores without draws (text), and from randomised scores (code), at the last exit."""

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
            values: Tensor = size if key == "size" else 100 * (rank[:, cut:] < size)
            found.append(float(values.double().mean()))
        return Pair(*found)

    return measure


def _bins(bins: int, *, leave_out_one: bool = False) -> Callable[[Run], Pair]:
    """ECE of the backbone's last exit with other bins, or without the inputs that are exactly certain."""

    def measure(run: Run) -> Pair:
        seen = _seen(run, Latest())
        assert seen.correct is not None
        keep = seen.confidence[-1] < 1 if leave_out_one else torch.ones_like(seen.confidence[-1], dtype=torch.bool)
        # Rows that are left out still count among all, as in code that drops them from the bins alone.
        table = histogram(seen.confidence[-1:, keep], seen.correct[-1:, keep], bins)
        return Pair(_ece(seen, -1), float(ece(table)[0]) * float(keep.double().mean()))

    return measure


def _oracle(exit: int) -> Callable[[Run], Pair]:
    """The product's lead over the backbone with the oracle's help: sound, and as released; both in percent."""

    def measure(run: Run) -> Pair:
        labels = run.logits()[1]
        sound, released = [], []
        for rule in (Latest(), Product()):
            seen = _seen(run, rule)
            assert seen.correct is not None
            sound.append(100 * float(oracle_accuracy(histogram(seen.confidence, seen.correct, ORACLE_BINS))[exit]))
            released.append(100 * float(oracle_auroc_as_released(seen.confidence, seen.answer, labels)[exit]))
        return Pair(sound[1] - sound[0], released[1] - released[0])

    return measure


_ONES = Product(weights="ones")
CODE = Raps(quantile="corrected")
"""Prediction sets as the paper's released code makes them."""
_GATE, _CLAMP = Product(ThresholdReLU(THRESHOLD)), Product(ThresholdReLU(THRESHOLD, "clamp"))

DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "weights (1)",
        "i/M",
        "ones by default",
        (
            ("product accuracy, last exit", "%", _of_rules(Product(), _ONES, lambda seen: _accuracy(seen, -1))),
            ("product falls by .01", "%", _of_rules(Product(), _ONES, lambda seen: _falls(seen, 0.01))),
            ("product falls by .1", "%", _of_rules(Product(), _ONES, lambda seen: _falls(seen, 0.1))),
            ("product ECE, last exit", "", _of_rules(Product(), _ONES, lambda seen: _ece(seen, -1))),
        ),
    ),
    Deviation(
        "number format (2)",
        "–",
        "float64 weights make all of it float64; here float32, multiplied out",
        (("inputs with another answer at some exit", "%", _float32),),
    ),
    Deviation(
        "collapse (3)",
        "fall back on the softmax",
        "no fallback: NaN",
        (
            ("product falls by .5", "%", _without_fallback("falls")),
            ("product accuracy, last exit", "%", _without_fallback("accuracy")),
        ),
    ),
    Deviation(
        "static threshold (4), b = 2",
        "classes under b leave",
        "max(f, b): none leaves",
        (
            ("mean support, last exit", "classes", _support),
            ("accuracy, last exit", "%", _of_rules(_GATE, _CLAMP, lambda seen: _accuracy(seen, -1))),
            ("falls by .05", "%", _of_rules(_GATE, _CLAMP, lambda seen: _falls(seen, 0.05))),
            ("ECE, last exit", "", _of_rules(_GATE, _CLAMP, lambda seen: _ece(seen, -1))),
        ),
    ),
    Deviation(
        "adaptive threshold (5)",
        "classes under τ leave",
        "printed formula max(f, τ); not released",
        (
            ("accuracy, last exit", "%", _adaptive(lambda seen: _accuracy(seen, -1))),
            ("falls by .1", "%", _adaptive(lambda seen: _falls(seen, 0.1))),
            ("ECE, first exit", "", _adaptive(lambda seen: _ece(seen, 0))),
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
            ("caching falls by .01", "%", _ties("falls")),
        ),
    ),
    Deviation(
        "> or ≥ (9)",
        "falls ≥ τ",
        "falls > τ",
        (
            ("product falls by .01", "%", lambda run: _strictly(run, Product(), 0.01)),
            ("latest falls by .5", "%", lambda run: _strictly(run, Latest(), 0.5)),
        ),
    ),
    Deviation(
        "RAPS (17)",
        "cites RAPS: as its authors' code",
        "randomises the penalty too, corrects the quantile, allows empty sets",
        (
            ("product set size, first exit", "classes", _raps("set_size", CODE, 0)),
            ("product set size, last exit", "classes", _raps("set_size", CODE, -1)),
            ("product coverage, last exit", "%", _raps("set_coverage", CODE, -1)),
        ),
    ),
    Deviation("RAPS seeds (18)", "–", "draws are not seeded", (("deviation of the last exit's set size", "classes", _seeds),)),
    Deviation(
        "RAPS without draws (19)",
        "no draws anywhere",
        "calibration scores stay randomised",
        (("set size, last exit", "classes", _unrandomised("size")), ("coverage, last exit", "%", _unrandomised("coverage"))),
    ),
    Deviation(
        "ECE bins (20)",
        "15 equal bins, 1.0 in the last",
        "the same; other codes use 10 bins or drop 1.0",
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


def _strictly(run: Run, rule: Product | Latest, limit: float) -> Pair:
    seen = _seen(run, rule)
    return Pair(_falls(seen, limit), _falls(seen, limit, strict=True))


def _weights_panel(runs: tuple[Run, ...]) -> Panel:
    limits = (0.01, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5)
    curves = {
        name: each_over_seeds([[_falls(_seen(run, rule), limit) for limit in limits] for run in runs])
        for name, rule in (("product, i/M", Product()), ("product, ones", _ONES))
    }
    lines = tuple(line(name, values, look, x=limits) for look, (name, values) in zip((2, 1), curves.items(), strict=True))
    return Panel("Weights: label's falls", "falls by at least", "% of inputs", lines, kind="symlog")


def _support_panel(runs: tuple[Run, ...]) -> Panel:
    curves: dict[str, list[Measured]] = {
        name: each_over_seeds([_seen(run, rule).support.double().mean(1).tolist() for run in runs])
        for name, rule in ((f"gate, b = {THRESHOLD:g}", _GATE), (f"clamp, b = {THRESHOLD:g}", _CLAMP), ("ReLU", Product()))
    }
    lines = tuple(line(name, values, look + 3) for look, (name, values) in enumerate(curves.items()))
    return Panel("Threshold: classes left", "exit", "mean classes", lines, exits=len(lines[0].x), zero=True)


def _written(value: Measured, unit: str) -> str:
    digits = 3 if unit == "" else 2
    spread = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}{' ' + unit if unit else ''}".replace("-", "−")


def _signed(value: Measured, unit: str) -> str:
    return f"{value.mean:+.{3 if unit == '' else 2}f}".replace("-", "−")
