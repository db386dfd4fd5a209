"""The engines against plain eager torch: the time to every exit of the CIFAR MSDNet.

    python benchmarks/engines.py                     CPU, batch 1, one thread
    python benchmarks/engines.py --rounds 5          a quick look
    python benchmarks/engines.py --clock wall        seconds on the wall; on a busy machine they are not the engines'
    python benchmarks/engines.py --device cuda       a GPU, batches of 1 and 64; needs torch and NumPy only

The rival is the same network in eager torch, stage by stage, in the same run. The variants take turns in blocks of a few
requests, each after two that warm its caches up. Times are medians over all rounds, from the request to the logits of an exit
in the caller's hands: on the CPU seconds of the one thread, which others on the machine disturb least, on a GPU seconds on the
wall. Weights are random, and batch norms have statistics as after a training.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from anytime.errors import AnytimeError
from anytime.models import MultiExit, create
from anytime.run.engines.base import Engine
from anytime.run.engines.cuda import CudaGraphsEngine, Precision
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.folded import FoldedEngine
from anytime.run.engines.folding import apart

BLOCK, WARM = 5, 2


def make_model() -> MultiExit:
    torch.manual_seed(0)
    model = create("msdnet-cifar", classes=100).eval().requires_grad_(False)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 2.0)
    return model


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


def show(engines: dict[str, Engine], x: Tensor, rounds: int, clock: Callable[[], float]) -> dict[str, np.ndarray]:
    """Print times and ratios; the ratios against the first engine."""
    wanted = request(next(iter(engines.values())), x, clock)[1]
    times = take_turns(engines, x, rounds, clock)
    rival = next(iter(times.values()))
    width = max(map(len, times))
    print(f"\nbatch {len(x)}\n{'':{width}}  " + "  ".join(f"exit {exit + 1:2}" for exit in range(len(rival))) + "   difference")
    for name, seconds in times.items():
        share = apart(request(engines[name], x, clock)[1], wanted)
        print(f"{name:{width}}  " + "  ".join(f"{1e3 * each:7.3f}" for each in seconds) + f"  ms    {share:.1e}")
        print(f"{'':{width}}  " + "  ".join(f"{each:6.2f}x" for each in rival / seconds))
    return {name: rival / seconds for name, seconds in times.items()}


def on_cpu(rounds: int, clock: Callable[[], float]) -> None:
    torch.set_num_threads(1)
    model, x = make_model(), torch.randn(1, 3, 32, 32)
    engines: dict[str, Engine] = {"eager": EagerEngine(model), "folded": FoldedEngine(model, x)}
    try:
        from anytime.run.engines.onnx import OnnxRuntimeEngine

        engines["onnxruntime"] = OnnxRuntimeEngine(model, x)
    except AnytimeError as error:
        print(error)
    print(f"msdnet-cifar, 100 classes, CPU, one thread, load {os.getloadavg()[0]:.1f}, {rounds} rounds of {BLOCK}")
    ratios = show(engines, x, rounds, clock)
    best = max(ratios, key=lambda name: float(ratios[name].min()))
    print(f"\n{best}: at least {float(ratios[best].min()):.2f} times shorter than eager at every exit (wanted: 3)")


def on_gpu(rounds: int) -> None:
    """All settings of the graphs, at both batch sizes."""
    plain = make_model()
    model = make_model().cuda()
    print(f"msdnet-cifar, 100 classes, {torch.cuda.get_device_name()}, torch {torch.__version__}, {rounds} rounds of {BLOCK}")
    settings: list[tuple[Precision, bool, bool]] = [
        (precision, parallel, fuse)
        for precision in ("float32", "tf32", "float16")
        for parallel in (False, True)
        for fuse in (False, True)
    ]
    for batch in (1, 64):
        x = torch.randn(batch, 3, 32, 32)
        engines: dict[str, Engine] = {"eager": EagerEngine(model), "folded": FoldedEngine(model, x)}
        for precision, parallel, fuse in settings:
            name = " ".join([precision, *(["side by side"] if parallel else []), *(["fused"] if fuse else [])])
            try:
                engines[name] = CudaGraphsEngine(plain, x, sizes=(batch,), precision=precision, parallel=parallel, fuse=fuse)
            except (AnytimeError, RuntimeError) as error:
                print(f"{name}: {error}")
        ratios = show(engines, x, rounds, time.perf_counter)
        best = max(ratios, key=lambda name: float(ratios[name][-1]))
        print(f"\nbatch {batch}, {best}: all exits {float(ratios[best][-1]):.1f} times shorter than eager")
    print("wanted: batch 1 all exits in 1.0 ms and the first in 0.3 ms; batch 64 at least 6 times shorter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("thread", "wall"), default="thread")
    options = parser.parse_args()
    if options.device == "cuda":
        on_gpu(options.rounds)
    else:
        on_cpu(options.rounds, time.thread_time if options.clock == "thread" else time.perf_counter)


if __name__ == "__main__":
    main()
