"""Raw sockets that send what no client should: only 4xx or a closed connection, and everybody else is served."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anytime.serve.limits import Admission, Limits
from anytime.serve.problems import Problem

PATH = b"/v2/models/digits/infer"
SIZES = (1, 7, 100, 3000, 70_000)


def head(length: int | None, *more: bytes, method: bytes = b"POST", path: bytes = PATH) -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *more]
    return b"\r\n".join([*lines, *([] if length is None else [b"Content-Length: %d" % length])]) + b"\r\n\r\n"


def body_of(random: random.Random) -> bytes:
    """A JSON body with something wrong in it."""
    good = {"name": "input", "datatype": "FP32", "shape": [1, 1, 16, 16], "data": [0.5] * 256}
    text = json.dumps({"inputs": [good]}).encode()
    kinds: list[Callable[[], bytes]] = [
        lambda: text.replace(b"0.5", random.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x1", b"null", b'"x"']), 1),
        lambda: text.replace(b"[1, 1, 16, 16]", random.choice([b"[99999999999, 1, 16, 16]", b"[-1, 1, 16, 16]", b"[]"])),
        lambda: text.replace(b'"name"', b'"name": "input", "name"', 1),
        lambda: b"[" * random.choice(SIZES) + b"]" * random.choice(SIZES),
        lambda: b'{"inputs": ' + b'{"a":' * random.choice(SIZES) + b"1" + b"}" * random.choice(SIZES),
        lambda: text[: random.randrange(len(text))],
        lambda: bytes(random.randrange(256) for _ in range(random.choice(SIZES[:4]))),
        lambda: b'{"inputs": [], "' + b"a" * random.choice(SIZES) + b'": 1}',
        lambda: text + text,
    ]  # fmt: skip
    return random.choice(kinds)()


def abuse(random: random.Random) -> bytes:
    """What a hostile client sends."""
    body = body_of(random)
    size = len(body)
    wrong = random.choice([b"-1", b"1e3", b"0x10", b"99999999999999999999", b"1, 2", b"abc", b""])
    binary = b"Inference-Header-Content-Length: " + str(random.choice([0, 5, size, size + 1, -1, 10**18])).encode()
    kinds: list[Callable[[], bytes]] = [
        lambda: head(size) + body,
        lambda: head(size, binary) + body,
        lambda: head(size + random.randrange(1, 100)) + body,  # a body that never ends
        lambda: head(None, b"Content-Length: " + wrong) + body,
        lambda: head(size, b"Content-Length: %d" % (size + 1)) + body,
        lambda: head(size, b"Transfer-Encoding: chunked") + body,  # both: request smuggling
        lambda: head(None, b"Transfer-Encoding: chunked") + b"%x\r\n" % size + body + b"\r\n0\r\n\r\n",
        lambda: head(None, b"Transfer-Encoding: chunked") + random.choice([b"zz", b"-5", b"f" * 16]) + b"\r\n" + body,
        lambda: head(None, b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
        lambda: head(1 << 40) + body,
        lambda: head(size, b"Content-Encoding: " + random.choice([b"gzip", b"br"])) + body,
        lambda: head(size, b"Expect: 100-continue") + body,
        lambda: head(size, b"X: " + b"a" * random.choice(SIZES)) + body,
        lambda: head(size, *[b"X%d: 1" % number for number in range(random.choice((10, 500, 3000)))]) + body,
        lambda: head(size, b"Host: localhost") + body,
        lambda: head(size, b"Bad Header") + body,
        lambda: head(size, method=random.choice([b"BREW", b"post", b"P\x00ST", b"TRACE", b"CONNECT", b""])) + body,
        lambda: head(size, path=random.choice([b"/../../etc/passwd", b"/%00", b"/" + b"a" * 9000, b"http://x/", b"*"])) + body,
        lambda: head(size, b"Upgrade: websocket", b"Connection: Upgrade") + body,
        lambda: head(size) * random.randrange(2, 20) + body,
        lambda: bytes(random.randrange(256) for _ in range(random.choice(SIZES[:4]))),
        lambda: b"GET / HTTP/9.9\r\n\r\n",
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + body[:200],
        lambda: head(size)[: random.randrange(1, 60)],  # headers that never end
    ]  # fmt: skip
    return random.choice(kinds)()


def statuses(data: bytes) -> list[int]:
    return [int(line[9:12]) for line in data.split(b"\r\n") if line.startswith(b"HTTP/1.")]


def send(port: int, data: bytes, *, seconds: float) -> bytes:
    """Send it and read what comes until the other side closes, or for some seconds."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR) if data and data[-1] % 2 else None
            while part := connection.recv(65536):
                found += part
                if len(found) > 1 << 20 or statuses(found):
                    break
        except OSError:
            pass
    return found


