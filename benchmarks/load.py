"""Servers under load: an open-loop client with Poisson arrivals against `anytime serve` and three ordinary servers.

    python benchmarks/load.py --data DIR                      all loads, deadlines of 20 and 40 ms: about 15 minutes
    python benchmarks/load.py --data DIR --json load.json --picture load.svg
    python benchmarks/load.py --smoke                         a few seconds, with random images

The CIFAR-100 MSDNet of `results/` in ONNX Runtime, real test images (DIR has the files of CIFAR-100). The servers are processes
on one core, the client is on another. The rivals (`benchmarks/load_rivals.py`) use the same engine, rule and protocol code:

* plain: FastAPI that runs all exits for one request after the other;
* batching: the same in batches of up to 16, and requests that would be late are dropped;
* slack-fit: batches of up to 16, with as many exits as the most urgent request has time for.

100 % is what the plain server answers if four callers ask again and again, the best of several measurements. In each cell the
servers take turns in slices of a few seconds, so that other load on the machine affects all of them; the first half second of a
slice is not counted.

"in time" is the fraction of all requests with an answer by the deadline, by the server's clock (from the whole request to the
answer) and by the client's (from the first byte sent to the last byte received, at most 1 ms after the deadline). "control" is
the fraction of the client's own timers, set to the same deadline, that were at most 1 ms late. "correct" is the fraction of all
requests with a correct answer in time, by the server's clock and by the client's: late and refused ones count as wrong. Every
answer is compared with the rule on logits that were computed before, at the exit that the answer names: "wrong" counts
differences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anytime
from anytime.artifacts import write_text
from anytime.data.augment import normalise
from anytime.data.cifar import load_cifar
from anytime.report.svg.chart import stacked
from anytime.report.svg.load import load_chart
from anytime.reproduce.runs import read_run
from anytime.run.budget import seconds
from anytime.run.engines import make_engine
from load_client import Client, Sent
from load_rivals import FOLDER, MODEL, RIVALS

OURS = "anytime"
LATE, SKIP, SAME = 1e-3, 0.5, 1e-3
"""Seconds of grace by the client's clock; seconds of a slice that are not counted; the largest difference of a probability."""
REFUSED = (422, 429, 503)
STALLED = 0.1
"""A request that is sent so many seconds late was not sent by a client that had its core."""
GIVE_UP = 5
"""The client gives up after so many deadlines."""


@dataclass(frozen=True)
class Questions:
    """Images, their labels, and the answer of the rule at every exit, `(exits, rows, classes)`."""

    images: list[bytes]
    labels: np.ndarray
    probabilities: np.ndarray


def prepare(data: Path | None, rows: int) -> Questions:
    """Images and their answers, computed once with the engine of the servers; without data random images."""
    engine = make_engine(read_run(FOLDER).load().eval(), "onnxruntime", example=torch.zeros(1, 3, 32, 32))
    if data is None:
        x = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    else:
        test = load_cifar("cifar100", data)["test"]
        picked = torch.randperm(len(test.images), generator=torch.Generator().manual_seed(0))[:rows]
        x = normalise(test.images[picked], test.mean, test.std)
    logits = []
    for begin in range(0, rows, 50):
        stages = engine.begin(x[begin : begin + 50].contiguous())
        logits.append(torch.stack([stages.advance() for _ in range(engine.num_exits)]))
        stages.close()
    found = anytime.Product()(torch.cat(logits, 1)).probs.numpy()
    labels = found[-1].argmax(-1) if data is None else test.labels[picked].numpy()
    return Questions([row.numpy().tobytes() for row in x], labels, found)


@contextmanager
def start_servers(names: Sequence[str], core: int | None) -> Iterator[dict[str, tuple[int, int]]]:
    """Servers in processes on one core; yields their ports and process numbers."""
    ours = ["-m", "anytime.cli", "serve", str(FOLDER), "--name", MODEL, "--rule", "product", "--engine", "onnxruntime"]
    ours += ["--port", "0", "--workers", "1"]
    rivals = str(Path(__file__).parent / "load_rivals.py")
    processes, ports = {}, {}
    try:
        for name in names:
            command = [sys.executable, *(ours if name == OURS else [rivals, name])]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
            )
            if core is not None:  # before it starts threads
                os.sched_setaffinity(processes[name].pid, {core})
            ports[name] = find_port(name, processes[name])  # one after the other: each measures its stages
        yield {name: (ports[name], process.pid) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def find_port(name: str, process: subprocess.Popen[str]) -> int:
    """The port that a server prints when it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("listening on"):
            port = int(line.rsplit(":", 1)[1])
            wait_for(port)
            return port
    raise RuntimeError(f"the server {name} ended with code {process.wait()}")


def wait_for(port: int) -> None:
    """Wait until a server accepts connections."""
    for _ in range(1000):
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)


class Others:
    """How many cores other processes use, without those at low priority.

    Args:
        pids: Our own processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def now(self) -> tuple[float, float]:
        """The time, and the processor seconds of other processes."""
        user, _, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        own = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13] for pid in self._pids]
        used = user + system + irq + soft - sum(int(word) for words in own for word in words)
        return time.perf_counter(), used / os.sysconf("SC_CLK_TCK")

    def since(self, before: tuple[float, float]) -> float:
        """Cores used since then."""
        now = self.now()
        return (now[1] - before[1]) / (now[0] - before[0])


