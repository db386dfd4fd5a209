"""Evaluation on a GPU: the Triton kernel against reading and copying the logits, the released code's lines, and plain torch.

    python benchmarks/gpu.py                       5 exits × 50,000 inputs × 1,000 classes, float32, on the first GPU
    python benchmarks/gpu.py --samples 2000 --device cpu --only check    a look without a GPU, in Triton's interpreter

Device times are medians between CUDA events, the rest medians on the clock with the device idle before and after. The logits
are like those of benchmarks/evaluate.py. Metrics in a loop are measured beside the forward pass of an eager CIFAR MSDNet,
batches of 256, with and without `Metrics.update` in turns. First the metrics of all paths are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anytime
from anytime.metrics import Metrics
from anytime.metrics.fused import NO_FAULT, fused_rules

RULES = ("latest", "caching", "product")
MORE_RULES = (*RULES, "product(softplus)", "product(heaviside)", "product(exponential)", "mixture", "product(weights=ones)")


def device_ms(work: Callable[[], Any], rounds: int = 15) -> float:
    """The median time between two events around the work."""
    times = []
    for _ in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def clock_ms(work: Callable[[], Any], rounds: int = 7) -> float:
    """The median time on the clock, after a first call."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def make_logits(exits: int, samples: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    """Logits like a trained network's: most classes negative, the label ahead, later exits surer."""
    torch.manual_seed(0)
    labels = torch.randint(0, classes, (samples,), device=device)
    shared = 2 * torch.randn(samples, classes, device=device) - 1
    gain = 11 + 3 * torch.randn(samples, device=device)
    logits = torch.empty(exits, samples, classes, device=device)
    for exit, each in enumerate(logits):
        each.copy_(shared + 1.2 * torch.randn(samples, classes, device=device))
        each[torch.arange(samples, device=device), labels] += gain * (0.7 + 0.3 * exit / (exits - 1))
    return logits, labels


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two documents differ: counts at all, sums by more than 1e-6."""
    if isinstance(one, dict):
        return [line for key in one for line in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return [line for place, (a, b) in enumerate(pairs) for line in differences(a, b, f"{path}/{place}")]
    if isinstance(one, float) and one != other and not abs(one - other) <= 1e-6 * max(1.0, abs(one)):
        return [f"{path}: {one} and {other}"]
    return [f"{path}: {one} and {other}"] if not isinstance(one, float) and one != other else []


def check(device: str, rows: int, only: str | None) -> None:
    """Compare the metrics of the kernel with those of plain torch on the CPU."""
    file = anytime.samples.cifar100_msdnet()
    sample = torch.from_numpy(np.array(file.logits.array[:, :rows]))
    generator = torch.Generator().manual_seed(0)
    wide = 4 * torch.randn(4, min(rows, 600), 1000, generator=generator)
    few = 2 * torch.randn(6, rows, 3, generator=generator)
    cases = {
        "sample": (sample, file.labels[:rows]),
        "sample, more rules": (sample, file.labels[:rows]),
        "half": (sample.half(), file.labels[:rows]),
        "double": (sample.double(), file.labels[:rows]),
        "1,000 classes": (wide, torch.randint(0, 1000, (wide.shape[1],), generator=generator)),
        "3 classes": (few, torch.randint(0, 3, (rows,), generator=generator)),
        "3,000 classes": (4 * torch.randn(2, 64, 3000, generator=generator), torch.arange(64)),
        "no labels": (sample, None),
    }
    for name, (logits, labels) in cases.items():
        if only not in (None, name):
            continue
        rules = MORE_RULES if "rules" in name else RULES
        known = None if labels is None else labels.to(device)
        wanted = anytime.evaluate(logits, labels, rules=rules, engine="plain").to_json()["rules"]
        found = anytime.evaluate(logits.to(device), known, rules=rules, engine="triton").to_json()["rules"]
        lines = differences(wanted, found)
        print(f"check {name}: {len(lines)} numbers differ", *lines[:6], sep="\n  ", flush=True)


def kernel(logits: Tensor, labels: Tensor) -> None:
    """Device times per GB of logits."""
    exits, _, classes = logits.shape
    size = logits.numel() * logits.element_size() / 1e9
    combiners = {name: anytime.parse_rule(name).combine for name in RULES}
    faults = torch.full((1,), NO_FAULT, device=logits.device)

    def follow(names: tuple[str, ...]) -> Callable[[], Any]:
        chosen = {name: combiners[name] for name in names}
        fused = fused_rules(chosen, exits=exits, classes=classes, dtype=logits.dtype, device=logits.device)
        assert fused is not None
        return lambda: fused.follow(logits, labels, faults=faults)

    weights = torch.arange(1, exits + 1, device=logits.device)[:, None, None] / exits

    def released() -> Tensor:
        """The product as in the released code: powers of the ReLU, their product, normalised."""
        evidence = torch.cumprod(torch.relu(logits) ** weights, 0)
        return evidence / evidence.sum(-1, keepdim=True)

    copy = torch.empty_like(logits)
    times = {
        "reading the logits once (amax)": device_ms(lambda: torch.amax(logits, (0, 2))),
        "copying them": device_ms(lambda: copy.copy_(logits)),
        "kernel, latest and caching": device_ms(follow(("latest", "caching"))),
        "kernel, product": device_ms(follow(("product",))),
        "kernel, three rules and their metrics per row": device_ms(follow(RULES)),
        "released code's product, probabilities only": device_ms(released),
        "anytime.Product().combine, probabilities": device_ms(lambda: combiners["product"](logits)),
    }
    base = times["copying them"]
    for name, each in times.items():
        print(f"{name:48}{each:9.3f} ms{each / size:9.3f} ms/GB{each / base:8.2f} of a copy", flush=True)


def whole(logits: Tensor, labels: Tensor) -> None:
    """`evaluate` of a tensor on the GPU, on the clock."""
    from torch.profiler import ProfilerActivity, profile

    times = {
        name: clock_ms(lambda each=name: anytime.evaluate(logits, labels, engine=each), rounds)
        for name, rounds in (("triton", 9), ("plain", 2))
    }
    for name, each in times.items():
        print(
            f"evaluate, engine={name!r}: {each:.1f} ms, {times['plain'] / each:.0f} times faster than plain torch", flush=True
        )
    for name, given in (("without prediction sets", {"sets": None}), ("of the first 500 rows", {})):
        rows = slice(500 if "rows" in name else None)
        some, known = logits[:, rows].contiguous(), labels[rows]
        each = clock_ms(lambda some=some, known=known, given=given: anytime.evaluate(some, known, engine="triton", **given), 9)
        print(f"evaluate {name}, engine='triton': {each:.1f} ms", flush=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        anytime.evaluate(logits, labels, engine="triton")
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=12, max_name_column_width=40))
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40), flush=True)


def loop(device: str) -> None:
    """What `Metrics.update` adds to a validation step, without waiting for it."""
    model: Any = anytime.create_model("msdnet-cifar", classes=100).eval().to(device)
    x = torch.randn(256, 3, 32, 32, device=device)
    labels = torch.randint(0, 100, (256,), device=device)
    metrics = Metrics(RULES)

    def epoch(update: bool, steps: int = 40) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            for _ in range(steps):
                logits = model(x)
                if update:
                    metrics.update(logits, labels)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / steps

    for update in (False, True):
        epoch(update, 5)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(9):
        for update in (False, True):
            found[update].append(epoch(update))
    without, with_update = (statistics.median(found[update]) for update in (False, True))
    share = 100 * statistics.median(b / a - 1 for a, b in zip(found[False], found[True], strict=True))
    print(f"validation step {without:.3f} ms, with Metrics.update {with_update:.3f} ms: {share:+.2f} %", flush=True)
    torch.cuda.synchronize()
    logits = torch.randn(7, 256, 100, device=device)
    begin = time.perf_counter()
    for _ in range(200):
        metrics.update(logits, labels)
    queued = time.perf_counter() - begin
    torch.cuda.synchronize()
    done = time.perf_counter() - begin
    print(f"Metrics.update alone: {5e3 * queued:.1f} us until queued, {5e3 * done:.1f} us until done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--exits", type=int, default=5)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("check", "kernel", "whole", "loop"))
    parser.add_argument("--case", help="one case of the check")
    given = parser.parse_args()
    parts = (given.only,) if given.only else ("check", "kernel", "whole", "loop")
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    if "check" in parts:
        check(given.device, min(given.samples, 1000), given.case)
    if "kernel" in parts or "whole" in parts:
        logits, labels = make_logits(given.exits, given.samples, given.classes, given.device)
        for name, part in (("kernel", kernel), ("whole", whole)):
            if name in parts:
                part(logits, labels)
    if "loop" in parts:
        loop(given.device)


if __name__ == "__main__":
    main()
