"""Every refusal in one shape: `{"error": ..., "code": ..., "expected": ..., "fix": ...}`, without internals.

`error` is the member that clients of the Open Inference Protocol read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from anytime.errors import AnytimeError, DeadlineTooShort, MissingExtraError, Overloaded, StateError
from anytime.safe_text import printable

_SHOWN = 300
"""Characters of a request's own text that an answer repeats."""


class Problem(Exception):  # noqa: N818 - an answer, of which some are nobody's error
    """A request that gets a status other than 200.

    Args:
        status: The HTTP status.
        code: What a program can test for.
        error: What was wrong.
        expected: What would have been accepted.
        fix: What the caller can do.
        headers: Further headers.
        more: Further members of the document.
    """

    def __init__(
        self,
        status: int,
        code: str,
        error: str,
        *,
        expected: str = "",
        fix: str = "",
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(error)
        self.status, self.code, self.headers = status, code, dict(headers or {})
        texts = {"error": error, "code": code, "expected": expected, "fix": fix}
        self.document = {name: printable(text[:_SHOWN]) for name, text in texts.items() if text} | more

    def body(self) -> bytes:
        """The document as JSON."""
        return orjson.dumps(self.document)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it, as an ASGI application."""
        body = self.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **self.headers}
        coded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": coded})
        await send({"type": "http.response.body", "body": body})


def closing(problem: Problem) -> Problem:
    """The same, and the connection is closed afterwards: the rest of the request is not read."""
    problem.headers["connection"] = "close"
    return problem


def overloaded(seconds: float, *, error: str, fix: str) -> Problem:
    """Status 429, with the time after which a new attempt makes sense."""
    milliseconds = max(1, math.ceil(1e3 * min(seconds, 3600.0)))
    headers = {"retry-after": str(math.ceil(milliseconds / 1e3)), "retry-after-ms": str(milliseconds)}
    expected = f"fewer requests at once, or a new attempt after {milliseconds} ms"
    return Problem(429, "overloaded", error, expected=expected, fix=fix, headers=headers, retry_after_ms=milliseconds)


def problem_of(error: AnytimeError, *, time: str = "the parameter timeout, in microseconds") -> Problem:
    """The answer to an error of this library; `time` says how a request asks for more."""
    if isinstance(error, Overloaded):
        fix = f"wait for Retry-After, or allow more time with {time}"
        return overloaded(error.retry_after, error="the first exit does not fit behind the requests admitted before", fix=fix)
    if isinstance(error, DeadlineTooShort):
        return Problem(
            422,
            "deadline_too_short",
            f"not even the first exit fits into {1e3 * error.budget:.3g} ms",
            expected=f"about {1e3 * error.forecast:.3g} ms or more",
            fix=f"allow more time with {time}",
            forecast_us=round(1e6 * error.forecast),
        )
    if isinstance(error, MissingExtraError):
        return Problem(415, "not_installed", error.got, expected=error.expected, fix="ask the operator to install it")
    if isinstance(error, StateError):
        return Problem(503, "closed", "the server is shutting down", fix="try another replica, or later")
    return Problem(400, "invalid_request", error.got, expected=error.expected, fix=error.fix)
