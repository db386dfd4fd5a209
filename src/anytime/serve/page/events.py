"""Server-sent events with numbers, so that a reader that was cut off can go on after the last one it has."""

from __future__ import annotations

from typing import Any

import orjson

from anytime.serve.streams import EventStream


class NumberedEvents(EventStream):
    """Events as an asynchronous generator yields them: a number, a name and a document."""

    def encode(self, event: tuple[int, str, dict[str, Any]]) -> bytes:
        """An event as it is sent."""
        number, name, document = event
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, name.encode(), orjson.dumps(document))
