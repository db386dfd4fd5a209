"""Programs that start a small Ray of their own, each in a process of its own: Ray reads its environment when it is imported.

`python ray_programs.py PROGRAM` prints one JSON document as its last line.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[2] / "deploy" / "ray-serve.yaml"
TOKEN = secrets.token_urlsafe(32)
SETTINGS = {
    "ANYTIME_TOKEN": TOKEN,
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one into the home directory
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def local_ray() -> Iterator[None]:
    import ray

    for left in (2, 1, 0):  # Ray gives its own processes 30 s to start, which a busy machine may not
        try:
            ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if not left:
                raise
    try:
        yield
    finally:
        ray.shutdown()


def deploy(arguments: dict[str, Any] | None = None, **options: Any) -> None:
    """The sample model, with further arguments of the application and options of its deployment."""
    from ray import serve

    from anytime.integrations.ray_serve import app

    fixed = {"model": None, "name": "digits", "deadline": "30s", "engine": "eager", "token_file": None}
    ray = {**(arguments or {}).get("ray", {}), "health_check_period_s": 1.0, **options}
    serve.run(app({**(arguments or {}), **fixed, "ray": ray}), name="digits")


@contextmanager
def served(arguments: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """The sample model on a local Ray; yields the address."""
    for name in ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"):
        os.environ[name] = str(free_port())
    with local_ray():
        from ray import serve

        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        try:
            deploy(arguments, **options)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def replicas() -> list[str]:
    from ray.util import list_named_actors

    return sorted(each["name"] for each in list_named_actors(all_namespaces=True) if "SERVE_REPLICA::digits#" in each["name"])


@contextmanager
def loaded(address: str, *, threads: int, most: int = 20_000) -> Iterator[list[str]]:
    """Requests from several threads, until the context ends; yields their outcomes."""
    outcomes: list[str] = []
    client, numbers, ended = Client(address), iter(range(most)), threading.Event()

    def loop() -> None:
        for number in numbers:
            if ended.is_set():
                break
            outcomes.append(client.ask(number))

    load = [threading.Thread(target=loop) for _ in range(threads)]
    for thread in load:
        thread.start()
    try:
        yield outcomes
    finally:
        ended.set()
        for thread in load:
            thread.join()


def wait_until(reached: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not (done := reached()) and time.monotonic() < until:
        time.sleep(0.2)
    return done


class Client:
    """Asks for test images and compares each answer with the rule's value at its exit."""

    def __init__(self, address: str) -> None:
        import httpx
        import torch

        from anytime.data import load_digits
        from anytime.data.augment import normalise
        from anytime.models import load
        from anytime.run import Runner
        from anytime.samples import digits_model
        from anytime.train.data.named import doubled

        data = doubled(load_digits(channels=1)["test"]).take(torch.arange(40))
        self.images = normalise(data.images, data.mean, data.std)
        folder, sets = digits_model()
        model = load(folder)
        with torch.inference_mode(), Runner(model, calibration=sets) as runner:
            self.expected = runner.rule(model(self.images)).probs
        self._http = httpx.Client(
            base_url=address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60, limits=httpx.Limits(max_connections=16)
        )

    def ask(self, number: int) -> str:
        """The outcome of a request: `correct`, `wrong`, a status, or the name of an exception."""
        import httpx
        import torch

        row, exit = number % 40, 1 + number % 5
        image = self.images[row : row + 1]
        body = {
            "inputs": [{"name": "input", "shape": list(image.shape), "datatype": "FP32", "data": image.ravel().tolist()}],
            "parameters": {"max_exit": exit, "timeout": 30_000_000},
            "id": str(number),
        }
        try:
            response = self._http.post("/v2/models/digits/infer", json=body)
        except httpx.HTTPError as error:
            return type(error).__name__
        if response.status_code != 200:
            return str(response.status_code)
        document = response.json()
        outputs = {each["name"]: each["data"] for each in document["outputs"]}
        reached = document["parameters"]["exit"]
        same = torch.allclose(torch.tensor(outputs["probabilities"]), self.expected[reached - 1, row], atol=1e-4)
        return "correct" if same and reached == exit and document["id"] == str(number) else "wrong"

    def get(self, path: str, **headers: str) -> int:
        return int(self._http.get(path, headers=headers).status_code)


