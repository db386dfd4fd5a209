"""Our own: where the paper's released code differs from its text, and what each difference does to the numbers.

Every row is measured on the kept test rows of each seed and averaged. What the code does is reimplemented here from its
description, with options of this library where it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Caching, ClippedReLU, Latest, Product, Rule, ThresholdReLU
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.evaluation import evaluate
from anytime.metrics import drop, ece, follow, histogram, oracle_accuracy, oracle_auroc_as_released, reach
from anytime.metrics.calibration import ECE_BINS, ORACLE_BINS
from anytime.metrics.trajectories import Trajectories
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, each_over_seeds, over_seeds, with_deviation
from anytime.reproduce.group import LABEL_DROPS, rows_in_words
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import Plot, line, over_exits
from anytime.reproduce.runs import Run
from anytime.reproduce.studies.thresholds import fit_adaptive

THRESHOLD = 2.0
_SEEDS = 10
_FEW = 0.1
"""Percent of inputs."""


@dataclass(frozen=True)
class Pair:
    """One metric of one run, by the paper's text and by its code."""

    text: float
    code: float


Pairs = dict[tuple[str, str], Pair]
"""By name and unit."""


@dataclass(frozen=True)
class Deviation:
    """A difference between text and code.

    Attributes:
        topic: What it is about, with its number in our notes on the paper.
        text: What the paper says.
        code: What its code does.
        measure: The metrics of a run that show it.
    """

    topic: str
    text: str
    code: str
    measure: Callable[[Run], Pairs]


def deviations(draft: Draft) -> Finding:
    """A table of all deviations that logits can show."""
    runs = draft.runs.need(MSDNET_100)
    draft.used += runs
    for each in DEVIATIONS:
        found = [each.measure(run) for run in runs]
        for name, unit in found[0]:
            pairs = [seed[name, unit] for seed in found]
            text, code = over_seeds([pair.text for pair in pairs]), over_seeds([pair.code for pair in pairs])
            change = over_seeds([pair.code - pair.text for pair in pairs]).mean
            digits, suffix = (2, f" {unit}") if unit else (3, "")
            cells = [f"{with_deviation(value, digits)}{suffix}" for value in (text, code)]
            cells.append(f"{change:+.{digits}f}".replace("-", "−"))
            draft.table.append((each.topic, each.text, each.code, name, *cells))
            numbers = {"text": text.mean, "code": code.mean, "change": change, "seeds": len(pairs)}
            draft.numbers[f"{each.topic}: {name}"] = numbers
    collapsed = over_seeds([100 * float(_seen(run, Product()).fell_back.any(0).double().mean()) for run in runs])
    weights, theirs = draft.numbers["weights (1): product drops by .01"], paper.LABEL_DROPS["msdnet", "cifar100", "product"][0]
    draft.plots += [_weights_plot(runs), _support_plot(runs)]
    draft.claim(
        f"without the fallback hardly any input is lost (less than {_FEW:g} %)",
        collapsed.mean < _FEW,
        f"{collapsed.mean:.3f} % of the inputs collapse at some exit",
    )
    draft.claim(
        "the paper's figures were made with the weights of its text, not with its code's default: its drops by .01 are nearer",
        abs(weights["text"] - theirs) < abs(weights["code"] - theirs),
        f"{weights['text']:.1f} % with i/M, {weights['code']:.1f} % with ones; the paper has {theirs:g} %",
    )
    return draft.finding(
        rows=rows_in_words(runs, kept=True),
        note="Numbers in parentheses are those of our notes on the paper. Not measured here, since logits do not show it: the "
        "split of the training data (13), the validation rows seen through random crops (14), epochs and number of runs "
        "(15, 16), the finetuned network's activation (11), and what was not released (12, 22). ± is one standard deviation "
        "over the seeds. For the adaptive threshold, C is chosen for either form by the same criterion, calibration error and "
        "drops, which ignores accuracy: for max(f, τ) it picks a C that few logits exceed.",
        headings=("topic", "text", "code", "measured", "by the text", "by the code", "change"),
    )


