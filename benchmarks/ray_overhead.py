"""What Ray Serve's proxies add to a request: the same application behind each of them and on uvicorn alone, in turns.

    python benchmarks/ray_overhead.py            # HAProxy
    python benchmarks/ray_overhead.py --default  # Ray's own proxy

One client, one connection per server. `live` does no work in the model; `infer` asks for the first exit of the sample model.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BODY = {
    "inputs": [{"name": "input", "shape": [1, 1, 16, 16], "datatype": "FP32", "data": [0.5] * 256}],
    "parameters": {"max_exit": 1, "timeout": 10_000_000},
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def alone() -> Iterator[str]:
    """`anytime serve`; yields the address."""
    port = free_port()
    command = [sys.executable, "-m", "anytime.cli", "serve", "--port", str(port), "--engine", "eager", "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any("listening" in line for line in process.stdout)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def on_ray() -> Iterator[str]:
    """One replica on a local Ray; yields the address."""
    import ray
    from ray import serve

    from anytime.integrations.ray_serve import make_application

    port = free_port()
    ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(make_application(engine="eager", deadline="1s", ray={"num_replicas": 1}), name="digits")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def timed(ask: Callable[[Any], Any], client: Any) -> float:
    began = time.perf_counter()
    response = ask(client)
    seconds = time.perf_counter() - began
    assert response.status_code == 200, response.text
    return 1e3 * seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--default", action="store_true", help="Ray's own proxy in place of HAProxy")
    parser.add_argument("--requests", type=int, default=500)
    arguments = parser.parse_args()
    os.environ.update(
        ANYTIME_TOKEN=secrets.token_urlsafe(32),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_SERVE_ENABLE_HA_PROXY="0" if arguments.default else "1",
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
    )
    import httpx

    headers = {"authorization": f"Bearer {os.environ['ANYTIME_TOKEN']}"}
    with alone() as first, on_ray() as second:
        clients = [httpx.Client(base_url=address, headers=headers, timeout=30) for address in (first, second)]
        for name, ask in {
            "live": lambda client: client.get("/v2/health/live"),
            "infer": lambda client: client.post("/v2/models/digits/infer", json=BODY),
        }.items():
            times = [[timed(ask, client) for client in clients] for _ in range(arguments.requests)]
            plain, ray = (sorted(column) for column in zip(*times[20:], strict=True))
            middle = [statistics.median(column) for column in (plain, ray)]
            tail = [column[int(0.95 * len(column))] for column in (plain, ray)]
            print(
                f"{name}: uvicorn alone median {middle[0]:.2f} ms, 95 % {tail[0]:.2f}; "
                f"{'default proxy' if arguments.default else 'HAProxy'} median {middle[1]:.2f} ms, 95 % {tail[1]:.2f}; "
                f"added {middle[1] - middle[0]:.2f} ms, {middle[1] / middle[0]:.1f} ×"
            )


if __name__ == "__main__":
    main()
