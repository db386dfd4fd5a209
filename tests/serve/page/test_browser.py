"""The page in a real browser: every control, all views, lost connections, widths, keyboard, accessibility, policy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from anytime.page.assets import single_file
from anytime.page.file import recorded_document

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.timeout(900)]
TOKEN = "correct-horse-battery-staple"
ENDED = "^(?!Press|Running|The connection).*[^…]$"
"""The status of a run that has ended, at whatever exit was in time."""
VIEWS = ("think", "load", "model")
HOSTILE = ("<script>window.hacked=1</script>", "<img src=x onerror='window.hacked=1'>", *"23456789")


@pytest.fixture(scope="module")
def demo(browser: Any, running: Any, open_folder: Any) -> Iterator[Any]:
    """A server in demo mode."""
    with running(open_folder(), demo=True) as live:
        yield live


@pytest.fixture(scope="module")
def document(browser: Any) -> dict[str, Any]:
    """What the page shows without a server."""
    return recorded_document(link="report.html")


@pytest.fixture(scope="module")
def file(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as one file."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(single_file(document))
    return path.as_uri()


def says(page: Any, id: str, pattern: str) -> None:
    page.wait_for_function(
        "([id, pattern]) => new RegExp(pattern).test(document.getElementById(id).textContent)", arg=[id, pattern]
    )


def run_one(page: Any, exits: int = 5, press: str = "#go") -> None:
    page.click(press)
    says(page, "think-status", ENDED)
    assert re.match(f"Exit {exits} of {exits} .*all exits", page.inner_text("#think-status"))


def test_one_input_with_every_control(demo: Any, open_page: Any, digits: Any, tmp_path: Path) -> None:
    page = open_page(demo.url)
    assert page.locator("#thumbs button").count() >= 24
    page.locator("#thumbs button").nth(3).click()
    assert page.locator("#thumbs button").nth(3).get_attribute("aria-pressed") == "true"
    run_one(page)
    assert page.locator("#rules article").count() == 2
    assert page.locator("#rules h2").all_inner_texts() == ["Latest", "Product"]
    assert page.locator("#rules article").nth(1).locator(".bars li").count() == 10
    assert page.locator("#stages tbody tr").count() == 5
    assert "Prediction set of" in page.inner_text("#rules article:nth-child(2) .set")
    assert "Now: Latest" in page.get_attribute("#trajectory svg", "aria-label")
    assert page.locator("#trajectory .line").nth(1).get_attribute("points").count(",") == 5

    run_one(page, press="#worse")  # the largest drop of the label's probability under the latest exit
    line = page.locator("#trajectory .line").first.get_attribute("points").split()
    heights = [float(point.split(",")[1]) for point in line]
    assert max(later - earlier for place, earlier in enumerate(heights) for later in heights[place:]) > 30

    page.fill("#deadline", "0")
    assert page.get_attribute("#deadline", "aria-valuetext") == page.inner_text("#deadline-value")
    page.click("#go")
    says(page, "think-status", "not even the first exit|^Exit [1-5] of 5")

    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    path = tmp_path / "digit.png"
    image.fromarray(digits[1][0, 0].numpy()).save(path)
    page.fill("#deadline", "1000")
    page.set_input_files("#image", path)
    page.wait_for_selector("#preview img")
    run_one(page)
    assert "the answer" in page.inner_text("#trajectory-title")
    data = path.read_bytes().hex()
    page.evaluate(
        """(hex) => { const bytes = Uint8Array.from(hex.match(/../g), (each) => parseInt(each, 16)), data = new DataTransfer();
        data.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
        const options = { dataTransfer: data, bubbles: true, cancelable: true };
        const place = document.getElementById("drop");
        for (const kind of ["dragover", "drop"]) place.dispatchEvent(new DragEvent(kind, options)); }""",
        data,
    )
    says(page, "think-status", "^Press Go")
    run_one(page)

    page.select_option("#source", "cifar100")
    says(page, "source-note", "MSDNet")
    page.select_option("#example", "5")
    run_one(page, 7)
    run_one(page, 7, press="#worse")
    assert page.locator("#stages thead th").count() == 7


def test_a_text_is_typed_for_a_text_model(text_folder: Path, serving: Any, open_folder: Any, open_page: Any) -> None:
    page = open_page(serving(open_folder(text_folder, name="bank")).url)
    assert page.locator("#image-field").is_hidden()
    assert page.locator("#load-go").is_disabled()  # not in demo mode
    longest = page.inner_text("#deadline-value")
    page.fill("#text", "what is my card")
    assert page.inner_text("#deadline-value") != longest  # this model's times, not the recorded one's
    run_one(page, 3)
    assert page.locator("#rules article").first.locator(".bars .name").all_inner_texts()[0] == "intent 0"


def test_bars_grow_exit_by_exit(demo: Any, open_page: Any) -> None:
    page = open_page(demo.url, motion="no-preference")
    page.evaluate(
        """() => { window.seen = []; const table = document.getElementById("stages");
        const watch = new MutationObserver(() => window.seen.push(table.querySelectorAll("tbody tr").length));
        watch.observe(table, { childList: true }); }"""
    )
    run_one(page)
    assert sorted(set(page.evaluate("window.seen")) - {0}) == [1, 2, 3, 4, 5]
    assert "Shown slower" in page.inner_text("#think-status")


def test_load_with_every_control_and_a_lost_connection(demo: Any, open_page: Any) -> None:
    page = open_page(demo.url)
    page.click("#tab-load")
    page.fill("#rate", "300")
    page.fill("#load-deadline", "900")
    page.click("#load-go")

    def requests() -> list[int]:
        return [int(text) for text in page.locator("#totals tbody td:nth-child(2)").all_inner_texts()]

    def more_than(count: int) -> None:
        page.wait_for_function("(count) => Number(document.querySelector('#totals tbody td')?.textContent) > count", arg=count)

    more_than(0)
    page.fill("#rate", "400")
    before = requests()
    assert before[0] == before[1]  # the same traffic through both

    async def cut() -> None:
        for connection in list(demo.server.server_state.connections):
            connection.transport.abort()

    asyncio.run_coroutine_threadsafe(cut(), demo.loop[0]).result(60)
    more_than(requests()[0])  # it has connected again, and goes on where it was
    assert page.locator("#charts svg").count() == 4
    assert "anytime" in page.locator("#charts svg").first.get_attribute("aria-label")
    page.click("#load-go")
    says(page, "load-status", "Stopped")
    assert page.inner_text("#load-go") == "Start"


def test_my_model_grades_the_traffic_and_links_to_a_report(demo: Any, open_page: Any) -> None:
    page = open_page(f"{demo.url}/#model")
    page.click("#model-traffic")
    page.wait_for_selector("#cards .property")
    assert page.locator("#cards .property h3").all_inner_texts() == [
        "Interruptible",
        "Monotone",
        "Consistent",
        "Diminishing returns",
    ]
    assert page.locator("#cards .chip").count() == 8
    address = page.get_attribute("#report", "href")
    assert "digits: requests of this server" in httpx.get(f"{demo.url}/{address}", timeout=120).text


def test_every_view_fits_every_width(demo: Any, file: str, open_page: Any) -> None:
    for url in (demo.url, file):
        page = open_page(url, width=320)
        page.click("#worse")
        says(page, "think-status", "^Exit")
        for view, width in product(VIEWS, (320, 480, 768, 1024, 1440, 1920)):
            page.set_viewport_size({"width": width, "height": 900})
            page.click(f"#tab-{view}")
            found = page.evaluate(
                """() => [document.documentElement.scrollWidth,
                [...document.querySelectorAll("button, select, input, output, svg")]
                .filter((each) => each.checkVisibility() && !each.closest(".scroll"))
                .flatMap((each) => { const box = each.getBoundingClientRect(); return [box.left, box.right]; })]"""
            )
            assert found[0] <= width, (url, view)
            assert found[1]
            assert all(0 <= edge <= width for edge in found[1]), (url, view, width)


def test_keyboard_alone(demo: Any, open_page: Any) -> None:
    page = open_page(demo.url)

    def focus_reaches(id: str) -> None:
        for _ in range(80):
            if page.evaluate("document.activeElement.id") == id:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {id}")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    focus_reaches("source")
    focus_reaches("deadline")
    page.keyboard.press("Home")
    lowest = page.inner_text("#deadline-value")
    page.keyboard.press("End")
    assert page.inner_text("#deadline-value") != lowest
    focus_reaches("go")
    page.keyboard.press("Enter")
    says(page, "think-status", ENDED)
    focus_reaches("worse")
    page.keyboard.press("Space")
    says(page, "think-status", ENDED)
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    focus_reaches("tab-think")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-load"
    focus_reaches("load-go")
    page.keyboard.press("Enter")
    says(page, "load-status", "Running")
    page.keyboard.press("Enter")
    says(page, "load-status", "Stopped")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "load-deadline"
    page.focus("#tab-load")
    page.keyboard.press("End")
    assert page.locator("#view-model").is_visible()
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(scheme: str, demo: Any, file: str, open_page: Any, axe: str) -> None:
    page = open_page(demo.url if scheme == "light" else file, color_scheme=scheme)
    page.evaluate(axe)
    page.click("#worse")
    says(page, "think-status", ENDED)
    for view in VIEWS:
        page.click(f"#tab-{view}")
        if view == "model" and scheme == "dark":
            page.wait_for_selector("#cards .property")
        found = page.evaluate("axe.run()")["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, [(each["id"], [node["html"] for node in each["nodes"]]) for each in serious]


def test_the_policy_refuses_inline_scripts_and_html_from_strings(demo: Any, file: str, browser: Any) -> None:
    for url in (demo.url, file):
        with opened(browser, url) as page:
            refused = page.evaluate(
                """async () => {
                const outcomes = [], violations = [];
                document.addEventListener("securitypolicyviolation", (event) => violations.push(event.effectiveDirective));
                try { document.body.innerHTML = "<b>x</b>"; } catch { outcomes.push("html"); }
                const policy = trustedTypes.createPolicy("test", { createScript: (given) => given });
                const text = policy.createScript("window.hacked = 1");
                const made = document.createElement("script");
                made.text = text;
                document.body.append(made);
                const button = document.createElement("button");
                try { button.setAttribute("onclick", "window.hacked = 1"); button.click(); } catch { outcomes.push("handler"); }
                try { await fetch("https://example.org/"); } catch { outcomes.push("fetch"); }
                await new Promise((resolve) => setTimeout(resolve, 50));
                return { outcomes, violations, hacked: window.hacked ?? null };
                }"""
            )
            assert refused["hacked"] is None
            assert {"html", "fetch"} <= set(refused["outcomes"])
            assert {"require-trusted-types-for", "connect-src"} <= set(refused["violations"])
            assert any(each.startswith("script-src") for each in refused["violations"])


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """A page whose violations of the policy are expected."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    yield page
    context.close()


