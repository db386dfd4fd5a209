"""Clients that leave: the work stops at the next exit, and nothing of them is left."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import resource
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest


@pytest.fixture
def slow(serving: Any, open_folder: Any) -> tuple[Any, list[int]]:
    """A server whose stages take 0.3 s, and the stages that it ran."""
    service, ran = open_folder(), []
    stage = service.opened.model.stage

    def slowly(exit: int, carry: Any) -> Any:
        ran.append(exit)
        time.sleep(0.3)
        return stage(exit, carry)

    object.__setattr__(service.opened.model, "stage", slowly)
    return serving(service), ran


def message(request: dict[str, Any], path: str) -> bytes:
    body = json.dumps(request).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("path", ["infer", "infer_stream"])
def test_a_closed_connection_stops_the_work(path: str, slow: Any, digits: Any, request_of: Any) -> None:
    live, ran = slow
    idle = live.tasks()
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(message(request_of(digits[0][:1]), f"/v2/models/digits/{path}"))
        while not ran:
            time.sleep(0.01)
    live.wait_until_idle(idle)
    time.sleep(1.5)  # as long as all stages would take
    assert len(ran) < 5
    assert "anytime_in_flight 0.0" in live.get("/metrics").text


def test_an_answer_that_is_half_read_stops_the_work(slow: Any, digits: Any, request_of: Any) -> None:
    live, ran = slow
    idle = live.tasks()
    with (
        httpx.Client() as client,
        client.stream("POST", f"{live.url}/v2/models/digits/infer_stream", json=request_of(digits[0][:1])) as response,
    ):
        assert next(response.iter_lines()) == "event: exit"
    live.wait_until_idle(idle)
    time.sleep(1.5)
    assert len(ran) < 5


def leave(live: Any, request: dict[str, Any], count: int, threads: int = 8) -> None:
    """Connect, send some of a request, read some of the answer, and leave, at random."""

    def run(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(count // threads):
            path = chance.choice(["/v2/models/digits/infer", "/v2/models/digits/infer_stream", "/predict"])
            data = message(request if path != "/predict" else {"input": 1}, path)
            connection = socket.create_connection(("127.0.0.1", live.port), timeout=10)
            try:
                connection.sendall(data[: chance.choice([chance.randrange(len(data)), len(data)])])
                time.sleep(chance.choice([0, 0, 0.001, 0.005, 0.02]))
                if chance.random() < 0.3:
                    connection.setblocking(False)
                    connection.recv(chance.randrange(1, 1000))
            except OSError:
                pass
            (reset if chance.random() < 0.5 else socket.socket.close)(connection)

    workers = [threading.Thread(target=run, args=(worker,)) for worker in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def memory() -> int:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free but was not given back
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def ours() -> int:
    """Objects of requests and connections. Others come and go with the event loop's timers, which depends on the load."""
    return sum(str(type(each).__module__).split(".")[0] in ("anytime", "starlette", "uvicorn") for each in gc.get_objects())


def check(live: Any, request: dict[str, Any], count: int, *, most: int) -> None:
    idle = live.tasks()
    leave(live, request, count // 4)
    live.wait_until_idle(idle, 60)
    before, objects = memory(), ours()
    leave(live, request, count)
    live.wait_until_idle(idle, 60)
    assert memory() - before < most  # of which the allocator keeps some
    assert ours() - objects < 100
    assert "anytime_in_flight 0.0" in live.get("/metrics").text
    status = live.service.runner.load_status
    assert (status.waiting, status.running) == (0, 0)
    assert live.post("/v2/models/digits/infer", json=request).status_code == 200


def test_random_disconnects_leave_nothing(live: Any, digits: Any, request_of: Any) -> None:
    check(live, request_of(digits[0][:1]), 160, most=64 << 20)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_random_disconnects_leave_nothing(live: Any, digits: Any, request_of: Any) -> None:
    check(live, request_of(digits[0][:1]), 10_000, most=96 << 20)
