"""Inputs that are done leave the running batch: what that saves, and from which share of rows on it pays.

    python benchmarks/compaction.py                    the CIFAR MSDNet, batches of 64, one thread
    python benchmarks/compaction.py --device cuda      the same on a GPU
    python benchmarks/compaction.py --rounds 3         a quick look

The rival runs every input through every stage and stops in simulation, as published code does. First the time of a batch for
several rates of stopping, dropping rows at every exit; rows are chosen by lot: at a rate of 0.3 three in ten of those still
there stop at each exit. Then the break-even: after each exit but the last, how many of 64 rows may be left for the copy of what
is carried plus the remaining stages on these rows to be faster than the remaining stages on all. Times are medians over
rounds in which the variants take turns: on the CPU seconds of the one thread, which others on the machine disturb least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import anytime
from anytime.models import MultiExit, create
from anytime.policy import Policy, run_batch
from anytime.policy.stopping import PolicyState

RATES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class ByLot(Policy):
    """Stop a share of the inputs still there, whatever they are."""

    rate: float

    def stop(self, state: PolicyState, exit: int, prediction: anytime.Prediction) -> tuple[PolicyState, Tensor]:
        generator = torch.Generator().manual_seed(exit)
        labels = prediction.labels
        return state, (torch.rand(len(labels), generator=generator) < self.rate).to(labels.device)


def take_turns(jobs: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """The median seconds of each job."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            begin = clock()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first warms up
                times[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def run_all(model: MultiExit, x: Tensor, policy: Policy) -> Tensor:
    return policy.answer(anytime.Product()(model(x))).log_probs


def compare_rates(model: MultiExit, x: Tensor, rounds: int) -> None:
    print("rate of stopping   mean exit   all rows through   rows dropped   ratio")
    for rate in RATES:
        policy = ByLot(rate)
        jobs = {
            "all": lambda policy=policy: run_all(model, x, policy),
            "dropped": lambda policy=policy: run_batch(model, x, anytime.Product(), policy, compact_when=1.0),
        }
        times = take_turns(jobs, rounds, x.device)
        mean = float(run_batch(model, x, anytime.Product(), policy, compact_when=1.0).exit.double().mean())
        whole, part = 1e3 * times["all"], 1e3 * times["dropped"]
        print(f"{rate:16.1f}   {mean:9.2f}   {whole:13.1f} ms   {part:9.1f} ms   {whole / part:5.2f}")


def finish(model: MultiExit, first: int, carry: tuple[Tensor, ...]) -> Tensor:
    logits = torch.empty(0)
    for exit in range(first, model.num_exits):
        carry, logits = model.stage(exit, carry)
    return logits


def find_break_even(model: MultiExit, x: Tensor, rounds: int) -> float:
    """Print the break-even after each exit; the least of them."""
    batch = len(x)
    sizes = sorted({round(batch * share) for share in (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95)} | {batch - 2, batch - 1})
    print(f"\nafter exit   all {batch} rows   " + "   ".join(f"{size:>4} left" for size in sizes) + "   break-even")
    carry: tuple[Tensor, ...] = (x,)
    found = []
    for exit in range(model.num_exits - 1):
        carry, _ = model.stage(exit, carry)
        jobs: dict[str, Callable[[], object]] = {"all": lambda carry=carry, exit=exit: finish(model, exit + 1, carry)}
        for size in sizes:
            keep = torch.randperm(batch, generator=torch.Generator().manual_seed(size))[:size].sort().values.to(x.device)
            jobs[str(size)] = lambda carry=carry, exit=exit, keep=keep: finish(
                model, exit + 1, tuple(part[keep] for part in carry)
            )
        times = take_turns(jobs, rounds, x.device)
        gains = [times["all"] / times[str(size)] for size in sizes]
        # The largest share up to which it pays without a gap.
        paying = [size for place, size in enumerate(sizes) if all(gain > 1 for gain in gains[: place + 1])]
        found.append(max(paying, default=0) / batch)
        row = "   ".join(f"{gain:8.2f}x" for gain in gains)
        print(f"{exit:10}   {1e3 * times['all']:8.1f} ms   {row}   {found[-1]:10.2f}")
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = create("msdnet-cifar", classes=100).eval().to(device)
    x = torch.randn(options.batch, 3, 32, 32, device=device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"one thread, load {os.getloadavg()[0]:.1f}"
    print(f"msdnet-cifar, 100 classes, {model.num_exits} exits, batch {options.batch}, {name}, {options.rounds} rounds")
    with torch.inference_mode():
        compare_rates(model, x, options.rounds)
        least = find_break_even(model, x, options.rounds)
    print(f"dropping pays after every exit once at most {least:.0%} of the rows are left")


if __name__ == "__main__":
    main()
