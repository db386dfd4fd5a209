"""Evaluate large logits: this library against a plain implementation, in one run.

    python benchmarks/evaluate.py                      5 exits × 50,000 inputs × 1,000 classes, float32, 1 GB on disk
    python benchmarks/evaluate.py --samples 2000       a quick look

The rival is written in the manner of the paper's released code: operations on whole tensors in float64, Python loops over
inputs and pairs of exits. Both read the same memory-mapped file and compute the same metrics for the same three rules;
the metrics are compared, and the ratio of the times is printed. Each side runs in a process of its own. Memory is what
the process holds beyond the pages of the file, at its peak. CPU seconds are those of all threads: unlike the time on the
clock, they hardly depend on what else the machine is doing.

With numba (extra `fast`) `anytime.evaluate` runs compiled code, which is loaded, or compiled, before its clock starts; how long
that takes is printed too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

TAUS = (0.01, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5)
RISES = (0.01, 0.1, 0.5, 1.0)


def write_logits(path: Path, exits: int, samples: int, classes: int) -> None:
    """Logits like a trained network's: most classes negative, the label ahead, later exits surer."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, samples)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(exits, samples, classes))
    for start in range(0, samples, 4096):
        rows = slice(start, min(start + 4096, samples))
        count = rows.stop - rows.start
        shared = rng.standard_normal((count, classes), dtype=np.float32)
        gain = rng.normal(11, 3, count).astype(np.float32)
        for exit in range(exits):
            logits = 2 * shared + rng.standard_normal((count, classes), dtype=np.float32) * 1.2 - 1
            logits[np.arange(count), labels[rows]] += gain * (0.7 + 0.3 * exit / (exits - 1))
            out[exit, rows] = logits
    out.flush()
    np.save(path.with_name("labels.npy"), labels)


def read_once(path: Path) -> float:
    """Seconds to sum the mapped file: the least any evaluation can take."""
    logits = np.load(path, mmap_mode="r")
    begin = time.perf_counter()
    for exit in logits:
        for start in range(0, len(exit), 1024):
            exit[start : start + 1024].sum()
    return time.perf_counter() - begin


def ours(path: Path) -> dict[str, Any]:
    import anytime

    return anytime.evaluate(path, path.with_name("labels.npy")).to_json()["rules"]


def engine() -> Literal["compiled", "plain"]:
    return "compiled" if find_spec("numba") else "plain"


def plain(path: Path) -> dict[str, Any]:
    logits = np.array(np.load(path, mmap_mode="r"), dtype=np.float64)
    labels = np.load(path.with_name("labels.npy"))
    return {
        "latest": measure(softmax(logits), labels),
        "caching": measure(cache(softmax(logits)), labels),
        "product": measure(product(logits), labels),
    }


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def cache(probs: np.ndarray) -> np.ndarray:
    out = [probs[0]]
    for now in probs[1:]:
        newer = now.max(-1) > out[-1].max(-1)
        out.append(np.where(newer[:, None], now, out[-1]))
    return np.stack(out)


def product(logits: np.ndarray) -> np.ndarray:
    exits = len(logits)
    weights = np.arange(1, exits + 1) / exits
    evidence = np.maximum(logits, 0) ** weights[:, None, None]
    total = np.cumprod(evidence, 0)
    mass = total.sum(-1, keepdims=True)
    return np.where(mass > 0, total / np.where(mass > 0, mass, 1), softmax(logits))


def worst_change(curves: np.ndarray, sign: float) -> list[float]:
    changes = []
    for n in range(curves.shape[1]):
        worst = 0.0
        curve = curves[:, n].tolist()
        for i in range(len(curve)):
            for j in range(i + 1, len(curve)):
                worst = max(worst, sign * (curve[j] - curve[i]))
        changes.append(worst)
    return changes


