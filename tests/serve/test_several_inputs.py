"""A model that takes several tensors: requests name each of them, in JSON and as binary data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anytime.combine import Latest
from anytime.run.export import export

INFER = "/v2/models/texts/infer"


@pytest.fixture(scope="module")
def server(two: Any, running: Any, open_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    folder: Path = tmp_path_factory.mktemp("out") / "stages"
    export(two.TwoInputs().eval(), folder, rule="latest", example=two.texts())
    with running(open_folder(folder, name="texts", engine="auto"), demo=True) as live:
        yield live


def tensor(name: str, x: Tensor) -> dict[str, Any]:
    return {"name": name, "shape": list(x.shape), "datatype": "INT64", "data": x.ravel().tolist()}


def request(x: dict[str, Tensor], **parameters: Any) -> dict[str, Any]:
    return {"inputs": [tensor(name, each) for name, each in x.items()], "parameters": parameters}


def labels(found: dict[str, Any]) -> list[int]:
    return next(output["data"] for output in found["outputs"] if output["name"] == "labels")


def wanted(two: Any, x: dict[str, Tensor], exit: int = -1) -> list[int]:
    with torch.no_grad():
        return Latest()(two.TwoInputs().eval()(x)).labels[exit].tolist()


def test_metadata_lists_all_inputs(server: Any) -> None:
    assert server.get("/v2/models/texts").json()["inputs"] == [
        {"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ("input_ids", "attention_mask")
    ]
    body = server.get("/openapi.json").json()["paths"][INFER.replace("texts", "{name}")]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert (schema["properties"]["inputs"]["minItems"], schema["properties"]["inputs"]["maxItems"]) == (2, 2)
    assert server.post(INFER, json=schema["example"]).status_code == 200


@pytest.mark.parametrize(("rows", "length"), [(1, 7), (4, 3)])
def test_answers_are_those_of_the_model(rows: int, length: int, server: Any, two: Any) -> None:
    x = two.texts(rows, length)
    assert labels(server.post(INFER, json=request(x)).json()) == wanted(two, x)
    assert labels(server.post(INFER, json=request(x, max_exit=1)).json()) == wanted(two, x, 0)


def test_binary_data_follow_in_the_order_of_the_request(server: Any, two: Any) -> None:
    x = two.texts(2, 5)
    inputs = [{**tensor(name, each), "parameters": {"binary_data_size": 8 * each.numel()}} for name, each in x.items()]
    for described in inputs:
        del described["data"]
    head = json.dumps({"inputs": inputs}).encode()
    data = b"".join(each.numpy().astype("<i8").tobytes() for each in x.values())
    header = {"Inference-Header-Content-Length": str(len(head))}
    assert labels(server.post(INFER, content=head + data, headers=header).json()) == wanted(two, x)


def test_people_name_the_tensors_as_well(server: Any, two: Any) -> None:
    x = two.texts(1, 4)
    given = {name: each[0].tolist() for name, each in x.items()}
    found = server.post("/predict?deadline=20s", json={"input": given}).json()
    assert [answer["label"] for answer in found["answers"]] == wanted(two, x)


def test_a_stream_has_one_event_per_exit(server: Any, two: Any) -> None:
    text = server.post(f"{INFER}_stream", json=request(two.texts(1))).text
    assert text.count("data: ") == two.EXITS


def test_the_page_knows_the_model(server: Any) -> None:
    info = server.get("/page/info").json()
    assert (info["texts"], info["images"]) == (False, False)
    assert len(info["milliseconds"]) == 3


@pytest.mark.parametrize("change", ["missing", "twice", "rows", "lengths", "type", "one tensor", "an image"])
def test_requests_that_do_not_fit_are_refused(change: str, server: Any, two: Any) -> None:
    x = two.texts(2, 4)
    body, path, content = request(x), INFER, None
    match change:
        case "missing":
            del body["inputs"][0]
        case "twice":
            body["inputs"][0] = body["inputs"][1]
        case "rows":
            body["inputs"][0] = tensor("attention_mask", x["attention_mask"][:1])
        case "lengths":
            body["inputs"][0] = tensor("attention_mask", x["attention_mask"][:, :3])
        case "type":
            body["inputs"][0] |= {"datatype": "FP32"}
        case "one tensor":
            path, body = "/predict", {"input": np.ones(4).tolist()}
        case "an image":
            path, content = "/predict", b"GIF89a"
    sent = {"json": body} if content is None else {"content": content, "headers": {"content-type": "image/gif"}}
    found = server.post(path, **sent)
    assert found.status_code in (400, 415)
    assert found.json()["expected"]
    assert server.get("/v2/health/ready").status_code == 200
