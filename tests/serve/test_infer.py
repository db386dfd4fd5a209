"""Inference over HTTP: every answer is the rule's value at its exit."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from anytime.errors import DeadlineTooShort, Overloaded
from anytime.run import RunOptions

INFER = "/v2/models/digits/infer"


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block]


def numbers(response: dict[str, Any], name: str) -> np.ndarray:
    (found,) = [output for output in response["outputs"] if output["name"] == name]
    return np.array(found["data"]).reshape(found["shape"])


def test_metadata_follows_the_protocol(live: Any) -> None:
    with httpx.Client(base_url=live.url) as client:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready", "/v2/models/digits/versions/1/ready"):
            assert client.get(path).status_code == 200
        assert client.get("/v2").json()["extensions"] == ["binary_tensor_data", "infer_stream"]
        found = client.get("/v2/models/digits").json()
        assert found["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 16, 16]}]
        assert [output["name"] for output in found["outputs"]] == ["probabilities", "labels", "fell_back", "set"]
        assert found["parameters"]["exits_total"] == 5
        for path in ("/v2/models/other", "/v2/models/digits/versions/2"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize("exit", range(1, 6))
def test_each_exit_has_the_offline_value(exit: int, live: Any, digits: Any, offline: Any, request_of: Any) -> None:
    found = live.post(INFER, json=request_of(digits[0][:3], max_exit=exit, set=True)).json()
    assert found["parameters"]["exit"] == exit
    assert found["parameters"]["reason"] == ("exits" if exit < 5 else "finished")
    np.testing.assert_allclose(numbers(found, "probabilities"), offline.probs[exit - 1, :3], atol=1e-4)
    assert numbers(found, "labels").tolist() == offline.labels[exit - 1, :3].tolist()
    rows = [[int(label) for label in row.split(",") if label] for row in found["parameters"]["set"].split(";")]
    assert [row.nonzero()[0].tolist() for row in numbers(found, "set")] == rows


def test_binary_data_in_both_directions(live: Any, digits: Any, offline: Any) -> None:
    array = digits[0][:2].numpy()
    size = {"binary_data_size": array.nbytes}
    described = {"name": "input", "shape": list(array.shape), "datatype": "FP32", "parameters": size}
    outputs = [{"name": "probabilities", "parameters": {"binary_data": True}}, {"name": "fell_back"}]
    head = json.dumps({"id": "a", "inputs": [described], "outputs": outputs}).encode()
    header = {"Inference-Header-Content-Length": str(len(head))}
    response = live.post(INFER, content=head + array.tobytes(), headers=header)
    length = int(response.headers["inference-header-content-length"])
    found = json.loads(response.content[:length])
    assert (found["id"], [output["name"] for output in found["outputs"]]) == ("a", ["probabilities", "fell_back"])
    probs = np.frombuffer(response.content[length:], np.float32).reshape(2, 10)
    np.testing.assert_allclose(probs, offline.probs[found["parameters"]["exit"] - 1, :2], atol=1e-4)


def test_a_stream_has_one_event_per_exit(live: Any, digits: Any, offline: Any, request_of: Any) -> None:
    response = live.post(f"{INFER}_stream", json=request_of(digits[0][:2]))
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert [event["parameters"]["exit"] for event in found] == [1, 2, 3, 4, 5]
    for event in found:
        np.testing.assert_allclose(
            numbers(event, "probabilities"), offline.probs[event["parameters"]["exit"] - 1, :2], atol=1e-4
        )


def test_confidence_ends_a_request(live: Any, digits: Any, offline: Any, request_of: Any) -> None:
    row = int((offline.confidence[0] < 0.9).nonzero()[0])
    reached = int((offline.confidence[:, row] >= 0.9).nonzero()[0]) + 1
    found = live.post(INFER, json=request_of(digits[0][row : row + 1], target_confidence=0.9)).json()
    assert found["parameters"]["exit"] == reached
    assert found["parameters"]["reason"] == ("confidence" if reached < 5 else "finished")
    found = live.post(INFER, json=request_of(digits[0][:1], target_confidence=0.01, min_exit=3)).json()
    assert found["parameters"]["exit"] == 3


def test_many_callers_get_the_offline_values(live: Any, digits: Any, offline: Any, request_of: Any) -> None:
    with httpx.Client(base_url=live.url) as client, ThreadPoolExecutor(8) as pool:

        def ask(row: int) -> dict[str, Any]:
            return client.post(INFER, json=request_of(digits[0][row : row + 1], timeout=30_000_000)).json()

        for row, found in enumerate(pool.map(ask, range(40))):
            probs = offline.probs[found["parameters"]["exit"] - 1, row]
            np.testing.assert_allclose(numbers(found, "probabilities")[0], probs, atol=1e-4)


def test_people_send_images_and_numbers(live: Any, digits: Any, offline: Any) -> None:
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    file = io.BytesIO()
    image.fromarray(digits[1][3, 0].numpy()).save(file, "PNG")
    by_image = live.post("/predict?top=3", content=file.getvalue(), headers={"content-type": "image/png"}).json()
    by_numbers = live.post("/predict?top=3", json={"input": digits[0][3].tolist()}).json()
    for found in (by_image, by_numbers):
        (answer,) = found["answers"]
        label = int(offline.labels[-1, 3])
        assert (answer["label"], answer["name"], found["exit"], found["model"]) == (label, str(label), 5, "digits")
        assert answer["probability"] == pytest.approx(float(offline.confidence[-1, 3]), abs=1e-4)
        assert answer["top"][0]["label"] == label
        assert len(answer["top"]) <= 3
        assert str(label) in answer["set"]
    several = live.post("/predict?max_exit=2", json={"input": digits[0][:4].tolist()}).json()
    assert [answer["label"] for answer in several["answers"]] == offline.labels[1, :4].tolist()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1.5}, "timeout"),
        ({"timeout": "20ms"}, "timeout"),
        ({"timeout": 10**9}, "timeout"),
        ({"min_exit": 6}, "min_exit"),
        ({"max_exit": True}, "max_exit"),
        ({"min_exit": 4, "max_exit": 2}, "min_exit"),
        ({"target_confidence": 2}, "target_confidence"),
        ({"set": 1}, "set"),
        ({"model": "/etc/passwd"}, "model"),
        ({"priority": 1}, "priority"),
    ],
)
def test_wrong_parameters_are_refused(parameters: Any, words: str, live: Any, digits: Any, request_of: Any) -> None:
    response = live.post(INFER, json=request_of(digits[0][:1], **parameters))
    assert response.status_code == 400
    assert words in response.json()["error"]
    assert response.json()["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("query", "kind", "content", "status"),
    [
        ("", "image/png", b"no image", 400),
        ("", "image/tiff", b"II*", 415),
        ("", "text/plain", b"a text", 415),
        ("", "", b"{}", 415),
        ("", "application/json", b"{}", 400),
        ("", "application/json", b'{"input": [1, 2]}', 400),
        ("", "application/json", b'{"input": "a text"}', 400),
        ("?deadline=soon", "application/json", b'{"input": []}', 400),
        ("?top=0", "application/json", b'{"input": []}', 400),
        ("?top=3&top=4", "application/json", b'{"input": []}', 400),
        ("?path=/etc/passwd", "application/json", b'{"input": []}', 400),
    ],
)
def test_what_people_get_wrong(query: str, kind: str, content: bytes, status: int, live: Any) -> None:
    response = live.post(f"/predict{query}", content=content, headers={"content-type": kind} if kind else {})
    assert response.status_code == status
    assert set(response.json()) >= {"error", "code", "fix"}


def test_an_image_of_too_many_pixels_is_refused(live: Any) -> None:
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    file = io.BytesIO()
    image.new("1", (5000, 5000)).save(file, "PNG")
    response = live.post("/predict", content=file.getvalue(), headers={"content-type": "image/png"})
    assert response.status_code == 400
    assert "pixels" in response.json()["error"]


def test_too_short_a_deadline_is_the_caller_s_error(live: Any, digits: Any, request_of: Any) -> None:
    for path in (INFER, f"{INFER}_stream"):
        response = live.post(path, json=request_of(digits[0][:1], timeout=1))
        assert response.status_code == 422
        assert response.json()["code"] == "deadline_too_short"
        assert "the parameter timeout" in response.json()["fix"]
    response = live.post("/predict?deadline=1us", json={"input": digits[0][:1].tolist()})
    assert response.status_code == 422
    assert "the parameter deadline" in response.json()["fix"]


def test_an_overload_says_when_to_come_back(live: Any, digits: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise Overloaded("3 requests wait", expected="room", fix="wait", retry_after=1.2345)

    monkeypatch.setattr(live.service.runner, "predict_async", refuse)
    response = live.post(INFER, json=request_of(digits[0][:1]))
    assert response.status_code == 429
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1235")
    assert response.json()["retry_after_ms"] == 1235


def test_more_than_fits_is_refused_at_once(
    serving: Callable[..., Any], open_folder: Any, digits: Any, offline: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stages of 50 ms and one worker, thirty requests cannot all have a first exit within 400 ms."""
    from anytime.models.resnet import ResNet

    stage = ResNet.stage

    def slowly(self: Any, exit: int, carry: Any) -> Any:
        time.sleep(0.05)
        return stage(self, exit, carry)

    monkeypatch.setattr(ResNet, "stage", slowly)
    live = serving(open_folder(options=RunOptions(workers=1, largest_batch=1)))
    with ThreadPoolExecutor(30) as pool:
        asked = [pool.submit(live.post, INFER, json=request_of(digits[0][row : row + 1], timeout=400_000)) for row in range(30)]
        found = [each.result() for each in asked]
    assert {response.status_code for response in found} <= {200, 429, 422}
    refused = [response for response in found if response.status_code == 429]
    assert refused
    assert all(int(response.headers["retry-after-ms"]) >= 1 for response in refused)
    for row, response in enumerate(found):
        if response.status_code == 200:
            exit = response.json()["parameters"]["exit"]
            np.testing.assert_allclose(numbers(response.json(), "probabilities")[0], offline.probs[exit - 1, row], atol=1e-4)


