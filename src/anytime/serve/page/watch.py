"""The report card of a running server: a sample of the inputs that it is asked, run through all exits. No labels are needed.

Nothing is sampled unless somebody looks at the page: the cost is at most `_PER_SECOND` inputs per second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from anytime.checks import Inputs, map_inputs
from anytime.evaluation import Evaluation
from anytime.page.card import card_of, evaluate_unlabelled
from anytime.report.pages.page import render
from anytime.serve.page.thinking import Thinking
from anytime.serve.service import Service

_PER_SECOND = 5.0
_LOOKS = 600.0
"""Seconds after the page was last used in which inputs are sampled."""
_BYTES = 32 << 20
_MOST = 1000
_PATIENCE = 10


class Watch:
    """Samples inputs and keeps the logits of the latest of them.

    Args:
        service: The model.
        thinking: The rules to compare.
    """

    def __init__(self, service: Service, thinking: Thinking) -> None:
        self._service, self._thinking = service, thinking
        size = 4 * service.exits * service.opened.classes
        self._logits: deque[Tensor] = deque(maxlen=max(2, min(_MOST, _BYTES // size)))
        self._inputs: deque[Inputs] = deque(maxlen=8)
        self._until = self._next = 0.0
        self._worker: asyncio.Task[None] | None = None
        self._sampled, self._measured = 0, (0, None)  # type: tuple[int, tuple[int, Evaluation | None]]
        self.milliseconds: list[float] | None = None

    def look(self) -> None:
        """Somebody uses the page."""
        self._until = time.monotonic() + _LOOKS

    def seen(self, x: Inputs) -> None:
        """A request with these inputs was answered; called for every request, so it returns at once in nearly all cases."""
        now = time.monotonic()
        if now >= self._until or now < self._next or self._thinking.inside:
            return
        self._next = now + 1 / _PER_SECOND
        self._inputs.append(map_inputs(lambda tensor: tensor[:1].clone(), x))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def card(self) -> dict[str, Any]:
        """The report card of what was sampled so far."""
        self.look()
        found = await self._evaluation()
        more = {"inside": self._thinking.inside, "rules": list(self._thinking.rules)}
        return {"inputs": 0, "properties": [], **more} if found is None else {**card_of(found), **more}

    async def report(self) -> str | None:
        """A whole report of it as HTML; None before anything was sampled."""
        self.look()
        found = await self._evaluation()
        if found is None:
            return None
        title = f"{self._service.name}: requests of this server"
        return await asyncio.to_thread(render, found, title=title, source="a sample of the requests, without labels")

    async def close(self) -> None:
        """Run nothing more."""
        self._until = 0.0
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        runner = self._service.runner
        while self._inputs:
            for _ in range(_PATIENCE):  # requests go first, for a while
                if not runner.load_status.waiting:
                    break
                await asyncio.sleep(0.05)
            answer = await asyncio.to_thread(runner.predict, self._inputs.popleft())
            if (logits := answer.logits) is not None:
                self._logits.append(logits[:, 0].clone())
                self._sampled += 1

    async def _evaluation(self) -> Evaluation | None:
        count = self._sampled
        if count and self._measured[0] != count:
            logits = torch.stack(list(self._logits), 1)
            found = await asyncio.to_thread(evaluate_unlabelled, logits, self._thinking.rules, self.milliseconds)
            self._measured = (count, found)
        return self._measured[1]
