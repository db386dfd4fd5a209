"""Take the pictures of the page for the README: `python docs/make_page_pictures.py`, with Chromium on the path.

They are of the page with recorded answers, so that they do not depend on how busy this machine is.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from anytime.artifacts import write_bytes
from anytime.page import write_page

FOLDER = Path(__file__).parent / "pictures"
SIZE = {"width": 1180, "height": 960}


def main() -> int:
    """Write both pictures."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("there is no Chromium on the path: apt install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        file = Path(folder) / "page.html"
        write_page(file)
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, reduced_motion="reduce")
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.click("#worse")
        page.wait_for_selector("#stages tbody tr:nth-child(7)")
        save(page, "page-one-input.png")
        page.click("#tab-load")
        page.click("#load-go")
        page.wait_for_function("() => Number(document.querySelector('#totals tbody td').textContent) > 4000")
        save(page, "page-under-load.png")
        browser.close()
    return 0


def save(page: Any, name: str) -> None:
    """A screenshot with few colours, which is a third of the size."""
    from PIL import Image

    with Image.open(io.BytesIO(page.screenshot())) as image:
        data = io.BytesIO()
        image.convert("RGB").quantize(128).save(data, "PNG", optimize=True)
    write_bytes(FOLDER / name, data.getvalue())


if __name__ == "__main__":
    sys.exit(main())
