"""Work that ends when the client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from fastapi import Response

from anytime.errors import AnytimeError
from anytime.serve.limits import Disconnected
from anytime.serve.problems import problem_of

T = TypeVar("T")
EVENTS = "text/event-stream"


class EventStream(Response):
    """Server-sent events. When the client leaves, the work stops at the next exit."""

    media_type = EVENTS

    def __init__(self, events: AsyncGenerator[bytes, None], answers: AsyncGenerator[Any, None], open: ExitStack) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._answers, self._open = events, answers, open

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": _event("exit", data), "more_body": True})
            except AnytimeError as error:
                await send({"type": "http.response.body", "body": _event("error", problem_of(error).body()), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        with suppress(Disconnected), self._open:
            try:
                await while_connected(receive, pump())
            finally:
                await self._events.aclose()
                await self._answers.aclose()


async def while_connected(receive: Callable[[], Any], work: Coroutine[Any, Any, T]) -> T:
    """Await something unless the client leaves first; then it is cancelled and `Disconnected` is raised."""

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(leaves()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Disconnected
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
