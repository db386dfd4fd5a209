"""The engines against plain eager torch: the time to every exit of the CIFAR MSDNet.

    python benchmarks/engines.py                     CPU, batch 1, one thread
    python benchmarks/engines.py --rounds 5          a quick run
    python benchmarks/engines.py --clock wall        wall time, which includes other load on a busy machine
    python benchmarks/engines.py --device cuda       a GPU, batches of 1 and 64; needs torch and NumPy only
    python benchmarks/engines.py --device cuda --variants chosen packed --precisions float32

The rival is the same network in eager torch, stage by stage, in the same run. The engines take turns in blocks of a few
requests, each after two warm-up requests. Times are medians over all rounds, from the request to the logits of an exit on the
CPU: thread time on a CPU, which other load affects least, wall time on a GPU. Weights are random, and batch norms have the
statistics of random images. The difference is that of the logits from those of eager torch on the CPU, relative to the largest
logit of an exit; on a GPU torch uses TF32 for convolutions by default.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from anytime.errors import AnytimeError
from anytime.models import MultiExit, create
from anytime.run.engines.base import Engine
from anytime.run.engines.cuda import CudaGraphsEngine, Precision
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.folding import FoldedEngine, difference

BLOCK, WARM = 5, 2


def make_model() -> MultiExit:
    torch.manual_seed(0)
    model = create("msdnet-cifar", classes=100).train().requires_grad_(False)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 1.0  # statistics of the next batch alone
    model(torch.randn(16, 3, 32, 32))
    return model.eval()


def request(engine: Engine, x: Tensor, clock: Callable[[], float]) -> tuple[list[float], list[Tensor]]:
    """Seconds from the request to each exit, and the logits."""
    begin = clock()
    run = engine.begin(x)
    seconds, logits = [], []
    for _ in range(engine.num_exits):
        logits.append(run.advance())
        seconds.append(clock() - begin)
    run.close()
    return seconds, logits


def take_turns(engines: dict[str, Engine], x: Tensor, rounds: int, clock: Callable[[], float]) -> dict[str, np.ndarray]:
    """The median seconds to each exit."""
    times: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            block = [request(engine, x, clock)[0] for _ in range(WARM + BLOCK)]
            times[name] += block[WARM:]
    return {name: np.median(np.array(values), axis=0) for name, values in times.items()}


def show(
    engines: dict[str, Engine], x: Tensor, rounds: int, clock: Callable[[], float], file: IO[str] | None = None
) -> dict[str, np.ndarray]:
    """Print times, and ratios to the first engine; write one line of JSON per engine to a file, if given."""
    wanted = request(EagerEngine(make_model()), x, clock)[1]
    times = take_turns(engines, x, rounds, clock)
    rival = next(iter(times.values()))
    width = max(map(len, times))
    print(f"\nbatch {len(x)}\n{'':{width}}  " + "  ".join(f"exit {exit + 1:2}" for exit in range(len(rival))) + "   difference")
    for name, seconds in times.items():
        ratio = difference(request(engines[name], x, clock)[1], wanted)
        print(f"{name:{width}}  " + "  ".join(f"{1e3 * each:7.3f}" for each in seconds) + f"  ms    {ratio:.1e}")
        print(f"{'':{width}}  " + "  ".join(f"{each:6.2f}x" for each in rival / seconds))
        if file is not None:
            why = getattr(engines[name], "why", "")
            line = {"batch": len(x), "engine": name, "seconds": seconds.tolist(), "difference": ratio, "why": why}
            print(json.dumps(line), file=file, flush=True)
    return {name: rival / seconds for name, seconds in times.items()}


def on_cpu(rounds: int, clock: Callable[[], float], file: IO[str] | None) -> None:
    torch.set_num_threads(1)
    model, x = make_model(), torch.randn(1, 3, 32, 32)
    engines: dict[str, Engine] = {"eager": EagerEngine(model), "folded": FoldedEngine(model, x)}
    try:
        from anytime.run.engines.onnx import OnnxRuntimeEngine

        engines["onnxruntime"] = OnnxRuntimeEngine(model, x)
    except AnytimeError as error:
        print(error)
    print(f"msdnet-cifar, 100 classes, CPU, one thread, load {os.getloadavg()[0]:.1f}, {rounds} rounds of {BLOCK}")
    ratios = show(engines, x, rounds, clock, file)
    best = max(ratios, key=lambda name: float(ratios[name].min()))
    print(f"\n{best}: at least {float(ratios[best].min()):.2f} times faster than eager at every exit (goal: 3)")


PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "float16")
VARIANTS: dict[str, dict[str, Any]] = {"chosen": {}, "packed": {"pack": True}, "fused": {"pack": False}}


def on_gpu(
    rounds: int,
    seconds: float,
    file: IO[str] | None,
    variants: Sequence[str] = tuple(VARIANTS),
    precisions: Sequence[Any] = PRECISIONS,
) -> None:
    """The engine's own choice and single variants, at both batch sizes."""
    print(f"msdnet-cifar, 100 classes, {torch.cuda.get_device_name()}, torch {torch.__version__}, {rounds} rounds of {BLOCK}")
    model = make_model().cuda()
    for batch in (1, 64):
        x = torch.randn(batch, 3, 32, 32)
        engines: dict[str, Engine] = {"eager": EagerEngine(model), "folded": FoldedEngine(model, x[:8])}
        begin = time.perf_counter()
        for variant in variants:
            for precision in precisions:
                if time.perf_counter() - begin > seconds:
                    print(f"{variant} {precision} is left out: building the others took {seconds:g} seconds")
                    continue
                try:
                    engine = CudaGraphsEngine(model, x, sizes=(batch,), precision=precision, **VARIANTS[variant])
                    print(f"{variant} {precision}: built after {time.perf_counter() - begin:.1f} s, {engine.why}", flush=True)
                    request(engine, x, time.perf_counter)
                    engines[f"{variant} {precision}"] = engine
                except Exception:  # the others are still measured
                    print(f"{variant} {precision}:\n{traceback.format_exc()}", flush=True)
        ratios = show(engines, x, rounds, time.perf_counter, file)
        best = max(ratios, key=lambda name: float(ratios[name][-1]))
        print(f"\nbatch {batch}, {best}: all exits {float(ratios[best][-1]):.1f} times faster than eager", flush=True)
    print("goal: batch 1 all exits in 1.0 ms and the first in 0.3 ms; batch 64 at least 6 times faster")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("thread", "wall"), default="thread")
    parser.add_argument("--seconds", type=float, default=120, help="limit for building the graphs of one batch size")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS), help="on a GPU")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="on a GPU")
    parser.add_argument("--json", type=Path, help="a file for one line of JSON per engine and batch size")
    options = parser.parse_args()
    with options.json.open("a") if options.json else nullcontext() as file:
        if options.device == "cuda":
            on_gpu(options.rounds, options.seconds, file, options.variants, options.precisions)
        else:
            on_cpu(options.rounds, time.thread_time if options.clock == "thread" else time.perf_counter, file)


if __name__ == "__main__":
    main()