def tally(runs: Sequence[Sent], questions: Questions, deadline: float) -> dict[str, Any]:
    """The numbers of one server in one cell."""
    asked = [
        one for run in runs for one in run.exchanges if one.sent >= run.exchanges[0].sent + SKIP * (len(run.exchanges) > 50)
    ]
    timers = [late for run in runs for late in run.timers]
    answers = [(one, *read(one.head, one.body)) for one in asked if one.status == 200]
    rows = np.array([one.row for one, *_ in answers], dtype=int)
    exits = np.array([how["exit"] for _, how, _, _ in answers], dtype=int)
    met = np.array([how["deadline_met"] for _, how, _, _ in answers], dtype=bool)
    prompt = np.array([one.answered - one.sent <= deadline + LATE for one, *_ in answers], dtype=bool)
    right = np.array([label == questions.labels[one.row] for one, _, _, label in answers], dtype=bool)
    found = np.stack([p for _, _, p, _ in answers]) if answers else np.zeros((0, questions.probabilities.shape[2]), np.float32)
    wrong = np.abs(found - questions.probabilities[exits - 1, rows]).max(1, initial=0) > SAME
    refusals = [one.answered - one.sent for one in asked if one.status in REFUSED and one.answered is not None]
    count = max(len(asked), 1)
    return {
        "requests": len(asked),
        "in_time_server": met.sum() / count,
        "in_time_admitted": met.sum() / max(sum(one.status not in REFUSED for one in asked), 1),
        "in_time_client": prompt.sum() / count,
        "control": float(np.mean(np.array(timers) <= LATE)) if timers else 1.0,
        "correct": (met & right).sum() / count,
        "correct_client": (prompt & right).sum() / count,
        "mean_exit": float(exits[met].mean()) if met.any() else 0.0,
        "refused": len(refusals) / count,
        "refusal_p99_ms": 1e3 * float(np.quantile(refusals, 0.99)) if refusals else 0.0,
        "no_answer": sum(one.answered is None for one in asked) / count,
        "statuses": {str(status): count for status, count in sorted(Counter(one.status for one in asked).items())},
        "wrong": int(wrong.sum()),
        "sent_late_p99_ms": 1e3 * float(np.quantile([one.sent - one.due for one in asked], 0.99)),
        "beyond_p99_ms": 1e3 * float(np.quantile([one.answered - one.sent - deadline for one, *_ in answers], 0.99))
        if answers
        else 0.0,
    }


def read(head: bytes, body: bytes) -> tuple[dict[str, Any], np.ndarray, int]:
    """The parameters of an answer, its probabilities and its label."""
    lines = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    length = int(lines[b"inference-header-content-length"])
    document = json.loads(body[:length])
    sizes = {one["name"]: one["parameters"]["binary_data_size"] for one in document["outputs"]}
    begin, arrays = length, {}
    for name, size in sizes.items():
        arrays[name], begin = body[begin : begin + size], begin + size
    return document["parameters"], np.frombuffer(arrays["probabilities"], "<f4"), int(np.frombuffer(arrays["labels"], "<i8")[0])


def measure(
    loop: asyncio.AbstractEventLoop,
    clients: dict[str, Client],
    others: Others,
    rate: float,
    deadline: float,
    options: argparse.Namespace,
    questions: Questions,
) -> dict[str, Any]:
    """One cell: the servers take turns. A turn in which others used the machine is measured again, a few times at most."""
    chance = np.random.default_rng([options.seed, round(rate), round(1e6 * deadline)])
    runs: dict[str, list[Sent]] = {name: [] for name in clients}
    used: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(options.slices):
        length = options.seconds / options.slices
        arrivals = np.cumsum(chance.exponential(1 / rate, max(round(rate * length), 1))).tolist()
        rows = chance.integers(len(questions.images), size=len(arrivals)).tolist()
        names = list(clients)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for _ in range(options.tries):
                before = others.now()
                found = loop.run_until_complete(clients[name].run(arrivals, rows, timeout=deadline, give_up=GIVE_UP * deadline))
                busy = others.since(before)
                if name != OURS:
                    reset(clients[name].port)
                time.sleep(0.2)
                if busy <= options.quiet and max(one.sent - one.due for one in found.exchanges) < STALLED:
                    break
            runs[name].append(found)
            used[name].append(busy)
    return {name: {**tally(found, questions, deadline), "others": max(used[name])} for name, found in runs.items()}


def reset(port: int) -> None:
    """Drop what waits in a rival: a plain server would be busy with it for a minute."""
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/reset", method="POST"), timeout=30).close()


