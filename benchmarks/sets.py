"""The tables of docs/sets.md, as markdown: how large prediction sets are, and how often they hold the label.

    python benchmarks/sets.py                   the logits that come with the library, 1,000 rows
    python benchmarks/sets.py LOGITS.npz        logits of your own
    python benchmarks/sets.py --simulate        known truth in place of logits: nested sets, nested intervals

Two fifths of the rows fit and the others measure; figures are means over `--splits` random cuts. The rival of every nested
kind is RAPS calibrated exit by exit, whose sets hold the label at each exit but, intersected, not at all of them. In the first
simulation the rival is the draw that the proof asks for and nobody has, one that has seen the label; in the second, one draw.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import anytime
from anytime.calibrate import fit_temperature
from anytime.combine import parse_rule
from anytime.conformal import (
    Raps,
    fit_conformal_sets,
    fit_nested_intervals,
    fit_nested_sets,
    measure_sets,
    running_intersection,
    support_sets,
    tuning_split,
)
from anytime.conformal.nested import log_gammas, log_ratio

ALPHA = 0.05
Rows = tuple[Tensor, Tensor]
"""Logits and labels."""
Sets = Callable[[Rows, Tensor, int], Tensor]
"""Sets, `(exits, batch, classes)`, of logits to measure on, from rows to fit on and a seed."""


def raps(name: str, *, simultaneous: bool = False, shared: bool = False) -> Sets:
    def sets(fit: Rows, logits: Tensor, seed: int) -> Tensor:
        fitted = fit_conformal_sets(*fit, rule=name, raps=Raps(ALPHA), simultaneous=simultaneous, shared=shared, seed=seed)
        members = fitted.sets(parse_rule(name)(logits).log_probs, seed=seed)
        return running_intersection(members) if simultaneous else members

    return sets


def original(fit: Rows, logits: Tensor, seed: int) -> Tensor:
    """As `anytime conformal --variant original`: the rows that tune fit the temperature too."""
    chosen, _ = tuning_split(len(fit[1]), seed)
    known = fit_temperature(fit[0][:, chosen], fit[1][chosen], anytime.Product()).rule
    fitted = fit_conformal_sets(*fit, rule=known, raps=Raps(ALPHA, variant="original"), tune=True, seed=seed)
    return fitted.sets(known(logits).log_probs, seed=seed)


KINDS: dict[str, Sets] = {
    "RAPS of `latest`": raps("latest"),
    "RAPS of `caching`": raps("caching"),
    "RAPS of `product`": raps("product"),
    "… one draw an input (`shared`)": raps("product", shared=True),
    "… original, tuned, at its temperature": original,
    "RAPS of `product` for all exits, intersected": raps("product", simultaneous=True),
    "… and one draw an input": raps("product", simultaneous=True, shared=True),
    "nested sets (Dirichlet)": lambda fit, logits, seed: (
        fit_nested_sets(*fit, alpha=ALPHA, seed=seed)(logits, seed=seed).members
    ),
    "support of `product`": lambda fit, logits, seed: support_sets(anytime.Product()(logits)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulate:
        print_nested(draws=40_000)
        print_intervals(draws=2_000)
        return
    file = anytime.open_logits(options.file) if options.file else anytime.samples.cifar100_msdnet()
    assert file.labels is not None
    print_sets((torch.as_tensor(np.asarray(file.logits[:])).float(), file.labels), options.splits)


def print_sets(rows: Rows, splits: int) -> None:
    logits, labels = rows
    cut = 2 * len(labels) // 5
    print(f"{cut:,} rows fit, {len(labels) - cut:,} measure; means over {splits} splits; α = {ALPHA:g}\n")
    print(f"| sets | size, exits 1 to {len(logits)} | coverage, lowest and highest exit | label in all | nested | grow |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, sets in KINDS.items():
        found = []
        for seed in range(splits):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
            fit, test = order[:cut], order[cut:]
            found.append(asdict(measure_sets(sets((logits[:, fit], labels[fit]), logits[:, test], seed), labels[test])))
        size, coverage, together, nested = (
            np.mean([each[key] for each in found], 0) for key in ("size", "coverage", "simultaneous_coverage", "nestedness")
        )
        grow = np.mean([each["size_rise_percent"]["1"] for each in found])
        cells = (
            " ".join(f"{value:.1f}" for value in size),
            f"{share(coverage.min())}, {share(coverage.max())}",
            share(together[-1]),
            share(nested[-1]),
            f"{grow:.0f} %",
        )
        print(f"| {name} | {' | '.join(cells)} |")


def share(value: float) -> str:
    return "1" if value == 1 else f"{value:.3f}".removeprefix("0")


def print_nested(draws: int) -> None:
    """Labels in the nested sets of all of five exits, six classes, evidence of about 1 each, no thresholds fitted."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(5, draws, 6)) + 1)
    labels = torch.from_numpy(rng.integers(0, 6, draws))
    index = torch.arange(draws)
    logits[:, index, labels] = logits[:, index, labels].abs() + 0.1  # a label without evidence is lost under any draw
    label = torch.nn.functional.one_hot(labels, 6)
    print(f"| draws of π | labels in all five sets, {draws:,} inputs, α = {ALPHA:g} |\n| --- | --- |")
    for name, seen in (("have seen the label, as the proof asks", label), ("have not, as in use", 0 * label)):
        ratio = torch.stack(
            [
                log_ratio(now, 0.0, log_gammas(now.clamp(min=0) + seen, [1, exit]))[index, labels]
                for exit, now in enumerate(logits)
            ]
        )
        inside = (ratio.cumsum(0) <= -math.log(ALPHA)).all(0)
        print(f"| {name} | {100 * inside.double().mean():.1f} % |")


def print_intervals(draws: int) -> None:
    """Targets in the nested intervals of all of three exits with two to four features and a model that is right."""
    print(f"\n| rows to fit | one draw: targets held, {draws:,} simulations | five draws intersected | width, of one draw's |")
    print("| --- | --- | --- | --- |")
    for rows in (120, 30, 12):
        rng = np.random.default_rng(rows)
        held = {1: 0, 5: 0}
        widths: dict[int, list[float]] = {1: [], 5: []}
        for draw in range(draws):
            inputs = torch.from_numpy(rng.normal(size=(rows + 1, 4)))
            targets = inputs @ torch.from_numpy(rng.normal(size=4)) + 0.5 * torch.from_numpy(rng.normal(size=rows + 1))
            features = [inputs[:, : exit + 2] for exit in range(3)]
            fitted = fit_nested_intervals([each[:rows] for each in features], targets[:rows], alpha=ALPHA)
            for intersected in held:
                answer = fitted([each[rows:] for each in features], seed=draw, draws=intersected)
                held[intersected] += bool(answer.holds(targets[rows:]).all())
                widths[intersected].append(float((answer.upper - answer.lower)[-1, 0].nan_to_num(0.0)))
        one, five = (f"{100 * held[count] / draws:.1f} %" for count in (1, 5))
        print(f"| {rows} | {one} | {five} | {100 * np.median(widths[5]) / np.median(widths[1]):.0f} % |")


if __name__ == "__main__":
    main()