def _seen(run: Run, rule: Rule[Any]) -> Trajectories:
    logits, labels = run.logits()
    return follow(rule(logits), labels)


def _drops(seen: Trajectories, by: float, *, strict: bool = False) -> float:
    drops = drop(seen.label_probability)
    return 100 * float(reach(drops, [by], strict=strict)) / len(drops)


def _accuracy(seen: Trajectories, exit: int = -1) -> float:
    assert seen.correct is not None
    return 100 * float(seen.correct[exit].double().mean())


def _ece(seen: Trajectories, exit: int = -1, *, bins: int = ECE_BINS) -> float:
    assert seen.correct is not None
    return float(ece(histogram(seen.confidence, seen.correct, bins))[exit])


def _percent(flags: Tensor) -> float:
    return 100 * float(flags.double().mean())


def _weights(run: Run) -> Pairs:
    text, code = _seen(run, Product()), _seen(run, _ONES)
    return {
        ("product accuracy, last exit", "%"): Pair(_accuracy(text), _accuracy(code)),
        ("product drops by .01", "%"): Pair(_drops(text, 0.01), _drops(code, 0.01)),
        ("product drops by .1", "%"): Pair(_drops(text, 0.1), _drops(code, 0.1)),
        ("product ECE, last exit", ""): Pair(_ece(text), _ece(code)),
    }


def _float32(run: Run) -> Pairs:
    """Answers that change when the product is multiplied in float32 instead of summed as logarithms."""
    logits, _ = run.logits()
    weights = torch.arange(1, len(logits) + 1, dtype=torch.float32) / len(logits)
    answers = (logits.float().clamp(min=0) ** weights[:, None, None]).cumprod(0).argmax(-1)
    changed = (answers != _seen(run, Product()).answer).any(0)
    return {("inputs with another answer at some exit", "%"): Pair(0.0, _percent(changed))}


def _without_fallback(run: Run) -> Pairs:
    """A collapsed row is NaN in the code: its answer is class 0, and its comparisons count as a drop at every threshold."""
    labels, seen = run.logits()[1], _seen(run, Product())
    assert seen.correct is not None
    right = torch.where(seen.fell_back[-1], labels == 0, seen.correct[-1])
    dropped = (drop(seen.label_probability) >= 0.5) | seen.fell_back.any(0)
    return {
        ("product drops by .5", "%"): Pair(_drops(seen, 0.5), _percent(dropped)),
        ("product accuracy, last exit", "%"): Pair(_accuracy(seen), _percent(right)),
    }


def _static(run: Run) -> Pairs:
    text, code = _seen(run, _GATE), _seen(run, _CLAMP)
    support = (float(seen.support[-1].double().mean()) for seen in (text, code))
    return {
        ("mean support, last exit", "classes"): Pair(*support),
        ("accuracy, last exit", "%"): Pair(_accuracy(text), _accuracy(code)),
        ("drops by .05", "%"): Pair(_drops(text, 0.05), _drops(code, 0.05)),
        ("ECE, last exit", ""): Pair(_ece(text), _ece(code)),
    }


def _adaptive(run: Run) -> Pairs:
    text = _seen(run, Product(fit_adaptive(run, "gate").activation))
    code = _seen(run, Product(fit_adaptive(run, "clamp").activation))
    return {
        ("accuracy, last exit", "%"): Pair(_accuracy(text), _accuracy(code)),
        ("drops by .1", "%"): Pair(_drops(text, 0.1), _drops(code, 0.1)),
        ("ECE, first exit", ""): Pair(_ece(text, 0), _ece(code, 0)),
    }


def _clip(run: Run) -> Pairs:
    """The largest difference in a probability between C_b·max(min(f, b), 0) and the same without C_b."""
    logits, _ = run.logits()
    limit = 0.5
    scaled = (max(1.0, 1 / limit) * logits.clamp(max=limit).clamp(min=0)).log()
    weights = torch.arange(1, len(logits) + 1) / len(logits)
    total = (weights[:, None, None] * scaled).cumsum(0)
    alive = total.amax(-1) > -torch.inf
    ours = Product(ClippedReLU(limit))(logits).probs
    return {("largest change of a probability", ""): Pair(0.0, float((total.softmax(-1) - ours)[alive].abs().max()))}


