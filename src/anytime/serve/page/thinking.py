"""One input, exit by exit: one run of the network, whose logits are combined by two rules side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch

from anytime.checks import Inputs
from anytime.combine import Latest, Prediction, Product, Rule
from anytime.combine.named import name_of
from anytime.errors import OptionError
from anytime.page.recorded import in_set, rounded
from anytime.run import Answer, Budget
from anytime.run.export import ExportedModel
from anytime.serve.service import Service

_THREADS = 4
_BARS = 50
_ROUNDS = 7
_HOLD = 0.02
"""Seconds for which answers may be held back: sending them meanwhile would slow down the stages of a fast network."""


class Thinking:
    """Streams the answers to one input, in threads of its own: the times of the stages are those of the thread that runs them.

    Args:
        service: The model.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="think")

    @cached_property
    def rules(self) -> Mapping[str, Rule[Any]]:
        """The latest exit alone, and the server's rule, or the product if that is the same; its rule alone without logits."""
        own = self._service.runner.rule
        if not isinstance(own, Rule):
            raise OptionError("a regression", expected="a classification", fix="serve a model with classes to use the page")
        if self.inside:
            return {name_of(own): own}
        other: Rule[Any] = Product() if own == Latest() else own
        return {"latest": Latest(), "product" if other == Product() else name_of(other): other}

    @property
    def inside(self) -> bool:
        """Whether the stages have their rule inside, or a policy lets inputs stop, so that answers have no logits."""
        return isinstance(self._service.opened.model, ExportedModel) or self._service.runner.policy is not None

    @property
    def own(self) -> str:
        """The name of the server's rule."""
        mine = self._service.runner.rule
        return next(name for name, rule in self.rules.items() if rule == mine)

    async def stream(self, x: Inputs, label: int | None, budget: Budget) -> AsyncGenerator[dict[str, Any], None]:
        """One document per exit."""
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()
        left = threading.Event()

        def put(items: list[Answer | BaseException | None]) -> None:
            for item in items:
                loop.call_soon_threadsafe(found.put_nowait, item)

        def run() -> None:
            held: list[Any] = []
            since = time.perf_counter()
            try:
                for answer in self._service.runner.stream(x, budget=budget):
                    held.append(answer)
                    if left.is_set():
                        return
                    if (now := time.perf_counter()) - since > _HOLD:
                        put(held)
                        held, since = [], now
                put([*held, None])
            except Exception as error:  # raised where the events are awaited
                put([*held, error])

        states = {name: rule.start(self._service.exits) for name, rule in self.rules.items()}
        before, job = 0.0, self._threads.submit(run)
        try:
            while (item := await found.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield self._document(item, states, label, before)
                before = item.elapsed
        finally:
            left.set()
            job.cancel()

    def milliseconds(self, x: Inputs) -> list[float]:
        """Milliseconds up to each exit, the medians of a few runs."""
        taken = [[1e3 * answer.elapsed for answer in self._service.runner.stream(x)] for _ in range(_ROUNDS + 1)]
        found: list[float] = torch.tensor(taken[1:], dtype=torch.float64).median(0).values.tolist()
        return found

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _document(self, answer: Answer, states: dict[str, Any], label: int | None, before: float) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        logits = answer.logits
        for name, rule in self.rules.items():
            if logits is not None:
                states[name], prediction = rule.step(states[name], logits[-1])
            else:
                prediction = answer.prediction  # type: ignore[assignment]  # `rules` has refused a regression
            shown[name] = _distribution(prediction, label)
            if name == self.own and answer.prediction_set is not None:
                shown[name]["set"] = in_set(answer.prediction_set[0])
        return {
            "exit": answer.last_exit,
            "elapsed_ms": round(1e3 * answer.elapsed, 4),
            "stage_ms": round(1e3 * max(answer.elapsed - before, 0.0), 4),
            "deadline_met": answer.deadline_met is not False,
            "reason": answer.reason,
            "rules": shown,
        }


def _distribution(prediction: Prediction, label: int | None) -> dict[str, Any]:
    probs = prediction.probs[0]
    best = probs.topk(min(_BARS, len(probs))).indices.tolist()
    if label is not None and label not in best:
        best.append(label)
    values = rounded(probs[torch.tensor(best)])
    return {
        "label": int(prediction.labels[0]),
        "fell_back": bool(prediction.fell_back[0]),
        "bars": [list(pair) for pair in zip(best, values, strict=True)],
    }
