"""The addresses of the page: its files, and under `/page` what it asks the server. Nothing here is for programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from anytime.checks import Inputs
from anytime.errors import AnytimeError
from anytime.page import POLICY, index, recorded, script_files, style
from anytime.run import Budget
from anytime.run.budget import seconds
from anytime.serve import people
from anytime.serve.limits import Admission, Limits
from anytime.serve.page.events import NumberedEvents
from anytime.serve.page.examples import Examples, digit_examples, random_inputs, read_examples
from anytime.serve.page.thinking import Thinking
from anytime.serve.page.traffic import DEADLINES, MOST_RATE, Settings, Traffic
from anytime.serve.page.watch import Watch
from anytime.serve.problems import Problem, problem_of
from anytime.serve.service import Service

_SCRIPTS = script_files()
PUBLIC = frozenset({"/", "/page/page.css", *(f"/page/{name}" for name in _SCRIPTS)})
"""Paths that need no token: they are the same for every model, and the page asks for the token."""
_SAFE = {"referrer-policy": "no-referrer", "cache-control": "no-cache"}


class Page:
    """The page of one server.

    Args:
        service: The model.
        limits: What requests may take.
        admission: Counts them.
        demo: Whether the page may have the server generate traffic.
        examples: A folder of images to pick from.
        closing: Whether the server is about to end.
    """

    def __init__(
        self,
        service: Service,
        limits: Limits,
        admission: Admission,
        *,
        demo: bool = False,
        examples: Path | None = None,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._service, self._limits, self._admission, self._demo = service, limits, admission, demo
        self._given = None if examples is None else read_examples(examples, service.opened)
        self._thinking = Thinking(service)
        self.watch = Watch(service, self._thinking)
        self._traffic = Traffic(service, self._inputs, self.watch.seen, closing)
        self._times: list[float] | None = None
        self._listed: dict[str, bytes] = {}
        self._turn = asyncio.Lock()
        self.router = Router(
            [
                Route("/page.css", _file(style(), "text/css")),
                *(Route(f"/{name}", _file(data, "text/javascript")) for name, data in _SCRIPTS.items()),
                Route("/info", self.info),
                Route("/source/{id}", self.source),
                Route("/image/{row:int}", self.image),
                Route("/think", self.think, methods=["POST"]),
                Route("/load", self.load_events),
                Route("/load", self.load_start, methods=["POST"]),
                Route("/load/stop", self.load_stop, methods=["POST"]),
                Route("/model", self.model),
                Route("/report", self.report),
            ]
        )

    async def index(self, request: Request) -> Response:
        """The document."""
        return Response(index(), media_type="text/html", headers={"content-security-policy": POLICY, **_SAFE})

    async def close(self) -> None:
        """End what runs in the background."""
        self._thinking.close()
        await self.watch.close()
        await self._traffic.close()

    async def info(self, request: Request) -> Response:
        """What the page needs to know of the model."""
        self.watch.look()
        service = self._service
        async with self._heavy():
            rules, times = list(self._thinking.rules), await self._milliseconds()
        return _json(
            {
                "name": service.name,
                "exits": service.exits,
                "classes": [service.word(label) for label in range(service.opened.classes)],
                "rules": rules,
                "texts": service.texts,
                "images": service.opened.data is not None and bool(service.opened.data.mean),
                "sources": [each.id for each in self._sources()] + ["cifar100"],
                "milliseconds": times,
                "deadline_ms": 1e3 * service.deadline,
                "longest_ms": 1e3 * service.longest,
                "demo": self._demo,
                "load": {"most_rate": MOST_RATE, "deadlines_ms": [1e3 * each for each in DEADLINES]},
            }
        )

    async def source(self, request: Request) -> Response:
        """The examples of a source: the recorded sample, or inputs that this server runs."""
        id = request.path_params["id"]
        async with self._heavy():
            if id not in self._listed:
                self._listed[id] = orjson.dumps(await asyncio.to_thread(self._list, id))
        return Response(self._listed[id], media_type="application/json", headers=_SAFE)

    def _list(self, id: str) -> dict[str, Any]:
        if id == "cifar100":
            return recorded.cifar100().document()
        found = next((each for each in self._sources() if each.id == id), None)
        if found is None:
            raise Problem(404, "not_found", "there are no such examples", fix="see /page/info")
        examples = found.listing(self._service.runner.engine)
        return {"id": found.id, "title": found.title, "recorded": False, "examples": examples}

    async def image(self, request: Request) -> Response:
        """An image of the folder of examples."""
        if self._given is None or not 0 <= (row := request.path_params["row"]) < self._given.rows:
            raise Problem(404, "not_found", "there is no such image", fix="see /page/source/images")
        async with self._heavy():
            data, kind = await asyncio.to_thread(self._given.image, row)
        return Response(data, media_type=kind, headers=_SAFE)

    async def think(self, request: Request) -> Response:
        """One event per exit, for an example (`source` and `row` in the query) or for an image or text in the body."""
        with ExitStack() as stack, _refusing():
            add = stack.enter_context(self._admission.request(stream=True))
            query = dict(request.query_params)
            body = await self._admission.read(request.receive, request.headers, add)
            began = time.perf_counter()
            limit = self._limit(query.pop("deadline", None))
            x, label = await self._input(request, query, body)
            self.watch.seen(x)
            budget = Budget(max(limit - (time.perf_counter() - began), 0.0))
            answers = self._thinking.stream(x, label, budget)
            first = await anext(answers)  # a refusal is a status, not an event

            async def events() -> AsyncGenerator[tuple[int, str, dict[str, Any]], None]:
                try:
                    yield first["exit"], "exit", first
                    async for each in answers:
                        yield each["exit"], "exit", each
                    yield 0, "end", {}
                finally:
                    await answers.aclose()

            return NumberedEvents(events(), stack.pop_all())

    async def load_start(self, request: Request) -> Response:
        """Start the traffic, or change it."""
        self._check_demo()
        with _refusing():
            query = request.query_params
            settings = Settings(
                _number(query.get("rate", "100"), "rate"),
                seconds(query.get("deadline", "20ms")),
                _number(query.get("seconds", "30"), "seconds"),
            )
        return _json({"after": self._traffic.start(settings)})

    async def load_stop(self, request: Request) -> Response:
        """Stop it."""
        self._check_demo()
        self._traffic.stop()
        return _json({})

    async def load_events(self, request: Request) -> Response:
        """One event per pair of slices, after `Last-Event-ID`."""
        self._check_demo()
        after = request.headers.get("last-event-id", "0")
        with ExitStack() as stack:
            stack.enter_context(self._admission.request(stream=True))
            number = int(after) if after.isdecimal() and len(after) < 18 else 0
            return NumberedEvents(self._traffic.follow(number), stack.pop_all())

    async def model(self, request: Request) -> Response:
        """The report card of the requests so far."""
        async with self._heavy():
            return _json(await self.watch.card())

    async def report(self, request: Request) -> Response:
        """The whole report of them."""
        async with self._heavy():
            found = await self.watch.report()
        if found is None:
            raise Problem(404, "not_found", "no request was sampled yet", fix="send some requests while the page is open")
        return Response(found, media_type="text/html", headers={"content-security-policy": "frame-ancestors 'none'", **_SAFE})

    @asynccontextmanager
    async def _heavy(self) -> AsyncIterator[None]:
        """Count a request that computes something, one at a time, however many pages are open."""
        with _refusing(), self._admission.request():
            async with self._turn:
                yield

    def _sources(self) -> list[Examples]:
        return [each for each in (self._digits, self._given) if each is not None]

    def _inputs(self) -> Examples:
        """The inputs of generated traffic."""
        return next(iter(self._sources()[::-1]), None) or random_inputs(self._service)

    @cached_property
    def _digits(self) -> Examples | None:
        return digit_examples(self._service.opened)

    async def _milliseconds(self) -> list[float]:
        """Milliseconds up to each exit for one input, measured once."""
        if self._times is None:
            self._times = await asyncio.to_thread(self._thinking.milliseconds, random_inputs(self._service).part(0, 1))
            self.watch.milliseconds = self._times
        return self._times

    async def _input(self, request: Request, query: dict[str, str], body: bytes) -> tuple[Inputs, int | None]:
        if "source" in query:
            found = next((each for each in self._sources() if each.id == query["source"]), None)
            row = query.get("row", "")
            if found is None or not row.isdecimal() or len(row) > 9 or int(row) >= found.rows:
                raise Problem(404, "not_found", "there is no such example", fix="see /page/info")
            return found.part(int(row), int(row) + 1), found.label(int(row))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        given = people.read_input(kind, body, self._service.inputs, self._limits.elements)
        if kind in people.IMAGES:
            return await asyncio.to_thread(self._service.image, given, self._limits.pixels), None
        return (await asyncio.to_thread(self._service.batch, given, 1)), None

    def _limit(self, text: str | None) -> float:
        limit = self._service.deadline if text is None else seconds(text)
        if not 0 < limit <= self._service.longest:
            expected = f"more than 0 and at most {self._service.longest:g} s"
            raise Problem(400, "invalid_request", f"a deadline of {limit:g} s", expected=expected, fix="move the slider")
        return limit

    def _check_demo(self) -> None:
        if not self._demo:
            raise Problem(403, "not_a_demo", "this server generates no traffic", fix="start it with anytime serve --demo")


def _file(data: bytes, kind: str) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        return Response(data, media_type=kind, headers=_SAFE)

    return respond


@contextmanager
def _refusing() -> Iterator[None]:
    """Errors of this library as answers."""
    try:
        yield
    except AnytimeError as error:
        raise problem_of(error) from None


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Problem(400, "invalid_request", f"{name} is {text!r}", expected="a number", fix="move the slider") from None


def _json(document: Any) -> Response:
    return Response(orjson.dumps(document), media_type="application/json", headers={"cache-control": "no-store"})
