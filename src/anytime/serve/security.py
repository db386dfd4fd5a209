"""Who may call: a server on the loopback interface answers this machine only; any other host needs a token.

The Host header is checked, so that a web page cannot reach a local server through a name that it controls (DNS rebinding), and
the Origin header, so that it cannot post to one either.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from anytime.errors import OptionError
from anytime.reading import read_file
from anytime.serve.problems import Problem, closing

VARIABLE = "ANYTIME_TOKEN"
_SHORTEST = 16
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
OPEN = frozenset({"/v2/health/live", "/v2/health/ready"})
"""Paths that need neither: probes of an orchestrator have no token and call by address."""


def read_token(file: Path | None) -> str | None:
    """The token from a file or from the environment; None without one."""
    if file is None:
        token = os.environ.get(VARIABLE, "")
        if not token:
            return None
    else:
        token = read_file(file, most=4096, expected="a token").decode("latin-1").strip()
    if len(token) < _SHORTEST or not (token.isascii() and token.isprintable()) or " " in token:
        raise OptionError(
            f"a token of {len(token)} characters",
            expected=f"at least {_SHORTEST} printable ASCII characters without spaces",
            fix="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, token: str | None, *, insecure: bool) -> None:
    """Refuse to listen to other machines without a token."""
    if not (is_loopback(host) or token or insecure):
        raise OptionError(
            f"--host is {host} and there is no token",
            expected=f"--token-file or {VARIABLE} for a host that other machines can reach",
            fix="add --token-file FILE, or --insecure if something else keeps strangers out",
        )


class Guard:
    """Checks the headers Host, Origin and Authorization before anything is read.

    Args:
        host: The address that the server listens to.
        allowed: Further names that the Host header may have; on a host other than loopback any name, if none is given.
        token: The token that every caller needs, if any.
        public: Paths that need no token.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        allowed: Sequence[str] = (),
        token: str | None = None,
        public: Collection[str] = (),
    ) -> None:
        self._public = public
        named = {*_LOCAL, host.lower(), f"[{host.lower()}]", *(name.lower() for name in allowed)}
        self._names = named if allowed or is_loopback(host) else None
        self._token = None if token is None else _digest(token.encode())

    def check(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Problem | None:
        """The answer 400, 401 or 403, if the request is to be refused; the connection is closed afterwards."""
        problem = None if path in OPEN else self._check(headers, path)
        return None if problem is None else closing(problem)

    def _check(self, headers: Sequence[tuple[bytes, bytes]], path: str) -> Problem | None:
        hosts = [value for name, value in headers if name == b"host"]
        if self._names is not None and (len(hosts) != 1 or _name(hosts[0]) not in self._names):
            return Problem(
                400,
                "wrong_host",
                "an unknown Host header",
                expected="the name of this server",
                fix="start it with --allowed-host",
            )
        origins = [value.rpartition(b"//")[2] for name, value in headers if name == b"origin"]
        if any(origin not in hosts for origin in origins):
            return Problem(403, "wrong_origin", "a request from another web page", fix="call the server from its own page")
        if self._token is None or path in self._public:
            return None
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests have one length, and the comparison takes the same time wherever they differ.
        if hmac.compare_digest(_digest(token.strip()), self._token) and scheme.lower() == b"bearer":
            return None
        more = {"www-authenticate": "Bearer"}
        return Problem(
            401,
            "no_token",
            "no valid token",
            expected="Authorization: Bearer TOKEN",
            fix="ask the operator for it",
            headers=more,
        )


def _name(host: bytes) -> str:
    """The name in a Host header, without the port."""
    text = host.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    return name if colon and (port.isdigit() or not port) and not name.endswith(":") else text


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
