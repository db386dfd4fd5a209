"""uvicorn around the application: time limits on connections, and an end that answers what is in flight."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anytime.checks import check_count
from anytime.errors import OptionError
from anytime.run.timing.scheduling_hints import request_prompt_wakeups
from anytime.serve.limits import Limits
from anytime.serve.problems import Problem
from anytime.serve.streams import LEAVING

_HEADERS = [("x-content-type-options", "nosniff")]
_BAD = Problem(400, "invalid_http", "not a valid HTTP request", fix="send HTTP/1.1").body()
_NOT_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_BAD), _BAD)
)


def protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Uvicorn's HTTP protocol with limits on connections, on headers, and on clients that are slow to send or to read."""
    period = min(limits.head_seconds, limits.idle_seconds) / 4

    class LimitedProtocol(HttpToolsProtocol):
        _check: asyncio.TimerHandle | None = None
        _heading: float | None = None  # since when the headers of a request are incomplete
        _stalled: float | None = None  # since when the client does not read its answer
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._leaving: set[Callable[[], None]] = set()
            if len(self.connections) > limits.connections:
                transport.abort()
            self._heading = self.loop.time()
            self._check = self.loop.call_later(period, self._check_times)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unset_keepalive_if_required()  # uvicorn leaves it if the connection was reset, and it keeps this object
            if self._check is not None:
                self._check.cancel()
            for leave in list(self._leaving):
                leave()

        def _check_times(self) -> None:
            """One timer per connection, in place of several per request."""
            now = self.loop.time()
            waits = ((self._heading, limits.head_seconds), (self._stalled, limits.idle_seconds))
            if any(since is not None and now - since > most for since, most in waits):
                self.transport.abort()
            else:
                self._check = self.loop.call_later(period, self._check_times)

        def data_received(self, data: bytes) -> None:
            if self._heading is None and (self.cycle is None or self.cycle.response_complete):
                self._heading = self.loop.time()
            if self._heading is not None:
                self._head_bytes += len(data)  # may include a part of the body, so the limit is generous
            super().data_received(data)
            if self._heading is not None and self._head_bytes > limits.head:
                self.send_400_response("")

        def on_headers_complete(self) -> None:
            self._heading, self._head_bytes = None, 0
            cast(Any, self.scope)[LEAVING] = self._leaving
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.time()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stalled = None

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and not self.cycle.response_complete:  # an answer has begun, or another is being made
                self.transport.abort()
            elif not self.transport.is_closing():
                self.transport.write(_NOT_HTTP)
                self.transport.close()

    return LimitedProtocol


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens to an address; port 0 is any free one."""
    check_count(port, "port", low=0, most=65_535, fix="pass a port from 1 to 65535, or 0 for any free one")
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        raise OptionError(
            f"the server cannot listen to {host}:{port}: {error}",
            expected="an address of this machine, and a free port",
            fix="pass another --port, or 0 for any free one",
        ) from error
    return made


def make_server(app: Any, limits: Limits, *, drain: float = 30.0) -> uvicorn.Server:
    """A server for an application.

    Args:
        app: The application.
        limits: Of connections.
        drain: How many seconds a server that is told to end waits for what is in flight.
    """
    config = uvicorn.Config(
        app,
        http=protocol(limits),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody asks for the client's address
        server_header=False,
        headers=_HEADERS,
        timeout_keep_alive=max(1, round(limits.idle_seconds)),
        timeout_graceful_shutdown=max(1, round(drain)),
    )
    server = uvicorn.Server(config)
    if hasattr(app, "state"):
        app.state.closing = lambda: server.should_exit  # streams that would go on for long end themselves
    return server


def run(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what is in flight.

    uvicorn raises the signal again at the end: SIGTERM, which is how a server is told to end, then does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    request_prompt_wakeups()  # on a busy core the event loop runs before the stages
    gc.collect()
    gc.freeze()  # a full collection of everything that torch has loaded takes a tenth of a second
    server.run(sockets=[listening])
