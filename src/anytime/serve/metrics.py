"""What an operator sees: Prometheus metrics with bounded labels, and OpenTelemetry spans where its API is installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from anytime.run import Answer, LoadStatus, StageReport

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server; a registry of its own, so that several servers fit into one process.

    Args:
        exits: Number of exits of the model.
        load: How busy the runner is.
        in_flight: How many requests are being read, run or answered.
    """

    def __init__(self, *, exits: int, load: Callable[[], LoadStatus], in_flight: Callable[[], int]) -> None:
        self._registry = mine = CollectorRegistry()
        self._seconds = Histogram(
            "anytime_request_seconds",
            "Time from the whole request to its answer, by endpoint and outcome.",
            ("endpoint", "outcome"),
            buckets=_SECONDS,
            registry=mine,
        )
        self._known: dict[tuple[str, str], Any] = {}  # labels() takes as long as all the rest
        exit_total = Counter("anytime_exit", "Answers by the exit that they reached.", ("exit",), registry=mine)
        self._exits = [exit_total.labels(exit) for exit in range(exits + 1)]
        self._misses = Counter("anytime_deadline_miss", "Answers after their deadline.", registry=mine)
        self._collapses = Counter(
            "anytime_collapse", "Inputs for which the rule fell back to the exit's own prediction.", registry=mine
        )
        self._batch = Histogram("anytime_batch_size", "Inputs per stage that ran.", buckets=_BATCHES, registry=mine)
        stage_seconds = Histogram("anytime_stage_seconds", "Time of a stage.", ("stage",), buckets=_SECONDS, registry=mine)
        self._stages = [stage_seconds.labels(stage) for stage in range(1, exits + 1)]
        for name, text, value in (
            ("anytime_queue", "Requests that wait for a stage.", lambda: load().waiting),
            ("anytime_running", "Requests whose stage runs.", lambda: load().running),
            ("anytime_in_flight", "Requests that are being read, run or answered.", in_flight),
        ):
            Gauge(name, text, registry=mine).set_function(value)
        self._tracer = _tracer()

    def request(self, endpoint: str, outcome: str, seconds: float) -> None:
        """Note a request; `outcome` is `answered`, `disconnected`, or the code of a problem."""
        key = endpoint, outcome
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._seconds.labels(endpoint, outcome)
        known.observe(seconds)

    def answer(self, answer: Answer) -> None:
        """Note an answer."""
        self._exits[answer.last_exit].inc()
        if answer.deadline_met is False:
            self._misses.inc()
        self._collapses.inc(int(answer.fell_back.numpy().sum()))

    def stage(self, report: StageReport) -> None:
        """Note a stage, in the thread that ran it."""
        self._batch.observe(report.batch)
        self._stages[report.stage - 1].observe(report.seconds)
        if self._tracer is not None:
            end = time.time_ns()
            span = self._tracer.start_span(
                "stage",
                start_time=end - round(1e9 * report.seconds),
                attributes={"stage": report.stage, "batch": report.batch, "waiting": report.waiting},
            )
            span.end(end)

    def text(self) -> bytes:
        """All of them, in Prometheus's format."""
        return generate_latest(self._registry)


def _tracer() -> Any:
    """The tracer of OpenTelemetry, or None; without its SDK spans cost microseconds and go nowhere."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("anytime.serve")
