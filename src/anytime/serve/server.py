"""uvicorn around the application: time limits on connections, and an end that answers what is in flight."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from anytime.errors import OptionError
from anytime.run.timing.scheduling_hints import request_prompt_wakeups
from anytime.serve.limits import Limits
from anytime.serve.problems import Problem

_HEADERS = [("x-content-type-options", "nosniff")]
_BAD = Problem(400, "invalid_http", "not a valid HTTP request", fix="send HTTP/1.1")


def protocol(limits: Limits) -> type[H11Protocol]:
    """Uvicorn's HTTP protocol with limits on connections, on slow headers and on clients that do not read."""

    class LimitedProtocol(H11Protocol):
        _heading: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            self._watch_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._heading, self._stalled):
                if timer is not None:
                    timer.cancel()

        def handle_events(self) -> None:
            try:
                super().handle_events()
            except h11.LocalProtocolError:  # bytes after an answer that has begun
                self.transport.abort()
            if self._heading is not None and self.conn.their_state is not h11.IDLE:
                self._heading.cancel()
                self._heading = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_headers()

        def _watch_headers(self) -> None:
            """While the state is idle, the headers of the next request are not complete."""
            if self._heading is None and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._heading = self.loop.call_later(limits.head_seconds, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(limits.idle_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()
                return
            headers = [("content-type", "application/json"), ("connection", "close"), *_HEADERS]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=_BAD.body()), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return LimitedProtocol


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens to an address; port 0 is any free one."""
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
