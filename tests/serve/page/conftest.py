"""A real browser for the page, where one is installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anytime.artifacts import seal
from anytime.data.text import collect_vocabulary, save_tokenizer
from anytime.models import create, save

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--js-flags=--expose-gc",
]
PATIENCE = 120_000
"""Milliseconds to wait for a condition on a busy machine."""


def _long_deadlines(route: Any) -> None:
    """Let the page offer the longest deadlines of the server, not those of a model that runs alone on this machine."""
    answer = route.fetch(timeout=PATIENCE)
    if not answer.ok:
        return route.fulfill(response=answer)
    info = answer.json()
    info["milliseconds"][-1] = info["longest_ms"]
    return route.fulfill(response=answer, json=info)


@pytest.fixture(scope="module")  # not longer: it leaves an event loop running in this thread
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
    if PROGRAM is None:
        pytest.skip("there is no Chromium on the path: apt install chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=PROGRAM, args=ARGUMENTS, timeout=PATIENCE)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address: `open_page(url, width=320)`. Errors in the page fail the test."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open(url: str, *, width: int = 1280, ready: bool = True, motion: str = "reduce", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion=motion, **options)
        context.set_default_timeout(PATIENCE)
        context.route("**/page/info", _long_deadlines)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None)
        page.goto(url)
        if ready:
            page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open
    for context in contexts:
        context.close()
    assert not errors


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A run of an untrained text model with six classes."""
    pytest.importorskip("tokenizers", reason="texts need the extra text")
    tokenizer = collect_vocabulary(["my card was stolen", "what is my balance"], size=60)
    save(create("encoder-tiny", classes=6, vocabulary=len(tokenizer.vocabulary)).eval(), tmp_path / "model")
    settings = save_tokenizer(tmp_path, tokenizer, length=8)
    words = [f"intent {number}" for number in range(6)]
    (tmp_path / "data.json").write_text(json.dumps({"name": "bank", "mean": [], "std": [], "class_names": words, **settings}))
    seal(tmp_path, ["data.json", "vocab.txt"], kind="run")
    return tmp_path


@pytest.fixture(scope="session")
def axe() -> str:
    return (Path(__file__).parent / "axe-core" / "axe.min.js").read_text()
