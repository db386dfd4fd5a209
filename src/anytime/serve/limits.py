"""What a request may take: bytes, elements, rows, time. Enforced while it is read, before anything is allocated for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from anytime.checks import check_number
from anytime.serve.problems import Problem, closing, overloaded

Receive = Callable[[], Awaitable[Any]]


class Disconnected(Exception):  # noqa: N818 - the client has left, which is not an error
    """The client has closed the connection."""


@dataclass(frozen=True)
class Limits:
    """The largest of everything.

    Attributes:
        head: Bytes of the request line and the headers.
        body: Bytes of one body.
        held: Bytes of the bodies of all requests in flight.
        elements: Of one tensor.
        batch: Rows of one request.
        pixels: Of one image.
        in_flight: Requests that are being read, run or answered.
        streams: Event streams at once.
        connections: Open connections.
        head_seconds: From the first byte of a request to the end of its headers.
        body_seconds: From there to the end of its body.
        idle_seconds: Between two requests of a connection, and for a client that does not read its answer.
        deadline_seconds: The longest deadline that a request may have.
    """

    head: int = 64 << 10
    body: int = 16 << 20
    held: int = 256 << 20
    elements: int = 1 << 21
    batch: int = 64
    pixels: int = 1 << 24
    in_flight: int = 1024
    streams: int = 64
    connections: int = 2048
    head_seconds: float = 5.0
    body_seconds: float = 10.0
    idle_seconds: float = 5.0
    deadline_seconds: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            check_number(getattr(self, each.name), each.name, above=0)


class Admission:
    """Counts what is in flight, and refuses more than the limits.

    Attributes:
        in_flight: Requests now.
        streams: Of these, event streams.
        held: Bytes of their bodies.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.in_flight = self.streams = self.held = 0

    @contextmanager
    def request(self, *, stream: bool = False) -> Iterator[Callable[[int], None]]:
        """Count a request until it is answered; yields a function that adds bytes of its body."""
        if self.in_flight >= self.limits.in_flight or (stream and self.streams >= self.limits.streams):
            raise closing(_busy("streams" if self.in_flight < self.limits.in_flight else "requests"))
        mine = 0

        def add(count: int) -> None:
            nonlocal mine
            mine += count
            self.held += count
            if mine > self.limits.body:
                raise closing(_too_large(self.limits.body))
            if self.held > self.limits.held:
                raise closing(_busy("bytes"))

        self.in_flight += 1
        self.streams += stream
        try:
            yield add
        finally:
            self.in_flight -= 1
            self.streams -= stream
            self.held -= mine

    async def read(self, receive: Receive, headers: Mapping[str, str], add: Callable[[int], None]) -> bytes:
        """Read a body, no further than the limits."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.limits.body:
            raise closing(_too_large(self.limits.body))
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise closing(Problem(415, "compressed", "a compressed body", expected="a plain one", fix="do not compress it"))
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    add(len(message["body"]))
                    parts.append(message["body"])
                    if not message.get("more_body"):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            expected = f"all of it within {self.limits.body_seconds:g} s"
            raise closing(
                Problem(408, "too_slow", "the body came too slowly", expected=expected, fix="send it again")
            ) from None


def _busy(what: str) -> Problem:
    return overloaded(1.0, error=f"too many {what} at once", fix="wait for Retry-After")


def _too_large(most: int) -> Problem:
    return Problem(
        413, "too_large", "the body is too large", expected=f"at most {most:,} bytes", fix="send fewer inputs at once"
    )