def _ties(run: Run) -> Pairs:
    """Caching with ≥ on softmax confidences in float32, where many round to one; the text's strict > on exact confidences."""
    logits, labels = run.logits()
    text, log_probs = _seen(run, Caching()), logits.float().log_softmax(-1)
    kept, ties = log_probs[0], torch.zeros(len(labels), dtype=torch.bool)
    rows = [kept]
    for now in log_probs[1:]:
        new, old = now.exp().amax(-1), kept.exp().amax(-1)
        ties |= new == old
        kept = torch.where((new >= old)[:, None], now, kept)
        rows.append(kept)
    every = torch.stack(rows)
    probability = every.exp().gather(-1, labels.expand(every.shape[:2])[..., None])[..., 0]
    return {
        ("inputs with a tie", "%"): Pair(0.0, _percent(ties)),
        ("caching accuracy, last exit", "%"): Pair(_accuracy(text), _percent(every[-1].argmax(-1) == labels)),
        ("caching drops by .01", "%"): Pair(_drops(text, 0.01), _percent(drop(probability) >= 0.01)),
    }


def _strict(run: Run) -> Pairs:
    product, latest = _seen(run, Product()), _seen(run, Latest())
    return {
        ("product drops by .01", "%"): Pair(_drops(product, 0.01), _drops(product, 0.01, strict=True)),
        ("latest drops by .5", "%"): Pair(_drops(latest, 0.5), _drops(latest, 0.5, strict=True)),
    }


def _raps(run: Run) -> Pairs:
    """The original RAPS, which the text cites, and the sets of the code."""
    sizes, coverages = [], []
    for sets in (Raps(variant="original", quantile="plain"), CODE):
        product = evaluate(*run.logits(), rules=("product",), sets=sets).rules["product"]
        sizes.append(product.set_size or ())
        coverages.append(product.set_coverage or ())
    return {
        ("product set size, first exit", "classes"): Pair(*(size[0] for size in sizes)),
        ("product set size, last exit", "classes"): Pair(*(size[-1] for size in sizes)),
        ("product coverage, last exit", "%"): Pair(*(100 * coverage[-1] for coverage in coverages)),
    }


def _seeds(run: Run) -> Pairs:
    """Standard deviation of the mean set size at the last exit over random seeds: zero with a fixed seed."""
    found = [evaluate(*run.logits(), rules=("product",), sets=CODE, seed=seed).rules["product"] for seed in range(_SEEDS)]
    sizes = over_seeds([each.set_size[-1] for each in found if each.set_size is not None])
    return {("deviation of the last exit's set size", "classes"): Pair(0.0, sizes.deviation or 0.0)}


def _unrandomised(run: Run) -> Pairs:
    """Deterministic sets from deterministic scores (text), and from randomised scores (code), at the last exit."""
    logits, labels = run.logits()
    log_probs, cut = Product()(logits).log_probs[-1:], logits.shape[1] // 5
    ascending = sort_rows(log_probs)
    rank = rank_of(log_probs, ascending, labels)
    draws = torch.rand(1, len(labels), generator=torch.Generator().manual_seed(0))
    plain, sizes = Raps(randomised=False, quantile="corrected"), []
    for calibrating in (plain, CODE):
        limit = calibrating.threshold(calibrating.label_score(ascending[:, :cut], rank[:, :cut], draws[:, :cut]))
        sizes.append(plain.size(ascending[:, cut:], limit, draws[:, cut:]))
    return {
        ("set size, last exit", "classes"): Pair(*(float(size.double().mean()) for size in sizes)),
        ("coverage, last exit", "%"): Pair(*(_percent(rank[:, cut:] < size) for size in sizes)),
    }