def test_hostile_class_names_are_text(
    document: dict[str, Any], running: Any, open_folder: Any, open_page: Any, tmp_path: Path
) -> None:
    service = open_folder()
    data = replace(service.opened.data, class_names=HOSTILE)
    file = tmp_path / "page.html"
    source = {**document["sources"][1], "classes": HOSTILE, "title": "</script><script>window.hacked=1</script>"}
    file.write_text(single_file({**document, "sources": [source]}))
    with running(replace(service, opened=replace(service.opened, data=data))) as live:
        for url in (live.url, file.as_uri()):
            page = open_page(url)
            run_one(page)
            names = page.locator("#rules article").first.locator(".bars .name").all_inner_texts()
            assert names[0].startswith(HOSTILE[0])
            assert names[1].startswith(HOSTILE[1])
            assert page.evaluate("window.hacked ?? null") is None


def test_a_token_is_asked_for_and_kept_in_memory_only(serving: Any, open_page: Any) -> None:
    live = serving(token=TOKEN, demo=True)
    page = open_page(live.url, ready=False)
    page.wait_for_selector("#token:focus")
    page.fill("#token", "wrong-token-wrong-token")
    page.keyboard.press("Enter")
    says(page, "token-error", "did not accept")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator("#token-form").is_hidden()
    run_one(page)
    page.click("#tab-load")
    page.click("#load-go")
    page.wait_for_function("() => Number(document.querySelector('#totals tbody td').textContent) > 0")
    page.click("#load-go")
    page.click("#tab-model")
    page.wait_for_selector("#cards .property")
    with page.expect_download() as saved:
        page.click("#report")
    assert "requests of this server" in Path(saved.value.path()).read_text()
    stored = page.evaluate(
        "JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, document.body.innerHTML])"
    )
    assert TOKEN not in stored


