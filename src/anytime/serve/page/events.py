"""Server-sent events with numbers, so that a reader that was cut off can go on after the last one it has."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress
from typing import Any

import orjson
from starlette.responses import Response

from anytime.errors import AnytimeError
from anytime.serve.limits import Disconnected
from anytime.serve.problems import problem_of
from anytime.serve.streams import EVENTS, while_connected


class NumberedEvents(Response):
    """Events as an asynchronous generator yields them: a number, a name and a document.

    Args:
        events: The events. The generator is closed when the client leaves.
        open: What to close at the end, such as the place among the streams.
    """

    media_type = EVENTS

    def __init__(self, events: AsyncGenerator[tuple[int, str, dict[str, Any]], None], open: ExitStack) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._open = events, open

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for number, name, document in self._events:
                    await send({"type": "http.response.body", "body": _event(number, name, document), "more_body": True})
            except AnytimeError as error:
                body = _event(0, "error", problem_of(error).document)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        with suppress(Disconnected), self._open:
            try:
                await while_connected(scope, receive, pump())
            finally:
                await self._events.aclose()


def _event(number: int, name: str, document: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, name.encode(), orjson.dumps(document))