def measure(probs: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    exits, samples, classes = probs.shape
    rows = np.arange(samples)
    answer, confidence = probs.argmax(-1), probs.max(-1)
    right = answer == labels
    label, final = probs[:, rows, labels], probs[:, rows, answer[-1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(probs * np.log(probs), -1)
    onehot = np.zeros((samples, classes))
    onehot[rows, labels] = 1
    drops, finals, rises = worst_change(label, -1), worst_change(final, -1), worst_change(entropy, 1)
    learned, forgot, monotone = [0] * exits, [0] * exits, 0
    for n in range(samples):
        seen = lost = False
        for m, good in enumerate(right[:, n].tolist()):
            if good and not seen:
                learned[m] += 1
                seen = True
            if seen and not good and not lost:
                forgot[m] += 1
                lost = True
        monotone += not lost
    sizes, covered = sets(probs, labels)
    return {
        "accuracy": right.mean(1).tolist(),
        "label_probability": label.mean(1).tolist(),
        "label_drop_percent": {str(t): 100 * float(np.mean([d >= t for d in drops])) for t in TAUS},
        "final_drop_percent": {str(t): 100 * float(np.mean([d >= t for d in finals])) for t in TAUS},
        "correct_monotone_percent": 100 * monotone / samples,
        "never_correct_percent": 100 * float(np.mean(~right.any(0))),
        "overthinking_percent": 100 * float(right.any(0).mean() - right[-1].mean()),
        "learned": learned,
        "forgot": forgot,
        "entropy": entropy.mean(1).tolist(),
        "entropy_rise_percent": {str(t): 100 * float(np.mean([d >= t for d in rises])) for t in RISES},
        "ece": [calibration_error(confidence[m], right[m]) for m in range(exits)],
        "nll": (-np.log(np.maximum(label, 1e-12))).mean(1).tolist(),
        "brier": ((probs - onehot) ** 2).sum(-1).mean(1).tolist(),
        "support_size": (probs > 0).sum(-1).mean(1).tolist(),
        "support_coverage": (label > 0).mean(1).tolist(),
        "set_size": sizes,
        "set_coverage": covered,
    }


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    bins = np.minimum((confidence * 15).astype(int), 14)
    return float(sum(abs(confidence[bins == b].sum() - right[bins == b].sum()) for b in range(15)) / len(right))


def sets(probs: np.ndarray, labels: np.ndarray) -> tuple[list[float], list[float]]:
    """Regularised adaptive sets: whole tensors, sorted."""
    rng = np.random.default_rng(1)
    samples, classes = probs.shape[1:]
    held = rng.permutation(samples)[: samples // 5]
    test = np.setdiff1d(np.arange(samples), held)
    penalty = 0.01 * (np.arange(1, classes + 1) > 5)
    sizes, covered = [], []
    for now in probs:
        order = np.argsort(-now, 1)
        steps = np.take_along_axis(now, order, 1) + penalty
        scores = np.cumsum(steps, 1) - rng.random((samples, 1)) * steps
        rank = (order == labels[:, None]).argmax(1)
        level = min(1.0, np.ceil((len(held) + 1) * 0.95) / len(held))
        limit = np.quantile(scores[held, rank[held]], level, method="higher")
        size = (scores <= limit).sum(1)
        sizes.append(float(size[test].mean()))
        covered.append(float((rank < size)[test].mean()))
    return sizes, covered


def in_own_process(work: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """What `work` finds, its seconds, and its peak memory beyond file pages in MiB."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        process = context.Process(target=_timed, args=(work, path, answer))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{work.__name__} failed with code {process.exitcode} (out of memory?)")
        return json.loads(answer.read_text())


def _timed(work: Callable[[Path], dict[str, Any]], path: Path, answer: Path) -> None:
    import anytime  # both sides pay for the same imports before the clock starts

    anytime.Product()
    begin = time.perf_counter()
    if work is ours:
        anytime.evaluate(np.eye(4, 8, dtype=np.float32)[None].repeat(2, 0), np.arange(4), engine=engine())
    ready = time.perf_counter() - begin
    peak, done = [0.0], threading.Event()
    base = _held()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], _held() - base)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin, used = time.perf_counter(), time.process_time()
    rules = work(path)
    times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - used, "ready": ready}
    done.set()
    answer.write_text(json.dumps({"rules": rules, "peak": peak[0], **times}))


def _held() -> float:
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem"))) / 1024


def largest_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, str]:
    worst = (0.0, "")
    for rule, metrics in theirs.items():
        for name, value in metrics.items():
            if name.startswith("set_"):  # other random draws
                continue
            given = mine[rule][name]
            pairs = (
                zip(given.values(), value.values(), strict=True)
                if isinstance(value, dict)
                else zip(np.atleast_1d(given), np.atleast_1d(value), strict=True)
            )
            worst = max(worst, *((abs(a - b), f"{rule} {name}") for a, b in pairs))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exits", type=int, default=5)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to keep the file between runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        path = folder / f"logits-{options.exits}-{options.samples}-{options.classes}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_logits(path, options.exits, options.samples, options.classes)
        size, cores = path.stat().st_size / 2**20, len(os.sched_getaffinity(0))
        print(f"{options.exits} exits × {options.samples} inputs × {options.classes} classes, {size:.0f} MiB")
        print(f"{cores} cores, load {os.getloadavg()[0]:.1f}")
        read_once(path)
        reading = read_once(path)
        fast, slow = in_own_process(ours, path), in_own_process(plain, path)
        again = read_once(path)
    mine, theirs = fast["rules"], slow["rules"]
    difference, where = largest_difference(mine, theirs)
    print(f"reading the file once  {reading:8.2f} s, {again:.2f} s afterwards")
    for name, side in ((f"anytime, {engine()}", fast), ("plain implementation", slow)):
        print(f"{name:22} {side['seconds']:8.2f} s  {side['cpu']:8.2f} s of CPU  {side['peak']:6.0f} MiB beyond the file")
    print(f"compiled code was ready after {fast['ready']:.1f} s" if engine() == "compiled" else "without compiled code")
    print(f"largest difference of a metric: {difference:.2g} ({where})")
    for name, rules in (("anytime", mine), ("plain", theirs)):
        sizes = rules["product"]["set_size"]
        print(f"set sizes of the product, {name}: {sizes[0]:.2f} → {sizes[-1]:.2f}")
    print(f"ratio {slow['seconds'] / fast['seconds']:.1f}, of CPU seconds {slow['cpu'] / fast['cpu']:.1f}")
    print(f"time over reading once: {fast['seconds'] / min(reading, again):.1f}")


if __name__ == "__main__":
    main()
