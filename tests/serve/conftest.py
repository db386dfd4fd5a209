"""A live server on the loopback interface, in a thread of the tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="the server needs the extra serve")
httpx = pytest.importorskip("httpx")

from anytime.data import load_digits  # noqa: E402
from anytime.data.augment import normalise  # noqa: E402
from anytime.data.digits import doubled  # noqa: E402
from anytime.models import load  # noqa: E402
from anytime.run import RunOptions  # noqa: E402
from anytime.samples import digits_model  # noqa: E402
from anytime.serve import Limits, Service, listen, make_app, make_server, open_service  # noqa: E402


@dataclass(eq=False)
class Live:
    """A running server."""

    service: Service
    app: Any
    server: Any
    port: int
    loop: list[asyncio.AbstractEventLoop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(keepalive_expiry=1))
        self.get, self.post, self.request = self.client.get, self.client.post, self.client.request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tasks(self) -> int:
        """Tasks of its event loop."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self.loop[0]).result(60)

    def wait_until_idle(self, tasks: int, seconds: float = 30.0) -> None:
        """Wait until no more tasks than before are left."""
        until = time.monotonic() + seconds
        while self.tasks() > tasks:
            assert time.monotonic() < until, f"{self.tasks() - tasks} tasks are left"
            time.sleep(0.05)


@contextmanager
def run_server(service: Service, limits: Limits | None = None, **options: Any) -> Iterator[Live]:
    limits = limits or Limits()
    app = make_app(service, limits=limits, **options)
    listening = listen("127.0.0.1", 0)
    live = Live(service, app, make_server(app, limits, drain=5.0), listening.getsockname()[1])

    async def serve() -> None:
        live.loop.append(asyncio.get_running_loop())
        await live.server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not live.server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield live
    finally:
        live.client.close()
        live.server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def make_service(folder: Any = None, **options: Any) -> Service:
    settings: dict[str, Any] = {"deadline": 30.0, "longest": 60.0, "engine": "eager", "options": RunOptions(workers=2)}
    return open_service(folder, **{**settings, **options})


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """The sample model, with generous deadlines: these tests are about the server, not the machine."""
    with run_server(make_service()) as found:
        yield found


@pytest.fixture
def serving() -> Iterator[Callable[..., Live]]:
    """Start a server of one's own: `serving(service, limits, token=...)`."""
    with ExitStack() as stack:
        yield lambda service=None, limits=None, **options: stack.enter_context(
            run_server(service or make_service(), limits, **options)
        )


@pytest.fixture(scope="session")
def running() -> Callable[..., Any]:
    """A server as a context, for fixtures of any scope."""
    return run_server


@pytest.fixture(scope="session")
def open_folder() -> Callable[..., Service]:
    return make_service


@pytest.fixture(scope="session")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Forty test images as the model takes them, and the pixels."""
    data = doubled(load_digits(channels=1)["test"]).take(torch.arange(40))
    return normalise(data.images, data.mean, data.std), data.images


@pytest.fixture(scope="session")
def offline(live: Live, digits: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The rule's answers to them, `(exits, 40, 10)`."""
    model = load(digits_model()[0])
    with torch.inference_mode():
        return live.service.runner.rule(model(digits[0]))  # type: ignore[operator]


def infer_request(x: Any, *, id: str | None = None, **parameters: Any) -> dict[str, Any]:
    array = np.asarray(x, dtype=np.float32)
    made = {"name": "input", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
    return {"inputs": [made], "parameters": parameters, **({} if id is None else {"id": id})}


@pytest.fixture(scope="session")
def request_of() -> Callable[..., dict[str, Any]]:
    return infer_request
