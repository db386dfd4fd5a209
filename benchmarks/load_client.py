"""The open-loop client of `benchmarks/load.py`: requests at given times, over persistent connections, by asyncio.

A request is sent when it is due, whatever became of earlier ones: on a connection that is idle, or on a new one. Answers are
kept as bytes and read after the run, so that one core can send more than 2,000 requests per second and note the time of every
answer. Whoever has no answer after some seconds gives up and closes the connection.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from anytime.run.timing.scheduling_hints import request_prompt_wakeups

_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_SPIN = 1.5e-3
"""Seconds before a request is due from which on the loop polls: its timers are a millisecond late."""


@dataclass
class Exchange:
    """One request: when it was due, sent and answered, by the client's clock, and the bytes of the answer, if there was one."""

    row: int
    due: float = 0.0
    sent: float = 0.0
    answered: float | None = None
    head: bytes = b""
    body: bytes = b""
    connection: Connection | None = None
    done: asyncio.Event | None = None

    @property
    def status(self) -> int:
        return int(self.head[9:12]) if self.head else 0


@dataclass
class Sent:
    """What a run found: the exchanges, and how late the client's own timers were, in seconds."""

    exchanges: list[Exchange] = field(default_factory=list)
    timers: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One connection, for one request after the other."""

    def __init__(self, client: Client) -> None:
        self._client, self._data, self._need = client, b"", 0
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, exchange: Exchange, parts: Sequence[bytes]) -> None:
        assert self.transport is not None
        self.exchange, exchange.connection, self._data, self._need = exchange, self, b"", 0
        exchange.sent = time.perf_counter()
        self.transport.writelines(parts)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._need:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._data, 0, end)
            self._need = end + 4 + (int(length[1]) if length else 0)
        if len(self._data) >= self._need and self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.answered, exchange.connection = time.perf_counter(), None
            exchange.head, _, exchange.body = self._data.partition(b"\r\n\r\n")
            self._client.idle.append(self)
            if exchange.done is not None:
                exchange.done.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._client.idle:
            self._client.idle.remove(self)
        if self.exchange is not None:
            self.exchange.connection = None
        self.transport = None


class Client:
    """Connections to one server.

    Args:
        port: Of the server, on the loopback interface.
        path: Of the requests.
        images: The binary data of each row.
    """

    def __init__(self, port: int, path: str, images: Sequence[bytes]) -> None:
        self.port, self._path, self._images = port, path, images
        self.idle: list[Connection] = []

    def _head(self, timeout: float) -> bytes:
        size = len(self._images[0])
        document = (
            f'{{"parameters":{{"timeout":{round(1e6 * timeout)}}},"inputs":[{{"name":"input","shape":[1,3,32,32],'
            f'"datatype":"FP32","parameters":{{"binary_data_size":{size}}}}}],"outputs":[{{"name":"probabilities","parameters":{{"binary_data":true}}}},'
            '{"name":"labels","parameters":{"binary_data":true}}]}'
        )
        return (
            f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Length: {len(document) + size}\r\n"
            f"Inference-Header-Content-Length: {len(document)}\r\nContent-Type: application/octet-stream\r\n\r\n{document}"
        ).encode()

    async def open(self, count: int) -> None:
        """Have at least so many idle connections."""
        while len(self.idle) < count:
            self.idle.append(await self._connect())

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Connection(self), "127.0.0.1", self.port)
        return made

    def close(self) -> None:
        for connection in [*self.idle]:
            if connection.transport is not None:
                connection.transport.abort()

    async def capacity(self, callers: int, seconds: float) -> float:
        """Answers per second to callers that ask again as soon as they have an answer."""
        await self.open(callers)
        end, head, answered = time.perf_counter() + seconds, self._head(1.0), 0

        async def ask() -> None:
            nonlocal answered
            while time.perf_counter() < end:
                exchange = Exchange(answered % len(self._images), done=asyncio.Event())
                assert exchange.done is not None
                self.idle.pop().send(exchange, (head, self._images[exchange.row]))
                await exchange.done.wait()
                answered += exchange.status == 200

        await asyncio.gather(*(ask() for _ in range(callers)))
        return answered / seconds

    async def run(self, arrivals: Sequence[float], rows: Sequence[int], *, timeout: float, give_up: float) -> Sent:
        """Send requests at these times, in seconds from now, and wait for the answers.

        Args:
            arrivals: When each is due.
            rows: What each asks about.
            timeout: Seconds to the deadline, for the server.
            give_up: Seconds after which the client no longer waits.
        """
        request_prompt_wakeups()
        await self.open(64)
        loop, found, head = asyncio.get_running_loop(), Sent(), self._head(timeout)
        pending: deque[Exchange] = deque()
        connecting: set[asyncio.Task[None]] = set()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        self._time_waits(loop, found.timers, timeout, until=start + (arrivals[-1] if len(arrivals) else 0.0))
        for due, row in zip(arrivals, rows, strict=True):
            while (left := start + due - time.perf_counter()) > 0:
                await asyncio.sleep(left - 1e-3 if left > _SPIN else 0)
            exchange = Exchange(row, start + due)
            found.exchanges.append(exchange)
            pending.append(exchange)
            parts = (head, self._images[row])
            if self.idle:
                self.idle.pop().send(exchange, parts)
            else:
                task = loop.create_task(self._send_on_new(exchange, parts))
                connecting.add(task)
                task.add_done_callback(connecting.discard)
            _abandon(pending, give_up)
        while pending:
            await asyncio.sleep(2e-3)
            _abandon(pending, give_up)
        gc.enable()
        return found

    async def _send_on_new(self, exchange: Exchange, parts: Sequence[bytes]) -> None:
        exchange.sent = time.perf_counter()  # the time to connect counts
        sent, connection = exchange.sent, await self._connect()
        connection.send(exchange, parts)
        exchange.sent = sent

    @staticmethod
    def _time_waits(loop: asyncio.AbstractEventLoop, late: list[float], seconds: float, *, until: float) -> None:
        """The control: a wait of this length, again and again, and how late it ends."""

        def again() -> None:
            begin = time.perf_counter()
            if begin < until:
                loop.call_later(seconds, lambda: (late.append(time.perf_counter() - begin - seconds), again()))

        again()


def _abandon(pending: deque[Exchange], give_up: float) -> None:
    """Forget the oldest exchanges that are answered, and close the connections of those that take too long."""
    now = time.perf_counter()
    while pending and (pending[0].answered is not None or now - pending[0].sent > give_up > 0 < pending[0].sent):
        exchange = pending.popleft()
        if exchange.answered is None and exchange.connection is not None and exchange.connection.transport is not None:
            exchange.connection.exchange = None
            exchange.connection.transport.abort()
