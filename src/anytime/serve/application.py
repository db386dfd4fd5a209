"""The routes: health, metadata, inference, event streams, a page for people, metrics.

An ASGI application around one `Service`. Which request runs when is the business of the service's runner; reading, limits,
security, protocol and metrics are that of the other modules.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from torch import Tensor

from anytime import __version__
from anytime.checks import Inputs
from anytime.errors import AnytimeError
from anytime.run import Answer
from anytime.serve import oip, people, schema
from anytime.serve.limits import Admission, Disconnected, Limits
from anytime.serve.metrics import Metrics
from anytime.serve.page import PUBLIC, Page
from anytime.serve.problems import Problem, closing, problem_of
from anytime.serve.security import Guard
from anytime.serve.service import Service, Wanted, describe
from anytime.serve.streams import EVENTS, EventStream, while_connected

T = TypeVar("T")
_logger = logging.getLogger("anytime.serve")
_Route = tuple[str, str, Callable[[Request], Any], dict[str, Any]]
_JSON = "application/json"
_HEADER_LENGTH = oip.HEADER_LENGTH.encode()
_RUN = (404, 408, 413, 415, 422, 429, 503)
_DECODERS = 2
_USUAL = ("probabilities", "labels")
_INTERNAL = closing(Problem(500, "internal", "the server failed", fix="see its log"))


def make_app(
    service: Service,
    *,
    limits: Limits | None = None,
    host: str = "127.0.0.1",
    allowed: Sequence[str] = (),
    token: str | None = None,
    demo: bool = False,
    examples: Path | None = None,
) -> FastAPI:
    """The application for one model.

    Args:
        service: The model. It is closed when the application ends.
        limits: What requests may take.
        host: The address that the server listens to.
        allowed: Further names that the Host header may have.
        token: The token that every caller needs, if any.
        demo: Whether the page may have the server generate traffic.
        examples: A folder of images for the page.
    """
    routes = _Routes(service, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _logger.info("ready", extra={"model": service.name, "exits": service.exits, "engine": service.runner.engine.name})
        yield
        _logger.info("closing")
        await routes.page.close()
        await asyncio.to_thread(service.runner.close)
        routes.decoders.shutdown(wait=False)

    app = _Application(
        title="anytime",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # Swagger's page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.guard = Guard(host=host, allowed=allowed, token=token, public=PUBLIC)
    app.direct = routes.direct()
    for kind in (Problem, Disconnected, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    for path, method, endpoint, described in routes.table():
        app.add_api_route(path, endpoint, methods=[method], response_model=None, **described)
    ends = partial(getattr, app.state, "closing", bool)  # `make_server` sets it
    routes.page = Page(service, routes.limits, routes.admission, demo=demo, examples=examples, closing=lambda: bool(ends()()))
    app.mount("/page", routes.page.router)
    return app


class _Application(FastAPI):
    """Every request is checked first; POST requests to some paths then go straight to their handlers."""

    guard: Guard
    direct: Mapping[str, Any]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        elif (problem := self.guard.check(scope["path"], scope["headers"])) is not None:
            await problem(scope, receive, send)
        elif scope["method"] == "POST" and (handler := self.direct.get(scope["path"])) is not None:
            await handler(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _Handled(Response):
    """A response that an ASGI application sends."""

    def __init__(self, handler: Any) -> None:
        super().__init__()
        self._handler = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._handler(scope, receive, send)


class _Routes:
    page: Page

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service, self.limits, self.admission = service, limits, Admission(limits)
        self.decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="decode")
        runner = service.runner
        self.metrics = Metrics(exits=service.exits, load=lambda: runner.load_status, in_flight=lambda: self.admission.in_flight)
        runner.on_stage = self.metrics.stage
        outputs = [spec.name for spec in service.outputs]
        self.reader = oip.RequestReader(service.inputs, outputs, most=limits.elements, wanted=service.wanted)

    def table(self) -> list[_Route]:
        """Path, method, endpoint and description of each route."""
        one = schema.operation
        service = self.service
        outputs = [spec.name for spec in service.outputs]
        body = schema.infer_body(service.inputs, outputs, service.exits, service.longest)
        infer: dict[str, Any] = {"body": {_JSON: body}, "refusals": _RUN}
        people_body: dict[str, Any] = {
            "body": {_JSON: schema.record({"input": {}}), "text/plain": schema.TEXT}
            | {kind: {**schema.TEXT, "format": "binary"} for kind in people.IMAGES},
            "query": schema.asked_by_people(service.exits),
            "refusals": _RUN,
        }
        found: list[_Route] = [
            ("/", "GET", self.index, one("The page for people.", None, media="text/html")),
            ("/metrics", "GET", self.prometheus, one("Prometheus metrics.", None, media="text/plain")),
            ("/v2", "GET", self.server, one("Metadata of the server.", schema.SERVER)),
            ("/v2/health/live", "GET", self.live, one("Whether the server runs.", schema.record({"live": schema.FLAG}))),
            ("/v2/health/ready", "GET", self.ready, one("Whether it answers.", schema.record({"ready": schema.FLAG}))),
            ("/predict", "POST", self.predict, one("An image or a text in, classes out.", schema.PEOPLE, **people_body)),
        ]  # fmt: skip
        for base, path in (
            ("/v2/models/{name}", {"name": service.name}),
            ("/v2/models/{name}/versions/{version}", {"name": service.name, "version": "1"}),
        ):
            known: dict[str, Any] = {"path": path, "refusals": (404,)}
            ready = schema.record({"name": schema.TEXT, "ready": schema.FLAG})
            found += [
                (base, "GET", self.model, one("Metadata of the model.", schema.METADATA, **known)),
                (f"{base}/ready", "GET", self.model_ready, one("Whether the model answers.", ready, **known)),
                (f"{base}/infer", "POST", self.infer_route, one(
                    "An answer by the deadline.", schema.RESPONSE, path=path, header=oip.HEADER_LENGTH, **infer
                )),
                (f"{base}/infer_stream", "POST", self.infer_stream, one(
                    "One event per exit.", schema.EVENT, media=EVENTS, path=path, **infer
                )),
            ]  # fmt: skip
        return sorted(found, key=lambda route: "infer" not in route[0])  # they are matched in this order

    def direct(self) -> dict[str, Any]:
        """Paths of POST requests that are answered without the framework's layers."""
        base = f"/v2/models/{self.service.name}"
        return dict.fromkeys((f"{base}/infer", f"{base}/versions/1/infer"), self.infer)

    # Of the server and the model.

    async def index(self, request: Request) -> Response:
        return await self.page.index(request)

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def server(self, request: Request) -> Response:
        return _json({"name": "anytime", "version": __version__, "extensions": ["binary_tensor_data", "infer_stream"]})

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        return _json({"ready": True})

    async def model(self, request: Request) -> Response:
        self._check_model(request)
        return _json(self.service.metadata())

    async def model_ready(self, request: Request) -> Response:
        self._check_model(request)
        return _json({"name": self.service.name, "ready": True})

    # Of inference.

    async def infer(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application of its own: the framework's layers take longer than everything here together."""
        try:
            with self._noting("infer"), self.admission.request() as add:
                call, x, began = await self._read(scope, receive, add)
                answer = await while_connected(scope, receive, self._answer(x, call.wanted, began))
                body, length = self._encoded(answer, call, began)
        except Problem as problem:
            await problem(scope, receive, send)
            return
        except Disconnected:
            return
        except Exception:
            _logger.exception("a request failed")
            await _INTERNAL(scope, receive, send)
            return
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        if length is not None:
            headers = [headers[0], (b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def infer_route(self, request: Request) -> Response:
        self._check_model(request)
        return _Handled(self.infer)

    async def infer_stream(self, request: Request) -> Response:
        with ExitStack() as stack:
            self._check_model(request)
            stack.enter_context(self._noting("infer_stream"))
            add = stack.enter_context(self.admission.request(stream=True))
            call, x, began = await self._read(request.scope, request.receive, add)
            if call.binary or any((call.outputs or {}).values()):
                raise Problem(400, "invalid_request", "binary data in an event stream", fix="request JSON outputs")
            answers: Any = self.service.runner.stream_async(x, budget=call.wanted.budget, arrived=began)
            # The first exit decides the status: a request that is refused gets no stream.
            first = await while_connected(request.scope, request.receive, anext(answers))
            self.page.watch.seen(x)

            async def events() -> AsyncGenerator[bytes, None]:
                answer = first
                yield self._encoded(answer, call, began)[0]
                async for answer in answers:
                    yield self._encoded(answer, call, began)[0]
                self.metrics.answer(answer)

            return EventStream(events(), stack.pop_all(), source=answers)

    async def predict(self, request: Request) -> Response:
        with self._noting("predict"), self.admission.request() as add:
            parameters, top = people.read_query(request.query_params.multi_items())
            wanted = self.service.wanted(parameters)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            body = await self.admission.read(request.receive, request.headers, add)
            began = time.perf_counter()
            given = people.read_input(kind, body, self.service.inputs, self.limits.elements)
            x = await (self._batch(given) if kind not in people.IMAGES else self._in_thread(self._image, given))
            answer = await while_connected(request.scope, request.receive, self._answer(x, wanted, began))
            how = describe(answer, time.perf_counter() - began, with_set=False)
            return _json(people.document(answer, self.service.name, self.service.word, top, how))

    async def _read(
        self, scope: Any, receive: Any, add: Callable[[int], None]
    ) -> tuple[oip.InferRequest[Wanted], Inputs, float]:
        """The request, its inputs, and when all of it had arrived."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body = await self.admission.read(receive, headers, add)
        began = time.perf_counter()
        call, data = self.reader(body, headers.get(oip.HEADER_LENGTH))
        self.service.runner.check_load(call.wanted.budget)  # most of an overload is refused here
        return call, await self._batch(oip.read_inputs(call, data)), began

    async def _batch(self, given: Mapping[str, oip.Array]) -> Inputs:
        if self.service.texts:  # a tokenizer takes a while
            return await self._in_thread(self.service.batch, given, self.limits.batch)
        return self.service.batch(given, self.limits.batch)

    def _image(self, data: bytes) -> Tensor:
        return self.service.image(data, self.limits.pixels)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.decoders, function, *arguments)

    async def _answer(self, x: Inputs, wanted: Wanted, began: float) -> Answer:
        answer = await self.service.runner.predict_async(x, budget=wanted.budget, arrived=began)
        self.page.watch.seen(x)
        self.metrics.answer(answer)
        return answer

    def _encoded(self, answer: Answer, call: oip.InferRequest[Wanted], began: float) -> tuple[bytes, int | None]:
        chosen = call.outputs or dict.fromkeys((*_USUAL, *(["set"] if call.wanted.set else [])), call.binary)
        how = describe(answer, time.perf_counter() - began, with_set=call.wanted.set)
        picked = {name: self.service.array(answer, name) for name in chosen}
        return oip.encode(picked, chosen, model=self.service.name, id=call.id, parameters=how)

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version", "1")
        if (name, version) != (self.service.name, "1"):
            raise Problem(404, "not_found", "there is no such model", expected=self.service.name, fix="see GET /")

    @contextmanager
    def _noting(self, endpoint: str) -> Iterator[None]:
        """Measure a request and how it ended; errors of this library become answers."""
        began, outcome = time.perf_counter(), "failed"
        try:
            yield
            outcome = "answered"
        except Disconnected:
            outcome = "disconnected"
            raise
        except Problem as problem:
            outcome = problem.code
            raise
        except AnytimeError as error:
            answered = problem_of(error, **({"time": "the parameter deadline"} if endpoint == "predict" else {}))
            outcome = answered.code
            raise answered from None
        finally:
            seconds = time.perf_counter() - began
            self.metrics.request(endpoint, outcome, seconds)
            if _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("request", extra={"endpoint": endpoint, "outcome": outcome, "seconds": round(seconds, 6)})


def _json(document: Any) -> Response:
    return Response(orjson.dumps(document), media_type=_JSON)


def _refusal(problem: Problem) -> Response:
    return Response(problem.body(), problem.status, problem.headers, _JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    """The answer to an exception. (Starlette would run a plain function in another thread.)"""
    match error:
        case Problem():
            return _refusal(error)
        case Disconnected():
            return Response(status_code=499)  # nobody reads it
        case HTTPException():
            code = error.detail.lower().replace(" ", "_")
            return _refusal(Problem(error.status_code, code, error.detail, headers=error.headers, fix="see GET /openapi.json"))
    return _refusal(_INTERNAL)