def show(cell: dict[str, Any]) -> None:
    """Print the rows of a cell."""
    title = f"{1e3 * cell['deadline']:g} ms, {cell['load']:g} %, {cell['rate']:.0f}/s"
    for name, found in cell["servers"].items():
        refused = f"{found['refused']:6.1%} in {found['refusal_p99_ms']:.1f} ms" if found["refused"] else "0.0 %"
        print(
            f"{title:24}{name:12}{found['in_time_server']:8.1%}{found['in_time_client']:8.1%}{found['control']:9.1%}"
            f"{found['correct']:9.1%}{found['correct_client']:8.1%}{found['mean_exit']:8.2f}{refused:>22}{found['wrong']:7}",
            flush=True,
        )
        title = ""
    print(f"{'':24}ratio to the best rival: {cell['ratio']:.2f}, by the client's clock {cell['ratio_client']:.2f}", flush=True)


def ratio(servers: dict[str, Any], key: str) -> float:
    """Our correct answers to those of the best rival."""
    return float(servers[OURS][key] / max(*(found[key] for name, found in servers.items() if name != OURS), 1e-9))


def picture(cells: Sequence[dict[str, Any]]) -> str:
    """Correct answers in time over the load, one chart per deadline."""
    charts = []
    for deadline in dict.fromkeys(cell["deadline"] for cell in cells):
        some = [cell for cell in cells if cell["deadline"] == deadline]
        lines = {name: [100 * cell["servers"][name]["correct"] for cell in some] for name in some[0]["servers"]}
        charts.append((f"Correct answers within {1e3 * deadline:g} ms", load_chart([cell["load"] for cell in some], lines)))
    return stacked(charts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-100; without it random images, right if as the last exit")
    parser.add_argument("--loads", type=float, nargs="+", default=[30, 70, 100, 150, 300, 600, 1000], help="in percent")
    parser.add_argument("--deadlines", nargs="+", default=["20ms", "40ms"])
    parser.add_argument("--servers", nargs="+", default=[OURS, *RIVALS], choices=[OURS, *RIVALS])
    parser.add_argument("--seconds", type=float, default=10.0, help="per server and cell")
    parser.add_argument("--slices", type=int, default=2, help="turns of each server per cell")
    parser.add_argument("--quiet", type=float, default=0.1, help="cores that others may use in a turn; else it is repeated")
    parser.add_argument("--tries", type=int, default=1, help="how often a turn is measured at most")
    parser.add_argument("--rows", type=int, default=2000, help="number of images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    options = parser.parse_args()
    if options.smoke:
        options.loads, options.deadlines, options.seconds, options.slices, options.rows = [100, 400], ["40ms"], 1.0, 1, 100
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end as well
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    questions = prepare(options.data, options.rows)
    cores = sorted(os.sched_getaffinity(0))
    with start_servers(options.servers, cores[0] if len(cores) > 1 else None) as found:
        others = Others([os.getpid(), *(pid for _, pid in found.values())])
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[1]})
        clients = {name: Client(port, f"/v2/models/{MODEL}/infer", questions.images) for name, (port, _) in found.items()}
        full = max(
            loop.run_until_complete(clients["plain"].capacity(4, min(options.seconds, 3.0))) for _ in range(1 + options.tries)
        )
        print(
            f"plain server: {full:.0f} requests/s; accuracy of the last exit {accuracy(questions):.1%}; load average "
            f"{os.getloadavg()[0]:.1f} on {len(cores)} cores\n\n{'deadline, load':24}{'server':12}{'in time':>8}{'client':>8}"
            f"{'control':>9}{'correct':>9}{'client':>8}{'exit':>8}{'refused, p99':>22}{'wrong':>7}"
        )
        cells = []
        for deadline in map(seconds, options.deadlines):
            for load in options.loads:
                rate = full * load / 100
                servers = measure(loop, clients, others, rate, deadline, options, questions)
                ratios = {"ratio": ratio(servers, "correct"), "ratio_client": ratio(servers, "correct_client")}
                cells.append({"deadline": deadline, "load": load, "rate": rate, "servers": servers, **ratios})
                show(cells[-1])
                document = {"capacity": full, "accuracy": accuracy(questions), "seconds": options.seconds, "cells": cells}
                if options.json:
                    write_text(options.json, json.dumps(document, default=float))
        busy = max(found["others"] for cell in cells for found in cell["servers"].values())
        lag = max(found["sent_late_p99_ms"] for cell in cells for found in cell["servers"].values())
        print(
            f"\nOther processes used at most {busy:.2f} of {len(cores)} cores, load average {os.getloadavg()[0]:.1f}. In every "
            f"row 99 % of the requests were sent at most {lag:.1f} ms after they were due."
        )
    if options.picture:
        write_text(options.picture, picture(cells))


def accuracy(questions: Questions) -> float:
    """Of the last exit."""
    return float((questions.probabilities[-1].argmax(-1) == questions.labels).mean())


if __name__ == "__main__":
    main()