def smoke() -> dict[str, Any]:
    """One replica, as deploy/ray-serve.yaml describes it: answers, and refuses strangers."""
    import yaml

    (configured,) = yaml.safe_load(CONFIG.read_text())["applications"]
    with served(configured["args"], autoscaling_config={"max_replicas": 2}) as address:
        client = Client(address)
        return {
            "outcomes": Counter(map(client.ask, range(10))),
            "ready": client.get("/v2/health/ready"),
            "without_token": client.get("/v2", authorization=""),
        }


def data() -> dict[str, Any]:
    """Batch inference over the files of the folder in `argv`, with two workers and in this process."""
    import numpy as np

    from anytime.integrations.ray_data import map_batches, predict_files

    folder = Path(sys.argv[2])
    files, model = sorted(folder.glob("inputs.*")), folder / "model"
    here = predict_files(files, model, rows=7, probabilities=True)
    with local_ray():
        from ray.data import from_numpy

        there = predict_files(files, model, rows=7, workers=2, probabilities=True)
        rows = np.load(folder / "inputs.npy")
        mapped = map_batches(from_numpy(rows), model, rows=16, column="data").take_all()
    labels = sorted(int(row["labels"]) for row in mapped)
    return {
        "rows": len(there["labels"]),
        "same": [name for name in here if np.allclose(here[name], there[name], atol=1e-5)],
        "mapped": labels == sorted(here["labels"][: len(rows)].tolist()),
    }


def evaluate() -> dict[str, Any]:
    """Evaluation of the files of the folder in `argv`, on Ray and in this process."""
    import anytime
    from anytime.integrations.ray_data import evaluate_files

    folder = sys.argv[2]
    here = anytime.evaluate(folder).to_json()
    with local_ray():
        there = evaluate_files(folder).to_json()
        try:
            evaluate_files(folder, f"{folder}/../few-labels/*.npy")
            error = ""
        except anytime.AnytimeError as raised:
            error = type(raised).__name__
    return {"same": json.dumps(here) == json.dumps(there), "rows": here["samples"], "error": error}


def kill(threads: int = 8) -> dict[str, Any]:
    """Two replicas under load, one of which is killed. Ends when there are two again."""
    import ray

    with served(num_replicas=2) as address, loaded(address, threads=threads) as outcomes:
        before = replicas()
        wait_until(lambda: len(outcomes) > 200)
        count = len(outcomes)
        ray.kill(ray.get_actor(before[0], namespace="serve"))
        replaced = wait_until(lambda: len(replicas()) == 2 and before[0] not in replicas())
        wait_until(lambda: len(outcomes) > count + 200)
        return {
            "before": Counter(outcomes[:count]),
            "after": Counter(outcomes[count:]),
            "replicas": len(before),
            "replaced": replaced,
            "threads": threads,
        }


def scale() -> dict[str, Any]:
    """Load adds a replica; a new version with one replica takes it away again, under load."""
    scaling = {
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 1,
        "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }
    with served(autoscaling_config=scaling) as address, loaded(address, threads=4) as outcomes:
        before = replicas()
        grown = wait_until(lambda: len(replicas()) == 2)
        deploy(num_replicas=1)
        count = len(outcomes)
        wait_until(lambda: len(replicas()) == 1 and len(outcomes) > count + 100)
        return {"before": len(before), "grown": grown, "left": len(replicas()), "outcomes": Counter(outcomes)}


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    print(json.dumps({"smoke": smoke, "data": data, "evaluate": evaluate, "kill": kill, "scale": scale}[sys.argv[1]]()))
