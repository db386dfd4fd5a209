"""The fitted product beside its rivals: how much penalty, how many rows, and what it gains, on rows not fitted on.

    python benchmarks/fitted_product.py                             the logits that come with the library, 1,000 rows
    python benchmarks/fitted_product.py LOGITS.npz                  logits of your own, cut into random halves
    python benchmarks/fitted_product.py VAL.npz --test TEST.npz     fitted on one file, measured on another

Everything is fitted on one half of the rows and measured on the other, and again the other way round; the figures are means
of both and of `--repeats` cuts. With `--test` there is one cut, the files themselves. The rivals are caching, caching at
temperatures, the product, and the product at its calibrated temperatures. `--rows` fits on fewer rows and measures on the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anytime
from anytime.calibrate import fit_product, fit_temperature
from anytime.checks import check_logits
from anytime.combine import Cached, Caching, Latest, Product, Rule
from anytime.metrics import Summary, follow

PENALTIES = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)
ROWS = (100, 300, 1000, 3000, 5000)
IGNORED = ((10.0, 0.05), (10.0, 0.1), (30.0, 0.1))
BLOCK = 1000
Half = tuple[Tensor, Tensor]
Fit = Callable[[Tensor, Tensor], Rule[Any]]

RIVALS: dict[str, Fit] = {
    "latest": lambda logits, labels: Latest(),
    "latest at temperatures": lambda logits, labels: fit_temperature(logits, labels).rule,
    "caching": lambda logits, labels: Caching(),
    "caching at temperatures": lambda logits, labels: fit_temperature(logits, labels, Caching()).rule,
    "product": lambda logits, labels: Product(),
    "product at its temperatures": lambda logits, labels: fit_temperature(logits, labels, Product()).rule,
}


def fitted(penalty: float, ignored: float = 0.0, margin: float | None = None) -> Fit:
    return lambda logits, labels: fit_product(logits, labels, penalty=penalty, ignored=ignored, margin=margin).rule


def cached(fit: Fit) -> Fit:
    return lambda logits, labels: Cached(fit(logits, labels))


def read(path: Path | None) -> Half:
    file = anytime.samples.cifar100_msdnet() if path is None else anytime.open_logits(path)
    if file.labels is None:
        raise SystemExit(f"{path} has no labels")
    return check_logits(file.logits[:]), file.labels.long()


def unseen_rows(data: Half, test: Half) -> Half:
    """The rows of `test` whose logits are not in `data`: CIFAR holds some images twice."""
    known = {row.tobytes() for row in data[0][0].numpy()}
    new = torch.tensor([row.tobytes() not in known for row in test[0][0].numpy()])
    print(f"{int((~new).sum())} of {len(new)} rows to measure on are among those to fit on, and left out")
    return test[0][:, new], test[1][new]


def cuts(data: Half, test: Half | None, repeats: int) -> Iterable[tuple[Half, Half]]:
    """Rows to fit on and rows to measure on."""
    logits, labels = data
    if test is not None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        yield (logits[:, order], labels[order]), test
        return
    for seed in range(repeats):
        first, second = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).chunk(2)
        for fit, unseen in ((first, second), (second, first)):
            yield (logits[:, fit], labels[fit]), (logits[:, unseen], labels[unseen])


def measure(rule: Rule[Any], logits: Tensor, labels: Tensor) -> list[float]:
    summary = Summary(torch.arange(1.0, len(logits) + 1))
    for now, wanted in zip(torch.split(logits, BLOCK, 1), torch.split(labels, BLOCK), strict=True):
        summary.add(follow(rule(now), wanted))
    found = summary.metrics().to_json()
    drops = [found["label_drop_percent"][limit] for limit in ("0.05", "0.1", "0.5")]
    accuracy, ece = found["accuracy"], found["ece"]
    return [np.mean(accuracy), accuracy[-1], *drops, np.mean(ece), max(ece), np.mean(found["nll"])]


def table(name: str, fits: dict[str, Fit], halves: list[tuple[Half, Half]]) -> None:
    print(f"\n| {name} | mean accuracy | last exit | drops ≥ .05, % | ≥ .1, % | ≥ .5, % | mean ECE | max ECE | mean NLL |")
    print("| --- |" + " --- |" * 8)
    for row, fit in fits.items():
        numbers = np.mean([measure(fit(*seen), *unseen) for seen, unseen in halves], 0)
        cells = [f"{number:.{places}f}" for number, places in zip(numbers, (3, 3, 1, 2, 2, 3, 3, 3), strict=True)]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def foretold(rule: Rule[Any], logits: Tensor, drop: float = 0.1) -> float:
    """The share of inputs whose label drops, as the final probabilities of the classes that dropped foretell it, in percent."""
    probs = rule(logits).probs
    fallen = (probs.cummax(0).values - probs).amax(0) >= drop
    return float(100 * (probs[-1] * fallen).sum(-1).mean())


def fewer(rows: int, fit: Fit) -> Fit:
    return lambda logits, labels: fit(logits[:, :rows], labels[:rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="logits to fit on; by default those that come with the library")
    parser.add_argument("--test", type=Path, help="logits to measure on")
    parser.add_argument("--repeats", type=int, default=1, help="random cuts into halves")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="numbers of rows to fit on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, test = read(options.file), None if options.test is None else read(options.test)
    if test is not None:
        test = unseen_rows(data, test)
    halves = list(cuts(data, test, options.repeats))
    exits, count, classes = halves[0][0][0].shape
    print(
        f"{exits} exits, {classes} classes; fitted on {count} rows, measured on {halves[0][1][0].shape[1]}, {len(halves)} times"
    )
    table("rule", RIVALS | {"fitted product, λ = 3": fitted(3.0)}, halves)
    table("fitted product", {f"λ = {penalty:g}": fitted(penalty) for penalty in PENALTIES}, halves)
    table("with held answers, margin 1", {f"λ = {penalty:g}": fitted(penalty, margin=1.0) for penalty in PENALTIES}, halves)
    limits = {f"λ = {penalty:g} above {limit:g}": fitted(penalty, limit) for penalty, limit in IGNORED}
    table("only what exceeds a limit", limits, halves)
    on_top: dict[str, Fit] = {f"λ = {penalty:g}, cached": cached(fitted(penalty)) for penalty in (1.0, 3.0)}
    table("caching on top", on_top, halves)
    honest = [foretold(fitted(0.0)(*seen), unseen[0]) for seen, unseen in halves]
    print(f"\nλ = 0: its own probabilities foretell that {np.mean(honest):.1f} % of inputs drop by .1 or more")
    few = sorted({min(rows, count) for rows in options.rows})
    table("λ = 3, fitted on", {f"{rows} rows": fewer(rows, fitted(3.0)) for rows in few}, halves)
    begin = time.perf_counter()
    found = fit_product(*halves[0][0])
    print(f"\none fit on {count} rows: {time.perf_counter() - begin:.1f} s, {found.n_evaluations} evaluations, one thread")
    for name, powers in (("past", found.past), ("now", found.now)):
        print(f"{name:5}" + " ".join(f"{power:.3f}" for power in powers))


if __name__ == "__main__":
    main()
