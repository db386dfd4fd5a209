"""Images per second of the training step against the same network in a plain eager loop, in one run.

    python benchmarks/train.py                                   on a GPU: MSDNet for CIFAR-100, batch 256 and 512
    python benchmarks/train.py --compile                         the same, and with torch.compile
    python benchmarks/train.py --device cpu --batch 8 --steps 2 --repeats 2

The baseline is a plain PyTorch loop: bfloat16 autocast (on a GPU), channels last, summed cross-entropies, torch.optim.SGD.
The images are random; both sides crop and mirror them with the same function. Each number is the median over repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from anytime.data import ImageData, augment, normalise
from anytime.models import MultiExit, create
from anytime.train import Hardware, TrainConfig, phases
from anytime.train.data.rows import RowsStep

Step = Callable[[], None]


def main() -> None:
    options = _options()
    torch.backends.cudnn.benchmark = True
    data = _random_images(options.images, options.classes)
    if options.check:
        check(options, data)
    results = []
    for batch in options.batch:
        rival = measure(eager_step(network(options), data, batch, options.device), batch, options)
        results.append({"batch": batch, "step": "plain eager loop", "images_per_second": rival, "ratio": 1.0})
        print(_line(results[-1]), flush=True)
        for name, hardware in variants(options).items():
            began = time.monotonic()
            try:
                rate = measure(our_step(network(options), data, batch, hardware), batch, options)
            except Exception as error:  # continue with the other variants
                print(f"batch {batch:>5}  {name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
                continue
            seconds = time.monotonic() - began
            results.append({"batch": batch, "step": name, "images_per_second": rate, "ratio": rate / rival, "seconds": seconds})
            print(_line(results[-1]), flush=True)
    json.dump({"device": _device_name(options.device), "torch": torch.__version__, "results": results}, sys.stdout)
    print()
    if options.profile:
        profile(our_step(network(options), data, options.batch[0], replace(Hardware.best(options.device), graph=False)))


def check(options: argparse.Namespace, data: ImageData) -> None:
    """Print the relative error of each variant's losses against float32 on the CPU, from the same weights."""
    exact = _losses(options, data, Hardware())
    exact_graph = {"graph, float32": replace(Hardware.best(options.device), precision="float32")}
    for name, hardware in {**exact_graph, **variants(options)}.items():
        try:
            off = ((_losses(options, data, hardware) - exact).abs() / exact).amax(1)
            print(
                f"{name:<32} off by at most " + " ".join(f"{value:.1e}" for value in off.tolist()) + " in each step", flush=True
            )
        except Exception as error:  # continue with the other variants
            print(f"{name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)


def _losses(options: argparse.Namespace, data: ImageData, hardware: Hardware, steps: int = 6) -> torch.Tensor:
    """Losses `(steps, exits)` of the first steps; with a graph, the later ones are replays."""
    training = _training(network(options), data, 64, hardware)
    training.begin(0)
    losses = []
    for index in range(steps):
        training(index, 0.005)  # small, so that training does not amplify rounding
        losses.append(training.take_losses())
    return torch.stack(losses)


def profile(step: Step) -> None:
    """Print the slowest kernels of a step, without a graph so that each has a name."""
    for _ in range(3):
        step()
    with torch.profiler.profile() as seen:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=90))


def variants(options: argparse.Namespace) -> dict[str, Hardware]:
    """The variants of our step, the default first."""
    if not options.device.startswith("cuda"):
        return {"ours": Hardware(device=options.device, channels_last=True)}
    best = Hardware(device=options.device, precision="bfloat16", channels_last=True, graph=True)
    first = replace(best, channels_last=False)
    found = {
        "graph": best,
        "graph, streams": replace(best, streams=True),
        "graph, channels first": first,
        "graph, channels first, streams": replace(first, streams=True),
        "no graph": replace(best, graph=False),
    }
    if options.compile:
        found |= {
            "graph, compiled": replace(best, compile=True),
            "graph, channels first, compiled": replace(first, compile=True),
        }
    return found


def our_step(model: MultiExit, data: ImageData, batch: int, hardware: Hardware) -> Step:
    """The trainer's step, on the batches of one epoch repeatedly."""
    training = _training(model, data, batch, hardware)
    training.begin(0)
    index = 0

    def step() -> None:
        nonlocal index
        training(index, 0.01)
        index = (index + 1) % training.steps_per_epoch

    return step


def _training(model: MultiExit, data: ImageData, batch: int, hardware: Hardware) -> RowsStep:
    config = TrainConfig(batch=batch)
    objective = phases(config, exits=model.num_exits, steps_per_epoch=1)[0].objective
    return RowsStep(model, data, objective, config, hardware)


def eager_step(model: MultiExit, data: ImageData, batch: int, device: str) -> Step:
    """A plain loop's step."""
    model = model.to(device, memory_format=torch.channels_last).train()
    data = data.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator(device).manual_seed(0)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        rows = torch.randint(0, len(data), (batch,), device=device, generator=generator)
        images = normalise(augment(data.images[rows], generator=generator), data.mean, data.std)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device.startswith("cuda")):
            loss = sum(criterion(logits, data.labels[rows]) for logits in model.exits(images))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()

    return step


def measure(step: Step, batch: int, options: argparse.Namespace) -> float:
    """Median images per second, after a warm-up."""
    for _ in range(options.warm_up):
        step()
    rates = []
    for _ in range(options.repeats):
        _wait(options.device)
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        _wait(options.device)
        rates.append(options.steps * batch / (time.perf_counter() - began))
    return statistics.median(rates)


def network(options: argparse.Namespace) -> MultiExit:
    torch.manual_seed(0)
    return create(options.model, classes=options.classes)


def _random_images(count: int, classes: int) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    return ImageData(
        name="random",
        split="train",
        images=torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, classes, (count,), generator=generator),
        class_names=tuple(str(label) for label in range(classes)),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        rows=torch.arange(count),
    )


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _line(result: dict[str, object]) -> str:
    return "batch {batch:>5}  {step:<32} {images_per_second:>10,.0f} images/s  {ratio:6.2f} x".format(**result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="msdnet-cifar")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=16384)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--steps", type=int, default=30, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile, which takes minutes to start")
    parser.add_argument("--check", action="store_true", help="first compare each variant's losses with float32 on the CPU")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