def test_the_file_works_from_disk_without_a_server(file: str, open_page: Any) -> None:
    page = open_page(file, offline=True)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    for source, exits in (("cifar100", 7), ("digits", 5)):
        page.select_option("#source", source)
        run_one(page, exits)
        page.click("#worse")
        says(page, "think-status", f"^Exit {exits} of {exits}")
    page.fill("#deadline", "0")
    page.click("#go")
    says(page, "think-status", "not even the first exit")
    page.click("#tab-load")
    page.click("#load-go")
    page.wait_for_function("() => Number(document.querySelector('#totals tbody td').textContent) > 100")
    page.fill("#rate", "1000")
    page.click("#load-go")
    page.click("#tab-model")
    assert page.locator("#cards .property").count() == 8
    assert page.get_attribute("#report", "href") == "report.html"
    assert not [url for url in loaded if not re.match("file:|blob:|data:", url)]


@pytest.mark.long
def test_a_minute_of_load_does_not_grow_the_page(demo: Any, open_page: Any) -> None:
    """60 s at 300 requests per second; memory is compared after the first third, when every line is there."""
    page = open_page(demo.url)
    page.click("#tab-load")
    session = page.context.new_cdp_session(page)

    def measure() -> tuple[int, int]:
        page.evaluate("gc()")
        heap = session.send("Runtime.getHeapUsage")["usedSize"]
        return heap, session.send("Memory.getDOMCounters")["nodes"]

    page.click("#load-go")
    assert page.inner_text("#rate-value") == "300"
    found = []
    while page.inner_text("#load-go") == "Stop":
        page.wait_for_timeout(5000)
        found.append(measure())
    sent = [int(text) for text in page.locator("#totals tbody td:nth-child(2)").all_inner_texts()]
    print("requests", sent, "heap and nodes", found)
    assert sum(sent) > 60 * 300 / 3  # on a busy machine the slices take longer than half a second
    early, late = found[len(found) // 3], found[-1]
    assert late[0] < early[0] + 500_000
    assert late[1] < early[1] + 500
