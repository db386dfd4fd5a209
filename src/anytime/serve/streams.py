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
LEAVING = "anytime_leaving"
"""A member of the scope: functions to call when the client leaves."""


class EventStream(Response):
    """Server-sent events. When the client leaves, the work stops at the next exit.

    Args:
        events: What `encode` takes; here the documents of the exits.
        open: What to close at the end, such as the place among the streams.
        source: Where the events are from, to be closed with them.
    """

    media_type = EVENTS

    def __init__(
        self, events: AsyncGenerator[Any, None], open: ExitStack, *, source: AsyncGenerator[Any, None] | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._open, self._source = events, open, source

    def encode(self, event: Any) -> bytes:
        """An event as it is sent."""
        return _event("exit", event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": self.encode(event), "more_body": True})
            except AnytimeError as error:
                await send({"type": "http.response.body", "body": _event("error", problem_of(error).body()), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        with suppress(Disconnected), self._open:
            try:
                await while_connected(scope, receive, pump())
            finally:
                await self._events.aclose()
                if self._source is not None:
                    await self._source.aclose()


async def while_connected(scope: Any, receive: Callable[[], Any], work: Coroutine[Any, Any, T]) -> T:
    """Await something unless the client leaves first; then it is cancelled and `Disconnected` is raised.

    `anytime.serve.server` calls the functions in `scope[LEAVING]`; with other servers a task waits for the message.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    leaving: set[Callable[[], None]] | None = scope.get(LEAVING)
    watcher = None
    if leaving is None:
        watcher = asyncio.create_task(watch())
    else:
        leaving.add(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise Disconnected from None
    finally:
        if watcher is not None:
            watcher.cancel()
        elif leaving is not None:
            leaving.discard(leave)


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
