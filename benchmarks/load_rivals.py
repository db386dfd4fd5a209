"""Ordinary model servers, the rivals of `benchmarks/load.py`: the same network, engine and rule behind plain FastAPI.

    python benchmarks/load_rivals.py plain        all exits for one request after the other
    python benchmarks/load_rivals.py batching     all exits for up to 16 requests; those that would be late are dropped
    python benchmarks/load_rivals.py slack-fit    up to 16 requests, as many exits as the most urgent one has time for

One thread runs the network, the event loop reads and answers, as in `anytime serve`. Both parse requests with the same code
and run on uvicorn. Whether a batch ends in time is forecast from a profile that is measured at the start, times how much longer
than that recent batches took. What cannot end in time is answered 503 at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from torch import Tensor

import anytime
from anytime.reproduce.runs import read_run
from anytime.run import profile_model
from anytime.run.engines import Engine, make_engine
from anytime.run.scheduler import AllExits, SchedulingPolicy, SlackFit
from anytime.run.simulation import LinearTimes, fit_times
from anytime.serve import oip

MODEL = "msdnet"
FOLDER = Path(__file__).parents[1] / "results" / "msdnet-cifar100-seed0"
INPUT = oip.TensorSpec("input", "FP32", (-1, 3, 32, 32))
RIVALS: dict[str, SchedulingPolicy] = {
    "plain": AllExits(batched=False, drop=False),
    "batching": AllExits(),
    "slack-fit": SlackFit(),
}
MARGIN = 1e-3
"""Seconds between the end of a batch and its answers on their way."""


class ScaledTimes:
    """The times of a profile, times how much longer than that recent batches took."""

    def __init__(self, profile: LinearTimes) -> None:
        self._profile, self._factor = profile, 1.0
        self.largest_batch, self.margin = profile.largest_batch, MARGIN

    def seconds(self, stage: int, batch: int) -> float:
        return self._factor * self._profile.seconds(stage, batch)

    def learn(self, seconds: float, depth: int, batch: int) -> None:
        ratio = seconds / sum(self._profile.seconds(stage, batch) for stage in range(1, depth + 1))
        self._factor += 0.1 * (min(ratio, 5.0) - self._factor)

    def forget(self) -> None:
        """Nothing fits: expect less, or nothing would ever run again."""
        self._factor *= 0.95


@dataclass(eq=False, slots=True)
class Waiting:
    """A request, as policies see it, and where its answer goes."""

    x: Tensor
    arrived: float
    deadline: float
    last: int
    answer: asyncio.Future[Any]
    exit: int = 0
    confidence: float = 0.0
    group: object = None


class Worker(threading.Thread):
    """Runs batches for as long as the process lives."""

    def __init__(self, engine: Engine, policy: SchedulingPolicy, times: ScaledTimes) -> None:
        super().__init__(daemon=True)
        self.engine, self._policy, self._times, self._rule = engine, policy, times, anytime.Product()
        self._drops = getattr(policy, "drop", True)
        self._waiting: list[Waiting] = []
        self._changed = threading.Condition()

    def submit(self, request: Waiting) -> None:
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def clear(self) -> None:
        """Drop everything that waits, between two measurements."""
        with self._changed:
            dropped, self._waiting = self._waiting, []
        self._send([(request, None) for request in dropped])

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                now = time.perf_counter()
                chosen = self._policy.choose(now, self._waiting, self._times)
                taken = [] if chosen is None else chosen.requests
                late = [
                    one for one in self._waiting if self._drops and one not in taken and (chosen is None or one.deadline <= now)
                ]
                self._waiting = [one for one in self._waiting if one not in taken and one not in late]
            self._send([(request, None) for request in late])
            if chosen is None:
                self._times.forget()
            else:
                self._run_batch(taken, chosen.stages)

    @torch.inference_mode()
    def _run_batch(self, requests: list[Waiting], depth: int) -> None:
        began = time.perf_counter()
        stages = self.engine.begin(torch.cat([request.x for request in requests]))
        logits = torch.stack([stages.advance() for _ in range(depth)])
        stages.close()
        found = self._rule.after(logits, self.engine.num_exits)
        self._times.learn(time.perf_counter() - began, depth, len(requests))
        probabilities, labels = found.probs.numpy(), found.labels.numpy()
        self._send([(one, (depth, probabilities[i : i + 1], labels[i : i + 1])) for i, one in enumerate(requests)])

    def _send(self, answers: list[tuple[Waiting, Any]]) -> None:
        def deliver() -> None:
            for request, answer in answers:
                if not request.answer.done():
                    request.answer.set_result(answer)

        if answers:
            answers[0][0].answer.get_loop().call_soon_threadsafe(deliver)


def make_app(worker: Worker) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield

    app = FastAPI(lifespan=lifespan)
    read = oip.RequestReader([INPUT], ("probabilities", "labels"), most=1 << 16, wanted=dict)

    @app.post(f"/v2/models/{MODEL}/infer")
    async def infer(request: Request) -> Response:
        body = await request.body()
        began = time.perf_counter()
        call, data = read(body, request.headers.get(oip.HEADER_LENGTH))
        allowed = call.wanted["timeout"] / 1e6
        future = asyncio.get_running_loop().create_future()
        x = torch.from_numpy(np.array(oip.read_inputs(call, data)["input"]))
        worker.submit(Waiting(x, began, began + allowed, worker.engine.num_exits, future))
        answer = await future
        if answer is None:
            return Response(status_code=503)
        exit, probabilities, labels = answer
        elapsed = time.perf_counter() - began
        parameters = {"exit": exit, "elapsed_us": round(1e6 * elapsed), "deadline_met": elapsed <= allowed}
        arrays, binary = {"probabilities": probabilities, "labels": labels}, call.outputs or {}
        content, length = oip.encode(arrays, binary, model=MODEL, id=call.id, parameters=parameters)
        return Response(content, headers={oip.HEADER_LENGTH: str(length)})

    @app.post("/reset")
    async def reset() -> Response:
        worker.clear()
        return Response()

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rival", choices=RIVALS)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    example = torch.randn(16, 3, 32, 32)
    engine = make_engine(read_run(FOLDER).load().eval(), "onnxruntime", example=example[:1])
    profile = fit_times(profile_model(engine, example, batch_sizes=(1, 2, 4, 8, 16), repeats=10))
    worker = Worker(engine, RIVALS[options.rival], ScaledTimes(profile))
    listening = socket.create_server(("127.0.0.1", options.port))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an acknowledgement
    gc.collect()
    gc.freeze()  # as `anytime serve` does: a full collection takes a tenth of a second
    print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    logging.disable(logging.WARNING)
    config = uvicorn.Config(make_app(worker), loop="asyncio", http="httptools", access_log=False, log_level="error")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