@pytest.fixture
def small(serving: Any, open_folder: Any) -> Iterator[Any]:
    from anytime.serve import Limits

    limits = Limits(body=1 << 20, head_seconds=0.5, body_seconds=0.5, idle_seconds=1.0)
    return serving(open_folder(), limits)


def check(live: Any, count: int, seed: int, threads: int = 4) -> None:
    failures: list[str] = []

    def run(worker: int) -> None:
        for number in range(worker, count, threads):
            data = abuse(random.Random(f"{seed}:{number}"))
            found = statuses(send(live.port, data, seconds=3.0))
            if any(status != 100 and not 400 <= status < 500 for status in found):
                failures.append(f"BATTERY={seed}:{number}: {found} for {data[:200]!r}")

    workers = [threading.Thread(target=run, args=(worker,)) for worker in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, "\n".join(failures[:5])


def memory() -> int:
    """Resident bytes of this process."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free but was not given back
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_abuses_get_4xx_or_a_closed_connection(small: Any, digits: Any, request_of: Any) -> None:
    tasks = small.tasks()
    check(small, 120, seed=int(os.environ.get("BATTERY", "17")))
    assert small.post("/v2/models/digits/infer", json=request_of(digits[0][:1])).status_code == 200
    small.wait_until_idle(tasks)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_five_thousand_abuses(small: Any, digits: Any, request_of: Any) -> None:
    check(small, 500, seed=1)  # what is allocated once
    tasks, before = small.tasks(), memory()
    check(small, 5000, seed=2)
    small.wait_until_idle(tasks)
    assert memory() - before < 64 << 20
    assert small.post("/v2/models/digits/infer", json=request_of(digits[0][:1])).status_code == 200


def closed_after(connection: socket.socket, seconds: float) -> bool:
    """Whether the other side closes within some seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize(
    "start", [b"", b"POST ", head(10)[:-2], head(10), head(10) + b"{"], ids=["silent", "line", "headers", "body", "part"]
)
def test_slow_senders_are_cut_off(start: bytes, small: Any) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(start)
        assert closed_after(connection, 60.0)


def test_headers_one_byte_at_a_time_are_cut_off(small: Any) -> None:
    """The time is that of all headers, not of one byte; also for the second request of a connection."""
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        for _ in range(200):
            try:
                connection.sendall(b"G")
            except OSError:
                return
            time.sleep(0.1)
    pytest.fail("still open after 20 s")


def test_a_client_that_does_not_read_is_cut_off(small: Any, digits: Any, request_of: Any) -> None:
    request, idle = json.dumps(request_of(digits[0][:40])).encode(), small.tasks()
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1.0)
        for _ in range(400):
            try:
                connection.sendall(head(len(request)) + request)
            except OSError:  # it does not read any more, or has closed
                break
        assert closed_after(connection, 60.0)
    small.wait_until_idle(idle, 60)


def test_more_connections_than_allowed_are_closed(serving: Any, open_folder: Any) -> None:
    from anytime.serve import Limits

    live = serving(open_folder(), Limits(connections=3, head_seconds=60.0))
    others = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(4)]
    assert closed_after(others[-1], 30.0)
    for other in others:
        other.close()
    live.wait_until_idle(live.tasks())
    assert live.get("/v2").status_code == 200


@pytest.mark.parametrize("length", ["²", "-1", "1e3", ""])
def test_a_length_that_is_not_a_number_is_refused_and_not_read(length: str) -> None:
    async def receive() -> Any:
        raise AssertionError

    with pytest.raises(Problem):
        asyncio.run(Admission(Limits()).read(receive, {"content-length": length}, lambda count: None))