def test_a_failure_has_no_internals(live: Any, digits: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(live.service.runner, "predict_async", fail)
    response = live.post(INFER, json=request_of(digits[0][:1]))
    assert response.status_code == 500
    assert response.json() == {"error": "the server failed", "code": "internal", "fix": "see its log"}


def test_unknown_paths_and_methods_have_the_same_shape(live: Any) -> None:
    for method, path, status in (("GET", "/admin", 404), ("DELETE", "/v2", 405), ("GET", INFER, 405), ("GET", "/docs", 404)):
        response = live.request(method, path)
        assert response.status_code == status
        assert set(response.json()) == {"error", "code", "fix"}


def test_limits_apply(serving: Callable[..., Any], open_folder: Any, digits: Any, request_of: Any) -> None:
    from anytime.serve import Limits

    live = serving(open_folder(), Limits(batch=2, body=20_000, elements=1000, streams=1, in_flight=3))
    with httpx.Client(base_url=live.url) as client:
        assert client.post(INFER, json=request_of(digits[0][:1])).status_code == 200
        found = client.post("/predict", json={"input": digits[0][:3].round(decimals=1).tolist()})
        assert (found.status_code, found.json()["error"]) == (400, "3 inputs")
        assert client.post(INFER, json=request_of(digits[0][:4])).status_code == 413
        with pytest.raises(httpx.HTTPError):  # the rest of the body is not read
            client.post(INFER, content=(bytes(1000) for _ in range(10_000))).raise_for_status()


def test_the_metrics_count(live: Any, digits: Any, request_of: Any) -> None:
    def value(name: str) -> float:
        lines = live.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = ('anytime_exit_total{exit="2"}', "anytime_batch_size_sum", "anytime_request_seconds_count")
    before = [value(name) for name in names]
    live.post(INFER, json=request_of(digits[0][:3], max_exit=2))
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [1, 6, 1]
    text = live.get("/metrics").text
    for name in (
        "anytime_deadline_miss_total",
        "anytime_collapse_total",
        "anytime_queue",
        "anytime_in_flight",
        "anytime_running",
    ):
        assert f"\n{name} " in text


def test_stages_are_spans_where_opentelemetry_is_installed(serving: Callable[..., Any], digits: Any, request_of: Any) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    live = serving()
    live.post(INFER, json=request_of(digits[0][:2], max_exit=2)).raise_for_status()
    spans = [dict(span.attributes or {}) for span in exporter.get_finished_spans() if span.name == "stage"]
    assert [(span["stage"], span["batch"]) for span in spans] == [(1, 2), (2, 2)]


def test_errors_of_the_library_have_statuses() -> None:
    from anytime.errors import InputError, StateError
    from anytime.serve.problems import problem_of

    parts: dict[str, str] = {"expected": "b", "fix": "c"}
    assert problem_of(InputError("a", **parts)).status == 400
    assert problem_of(StateError("a", **parts)).status == 503
    assert problem_of(DeadlineTooShort("a", **parts, forecast=1.0, budget=0.5)).document["forecast_us"] == 1_000_000
    assert problem_of(Overloaded("a", **parts, retry_after=0.0)).headers["retry-after"] == "1"
    long = problem_of(InputError("\x1b" * 1000, **parts)).document["error"]
    assert "\x1b" not in long


def test_answers_are_float32_on_the_wire(live: Any, digits: Any, request_of: Any) -> None:
    found = live.post(INFER, json=request_of(digits[0][:1])).json()
    assert float(np.float32(numbers(found, "probabilities").sum())) == pytest.approx(1, abs=1e-5)
    assert torch.tensor(numbers(found, "labels")).dtype == torch.int64
