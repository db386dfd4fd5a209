"""What the page asks the server: limits, traffic, the report card, and the files themselves. No browser is needed."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.cli import run
from anytime.combine import Prediction
from anytime.errors import FormatError, IntegrityError, MissingFileError, OptionError
from anytime.models import MLP, MLPConfig
from anytime.page import index, is_page, make_page, script_files, style, write_page
from anytime.page.assets import MODULES, joined_script
from anytime.page.card import increasing
from anytime.page.recorded import choose_rows, cifar100, class_names
from anytime.page.simulated import simulated_load
from anytime.policy import Confidence
from anytime.run import Answer
from anytime.serve import open_service
from anytime.serve.page.examples import read_examples
from anytime.serve.page.thinking import Thinking
from anytime.serve.page.traffic import Counts, Settings, draw

STATIC = Path(__file__).parents[3] / "src" / "anytime" / "page" / "static"


@pytest.fixture(scope="module")
def demo(running: Any, open_folder: Any) -> Iterator[Any]:
    with running(open_folder(), demo=True) as live:
        yield live


def events(text: str) -> list[tuple[int, str, Any]]:
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
    return [(int(block["id"]), block["event"], json.loads(block["data"])) for block in blocks]


# The files.


def test_the_files_are_small() -> None:
    first_paint = len(index()) + len(style()) + sum(map(len, script_files().values()))
    assert first_paint < 100_000
    assert len(make_page().encode()) < 200_000
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 300_000


def test_the_joined_script_defines_every_name_once() -> None:
    assert {path.stem for path in STATIC.glob("*.js")} == set(MODULES)
    names = re.findall(r"^(?:const|let|class|(?:async )?function) (\w+)", joined_script(), re.MULTILINE)
    assert len(names) == len(set(names))
    assert not re.search(r"^(import|export) ", joined_script(), re.MULTILINE)
    for place, name in enumerate(MODULES):  # each comes after those that it imports
        imported = re.findall(r'from "\./(\w+)\.js"', (STATIC / f"{name}.js").read_text())
        assert set(imported) <= set(MODULES[:place])


def test_no_file_sets_html_or_loads_from_elsewhere() -> None:
    for path in STATIC.iterdir():
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"\sstyle=|\son\w+=\"", text), path


def test_the_page_is_served_with_a_strict_policy(demo: Any) -> None:
    response = demo.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for address, kind in (("page/page.css", "text/css"), ("page/main.js", "text/javascript")):
        assert f'"{address}"' in response.text
        assert demo.get(f"/{address}").headers["content-type"].startswith(kind)


def test_the_file_of_the_demo_is_recognised_and_has_hashes() -> None:
    page = make_page(report="report.html")
    assert is_page(page.encode()[:512])
    assert not is_page(b"<!doctype html><title>mine</title>")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)', page)[1]  # type: ignore[index]
    assert policy.count("sha256-") == 2
    assert "unsafe" not in policy
    assert page.count("<script") == 2


# The recorded answers.


def test_recorded_answers_are_those_of_the_rules() -> None:
    source = cifar100()
    document = source.document()
    assert len(class_names()) == 100
    product = source.rules["product"](source.logits)
    for example in document["examples"]:
        row, bars = example["id"], example["bars"]
        assert example["label"] in bars
        torch.testing.assert_close(
            torch.tensor(example["p"]["product"]), product.probs[:, row, bars], atol=1e-4, rtol=0, check_dtype=False
        )
        assert example["answers"]["product"] == product.labels[:, row].tolist()
    drops = [example["drop"] for example in document["examples"]]
    assert max(drops) > 0.9


def test_the_rows_with_the_largest_drops_are_among_the_examples() -> None:
    drops = torch.linspace(0, 1, 200)
    assert set(range(184, 200)) <= set(choose_rows(drops))
    assert len(choose_rows(torch.zeros(200))) == 24
    assert choose_rows(torch.zeros(3)) == [2, 0, 1] or sorted(choose_rows(torch.zeros(3))) == [0, 1, 2]


def test_costs_increase_whatever_the_clock_said() -> None:
    found = increasing([0.0, 2.0, 2.0, 1.0])
    assert all(one < other for one, other in pairwise(found))


def test_simulated_systems_get_the_same_requests() -> None:
    load = simulated_load()
    for by_deadline in load["runs"]:
        for systems in by_deadline:
            sent = {name: [slice[0] for slice in slices] for name, slices in systems.items()}
            assert sent["anytime"] == sent["all_exits"]
    total = {
        name: np.sum([slices for by in load["runs"] for each in by for key, slices in each.items() if key == name], (0, 1))
        for name in ("anytime", "all_exits")
    }
    assert total["anytime"][4] > total["all_exits"][4]  # more correct answers in time


# One input.


def test_one_event_per_exit_with_both_rules(demo: Any, offline: Any, digits: Any) -> None:
    response = demo.post("/page/think?source=digits&row=3&deadline=30s")
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, end = events(response.text)
    assert end[1] == "end"
    assert [number for number, _, _ in found] == [1, 2, 3, 4, 5]
    for number, _, data in found:
        assert set(data["rules"]) == {"latest", "product"}
        assert data["rules"]["product"]["label"] == int(offline.labels[number - 1, 3])
        values = dict(data["rules"]["product"]["bars"])
        assert values[data["rules"]["product"]["label"]] == pytest.approx(float(offline.confidence[number - 1, 3]), abs=1e-3)
        assert data["rules"]["product"]["set"][0] == len(data["rules"]["product"]["set"][1])
    assert found[-1][2]["reason"] == "finished"


def test_mistakes_of_a_request_are_said(demo: Any) -> None:
    for query, status in (
        ("source=digits&row=999", 404),
        ("source=digits&row=-1", 404),
        ("source=other&row=1", 404),
        ("source=digits&row=1&deadline=5", 400),
        ("source=digits&row=1&deadline=x", 400),
        ("source=digits&row=1&deadline=1000s", 400),
        ("source=digits&row=1&deadline=1us", 422),
    ):
        assert demo.post(f"/page/think?{query}").status_code == status, query
    assert demo.post("/page/think", content=b"x", headers={"content-type": "text/plain"}).status_code == 415
    assert demo.post("/page/think", content=b"x", headers={"content-type": "image/png"}).status_code in (400, 415)
    assert demo.post("/page/think", json={"input": [1, 2]}).status_code == 400
    assert demo.get("/page/source/nowhere").status_code == 404
    assert demo.get("/page/image/0").status_code == 404
    assert demo.get("/page/secrets.js").status_code == 404
    assert demo.get("/page/../main.js").status_code == 404


def test_streams_are_limited(serving: Any) -> None:
    from anytime.serve import Limits

    live = serving(limits=Limits(streams=1), demo=True)
    live.post("/page/load?rate=10&deadline=100ms&seconds=20")
    with live.client.stream("GET", "/page/load"):
        assert live.post("/page/think?source=digits&row=1").status_code == 429
    live.post("/page/load/stop")


def test_the_checks_of_the_server_hold_for_the_page(demo: Any) -> None:
    for path in ("/", "/page/main.js", "/page/info"):
        assert demo.get(path, headers={"host": "evil.example"}).status_code == 400
    for path in ("/page/load", "/page/think?source=digits&row=1"):
        assert demo.post(path, headers={"origin": "http://evil.example"}).status_code == 403


# Traffic.


def test_there_is_no_traffic_without_demo_mode(serving: Any) -> None:
    live = serving()
    assert live.get("/page/info").json()["demo"] is False
    for method, path in (("GET", "/page/load"), ("POST", "/page/load"), ("POST", "/page/load/stop")):
        response = live.request(method, path)
        assert (response.status_code, response.json()["code"]) == (403, "not_a_demo")


@pytest.mark.parametrize("query", ["rate=0", "rate=1e9", "rate=nan", "rate=x", "deadline=10s", "deadline=1us", "seconds=3600"])
def test_traffic_is_bounded(query: str, demo: Any) -> None:
    assert demo.post(f"/page/load?{query}").status_code == 400
    with pytest.raises(OptionError):
        Settings(1e9, 0.02)


def test_both_systems_get_the_same_requests_and_a_reader_can_go_on(demo: Any) -> None:
    after = demo.post("/page/load?rate=40&deadline=400ms&seconds=3").json()["after"]
    found = events(demo.get("/page/load", headers={"last-event-id": str(after)}).text)
    slices = [data for _, name, data in found if name == "slice"]
    assert slices
    assert found[-1][1] == "end"
    for data in slices:
        assert data["anytime"]["sent"] == data["all_exits"]["sent"]
        for counts in (data["anytime"], data["all_exits"]):
            assert counts["in_time"] + counts["refused"] <= counts["sent"]
            assert counts["correct"] <= counts["in_time"]
        assert data["all_exits"]["exits"] == 5 * data["all_exits"]["in_time"]
    first = found[0][0]
    again = events(demo.get("/page/load", headers={"last-event-id": str(first)}).text)
    assert [number for number, name, _ in again if name == "slice"] == [
        number for number, name, _ in found[1:] if name == "slice"
    ]
    assert events(demo.get("/page/load", headers={"last-event-id": "9" * 15}).text)[-1][1] == "end"


def test_traffic_stops_when_nobody_watches(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytime.serve.page import traffic

    monkeypatch.setattr(traffic, "_UNWATCHED", 0.5)
    idle = demo.tasks()
    demo.post("/page/load?rate=10&deadline=100ms&seconds=60")
    assert demo.tasks() > idle
    demo.wait_until_idle(idle, seconds=50)


def test_arrivals_are_a_poisson_process() -> None:
    chance = np.random.default_rng(0)
    counts = []
    for _ in range(400):
        arrivals, rows = draw(chance, 100, 7)
        assert arrivals == sorted(arrivals)
        assert len(rows) == len(arrivals)
        assert all(0 <= row < 7 for row in rows)
        counts.append(len(arrivals))
    assert np.mean(counts) == pytest.approx(50, abs=3)
    assert np.var(counts) == pytest.approx(50, abs=15)


def test_late_and_refused_requests_are_not_correct() -> None:
    answers = {"exit": 2, "exits": 5, "elapsed": 0.1, "reason": "deadline"}
    given = Prediction(torch.tensor([[0.2, 0.8]]).log(), torch.tensor([False]))
    counts = Counts()
    counts.note(None, 1)
    counts.note(Answer(given, deadline_met=False, **answers), 1)  # type: ignore[arg-type]
    assert counts == Counts(sent=2, refused=1)
    counts.note(Answer(given, deadline_met=True, **answers), 1)  # type: ignore[arg-type]
    counts.note(Answer(given, deadline_met=True, **answers), 0)  # type: ignore[arg-type]
    assert counts == Counts(sent=4, in_time=2, refused=1, exits=4, correct=1)
    unlabelled = Counts(correct=None)
    unlabelled.note(Answer(given, deadline_met=True, **answers), None)  # type: ignore[arg-type]
    assert unlabelled.correct is None


def test_a_server_that_ends_ends_its_traffic(running: Any, open_folder: Any) -> None:
    with running(open_folder(), demo=True) as live:
        live.post("/page/load?rate=10&deadline=100ms&seconds=60")
        with live.client.stream("GET", "/page/load") as response:
            lines = response.iter_lines()
            assert next(lines).startswith("id:")
            live.server.should_exit = True
            assert list(lines)  # it is closed from the other side, long before the traffic would have ended


# The report card.


def test_the_card_is_of_the_requests_of_others(serving: Any, request_of: Any, digits: Any) -> None:
    live = serving()
    live.post("/v2/models/digits/infer", json=request_of(digits[0][:1]))
    assert live.get("/page/model").json()["inputs"] == 0  # nobody had looked at the page
    assert live.get("/page/report").status_code == 404
    until = time.monotonic() + 120
    while not (found := live.get("/page/model").json())["inputs"]:
        assert time.monotonic() < until
        live.post("/v2/models/digits/infer", json=request_of(digits[0][:1]))
        time.sleep(0.1)
    assert [each["name"] for each in found["properties"]] == ["Interruptible", "Monotone", "Consistent", "Diminishing returns"]
    assert {mark["rule"] for each in found["properties"] for mark in each["marks"]} == {"latest", "product"}
    assert "without labels" in live.get("/page/report").text


def test_a_server_with_another_rule_compares_that_one(running: Any, open_folder: Any) -> None:
    for rule, names in (("caching", ["latest", "caching"]), ("latest", ["latest", "product"])):
        with running(open_folder(rule=rule)) as live:
            assert live.get("/page/info").json()["rules"] == names
            found = events(live.post("/page/think?source=digits&row=1&deadline=30s").text)
            assert set(found[0][2]["rules"]) == set(names)


# A folder of images.


def test_images_of_a_folder_are_examples(running: Any, open_folder: Any, digits: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    service = open_folder()
    for row, name in enumerate(("7/one.png", "7/two.png", "other/three.png", "four.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.fromarray(digits[1][row, 0].numpy()).save(tmp_path / name)
    found = read_examples(tmp_path, service.opened)
    assert {name: found.label(row) for row, name in enumerate(found.names or ())} == {
        "one.png": 7,
        "two.png": 7,
        "three.png": None,
        "four.png": None,
    }
    with running(service, examples=tmp_path) as live:
        assert live.get("/page/info").json()["sources"] == ["digits", "images", "cifar100"]
        listed = live.get("/page/source/images").json()["examples"]
        assert {each["name"] for each in listed} == {"one.png", "two.png", "three.png", "four.png"}
        response = live.get("/page/image/0")
        assert response.headers["content-type"] == "image/png"
        assert response.content == (found.files or [])[0].read_bytes()
        assert events(live.post("/page/think?source=images&row=0&deadline=30s").text)[-1][1] == "end"
        assert live.get("/page/image/4").status_code == 404


def test_a_folder_without_images_is_refused(open_folder: Any, tmp_path: Path) -> None:
    service = open_folder()
    with pytest.raises(MissingFileError):
        read_examples(tmp_path / "nowhere", service.opened)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FormatError):
        read_examples(tmp_path, service.opened)
    pytest.importorskip("PIL", reason="images need Pillow")
    (tmp_path / "broken.png").write_bytes(gzip.compress(b"x"))
    with pytest.raises(IntegrityError):
        read_examples(tmp_path, service.opened)
    service.runner.close()


# The demo.


def test_the_demo_evaluates_the_sample_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from functools import partial

    from anytime.train import digits as training

    monkeypatch.setattr(training, "train_digits", partial(training.train_digits, epochs=1))
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    assert run(["demo", "--out", str(tmp_path / "out"), "--page", str(mine)]) == 2  # before the work begins
    assert mine.read_text() == "mine"
    assert run(["demo", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert re.search(r"2\d % of inputs lose 0\.5 or more.*Product reduces this to 0 %", told.out)
    page = tmp_path / "out" / "page.html"
    assert told.out.rstrip().endswith(f"open {page} in a browser.")
    assert '"report":"report.html"' in page.read_text()
    write_page(tmp_path / "think.html", report=tmp_path / "out" / "report.html")
    assert '"report":"out/report.html"' in (tmp_path / "think.html").read_text()


# Other models.


def test_a_text_model_takes_a_text(text_folder: Path, serving: Any, open_folder: Any) -> None:
    live = serving(open_folder(text_folder, name="bank"), demo=True)
    info = live.get("/page/info").json()
    assert (info["texts"], info["images"], info["sources"]) == (True, False, ["cifar100"])
    plain = {"content-type": "text/plain"}
    found = events(live.post("/page/think?deadline=30s", content=b"what is my card", headers=plain).text)
    assert found[-2][2]["reason"] == "finished"
    live.post("/page/load?rate=5&deadline=400ms&seconds=1")  # random inputs, without labels
    assert events(live.get("/page/load").text)[0][2]["anytime"]["correct"] is None


def test_exported_stages_have_one_rule_and_no_card(tmp_path: Path, serving: Any, open_folder: Any) -> None:
    pytest.importorskip("onnxruntime", reason="exported stages need ONNX Runtime")
    from anytime.models import create, save

    save(create("mlp-toy", classes=5, exits=3).eval(), tmp_path / "model")
    assert run(["export", str(tmp_path / "model"), "--out", str(tmp_path / "stages"), "--rule", "product"]) == 0
    live = serving(open_folder(tmp_path / "stages", engine="auto"), demo=True)
    assert live.get("/page/info").json()["rules"] == ["product"]
    found = events(live.post("/page/think?deadline=30s", json={"input": [[0.5, 1.0]]}).text)
    assert set(found[0][2]["rules"]) == {"product"}
    assert live.get("/page/model").json()["inside"] is True
    live.post("/page/load?rate=5&deadline=400ms&seconds=1")
    assert events(live.get("/page/load").text)[-1][1] == "end"


def test_under_a_policy_only_the_server_s_own_answers_are_shown(tmp_path: Path) -> None:
    anytime.save(MLP(MLPConfig(classes=6, exits=3)).eval(), tmp_path / "model", rule="product", policy=Confidence(0.4))
    service = open_service(tmp_path / "model", deadline=1.0, longest=10.0)
    try:
        shown = Thinking(service)
        assert (list(shown.rules), shown.own, shown.inside) == (["product"], "product", True)
        shown.close()
    finally:
        service.runner.close()
