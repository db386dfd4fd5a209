"""Logs as one JSON object per line, on stderr."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import orjson

NAMES = ("anytime.serve", "uvicorn.error")
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JSONFormatter(logging.Formatter):
    """A record as JSON, with the members of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(document, default=str).decode()


def set_up(level: str = "info") -> None:
    """Send the logs of the server to stderr, from a level on; `debug` has one line per request."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter())
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        # uvicorn logs every malformed request as a warning: somebody else's bytes must not fill the disk.
        logger.setLevel(level.upper() if name == NAMES[0] else logging.ERROR)