def _bins(run: Run) -> Pairs:
    """ECE of the backbone's last exit with other bins, and without the inputs whose confidence is exactly 1."""
    seen = _seen(run, Latest())
    assert seen.correct is not None
    keep = seen.confidence[-1] < 1
    # Rows that are left out still count in the total, as in code that drops them from the bins only.
    dropped = ece(histogram(seen.confidence[-1:, keep], seen.correct[-1:, keep], ECE_BINS))
    return {
        ("latest ECE, last exit, 10 bins", ""): Pair(_ece(seen), _ece(seen, bins=10)),
        ("latest ECE, last exit, 15 bins, 1.0 dropped", ""): Pair(_ece(seen), float(dropped[0]) * float(keep.double().mean())),
    }


def _oracle(run: Run) -> Pairs:
    """The product's lead over the backbone with the oracle, in percent: corrected, and as released."""
    corrected, released = [], []
    for rule in (Latest(), Product()):
        seen = _seen(run, rule)
        assert seen.correct is not None
        corrected.append(100 * oracle_accuracy(histogram(seen.confidence, seen.correct, ORACLE_BINS)))
        released.append(100 * oracle_auroc_as_released(seen.confidence, seen.answer, run.logits()[1]))
    text, code = corrected[1] - corrected[0], released[1] - released[0]
    return {
        ("product's lead over latest, first exit", "%"): Pair(float(text[0]), float(code[0])),
        ("product's lead over latest, last exit", "%"): Pair(float(text[-1]), float(code[-1])),
    }


_ONES = Product(weights="ones")
CODE = Raps(quantile="corrected")
"""Prediction sets as in the paper's released code."""
_GATE, _CLAMP = Product(ThresholdReLU(THRESHOLD)), Product(ThresholdReLU(THRESHOLD, "clamp"))
_FLOAT64 = "float64 weights make everything float64; here float32 multiplication"
_RAPS_CODE = "randomises the penalty too, corrects the quantile, allows empty sets"

DEVIATIONS = (
    Deviation("weights (1)", "i/M", "ones by default", _weights),
    Deviation("number format (2)", "–", _FLOAT64, _float32),
    Deviation("collapse (3)", "fall back to the softmax", "no fallback: NaN", _without_fallback),
    Deviation("static threshold (4), b = 2", "classes below b leave", "max(f, b): none leaves", _static),
    Deviation("adaptive threshold (5)", "classes below τ leave", "printed formula max(f, τ); not released", _adaptive),
    Deviation("clip (6), b = .5", "scaled by C_b", "not scaled", _clip),
    Deviation("ties of caching (8)", "keep the earlier", "take the later, on float32 confidences", _ties),
    Deviation("> or ≥ (9)", "drops ≥ τ", "drops > τ", _strict),
    Deviation("RAPS (17)", "cites RAPS: as its authors' code", _RAPS_CODE, _raps),
    Deviation("RAPS seeds (18)", "–", "not seeded", _seeds),
    Deviation("deterministic RAPS (19)", "no randomness", "calibration scores stay randomised", _unrandomised),
    Deviation("ECE bins (20)", "15 equal bins, 1.0 in the last", "the same; other code uses 10 bins or drops 1.0", _bins),
    Deviation("OC-AUROC (21)", "deferral to an oracle; here its accuracy", "a binary metric on class indices", _oracle),
)


def _weights_plot(runs: tuple[Run, ...]) -> Plot:
    lines = []
    for name, rule, look in (("product, i/M", Product(), 2), ("product, ones", _ONES, 3)):
        curves = [[_drops(seen, by) for by in paper.DROPS] for seen in (_seen(run, rule) for run in runs)]
        lines.append(line(name, each_over_seeds(curves), look, x=paper.DROPS))
    return Plot("Weights: label drops", LABEL_DROPS.x_title, LABEL_DROPS.axis, tuple(lines), kind="symlog")


def _support_plot(runs: tuple[Run, ...]) -> Plot:
    lines = []
    rules = ((f"gate, b = {THRESHOLD:g}", _GATE), (f"clamp, b = {THRESHOLD:g}", _CLAMP), ("ReLU", Product()))
    for look, (name, rule) in enumerate(rules, 4):
        sizes = each_over_seeds([_seen(run, rule).support.double().mean(1).tolist() for run in runs])
        lines.append(line(name, sizes, look))
    return over_exits("Threshold: classes left", "mean classes", lines, zero=True)
