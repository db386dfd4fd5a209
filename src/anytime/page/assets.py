"""The files of the page: one document, one style sheet, and plain modules without a build step.

In one file the modules are joined: their imports are removed, so no two modules may define the same name at their top level
(a test checks it). Inline code then needs its hash in the content security policy.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from anytime.display.palette import variables
from anytime.report.pages.page import as_json

MODULES = ("dom", "draw", "events", "server", "recorded", "think", "load", "model", "main")
"""The modules, each after those that it imports."""
_RULES = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    f"frame-ancestors 'none'; {_RULES}"
)
"""The content security policy of the served page: nothing inline, nothing from elsewhere, no HTML from strings."""
_STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)


def index() -> bytes:
    """The document that a server sends."""
    return _read("index.html").encode()


def style() -> bytes:
    """The style sheet, with the colours of the report."""
    return (variables() + _read("page.css")).encode()


def script_files() -> Mapping[str, bytes]:
    """The modules by file name."""
    return {f"{name}.js": _read(f"{name}.js").encode() for name in MODULES}


def joined_script() -> str:
    """All modules as one."""
    return "".join(re.sub(r"^export ", "", _IMPORT.sub("", _read(f"{name}.js")), flags=re.MULTILINE) for name in MODULES)


def single_file(recorded: Mapping[str, Any]) -> str:
    """The page as one document that needs no server.

    Args:
        recorded: What `recorded.js` plays in place of a server's answers.
    """
    css, script = style().decode(), joined_script()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; img-src data: blob:; {_RULES}"
    page = _read("index.html")
    for old, new in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ('<link rel="stylesheet" href="page/page.css">', f"<style>{css}</style>"),
        (
            '<script type="module" src="page/main.js"></script>',
            f'<script type="application/json" id="recorded">{as_json(recorded)}</script>\n'
            f'<script type="module">{script}</script>',
        ),
    ):
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


@cache
def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
