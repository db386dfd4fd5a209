"""Any folder that the library writes can be served, and the command starts, drains and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import anytime
from anytime.artifacts import seal
from anytime.cli import run
from anytime.data.text import collect_vocabulary, save_tokenizer
from anytime.models import create, save
from anytime.policy import Confidence
from anytime.serve import open_service

ROOT = Path(__file__).parents[2]


def labels(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    (found,) = [output for output in response.json()["outputs"] if output["name"] == "labels"]
    return found["data"]


def test_exported_stages(tmp_path: Path, serving: Any, open_folder: Any, capsys: Any) -> None:
    pytest.importorskip("onnxruntime", reason="exported stages need ONNX Runtime")
    torch.manual_seed(0)
    network = create("mlp-toy", classes=5, exits=3).eval()
    save(network, tmp_path / "model")
    assert run(["export", str(tmp_path / "model"), "--out", str(tmp_path / "stages"), "--rule", "product"]) == 0
    live = serving(open_folder(tmp_path / "stages", engine="auto"))
    x = torch.randn(4, 2)
    described = {"name": "input", "datatype": "FP32", "shape": [4, 2], "data": x.flatten().tolist()}
    with torch.inference_mode():
        wanted = anytime.Product()(network(x)).labels[1].tolist()
    request = {"inputs": [described], "parameters": {"max_exit": 2}}
    assert labels(live.post("/v2/models/stages/infer", json=request)) == wanted
    refused = live.post("/v2/models/stages/infer", json={"inputs": [described], "parameters": {"set": True}})
    assert refused.status_code == 400  # no prediction sets


class Two(torch.nn.Module):
    """A module that takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.last((self.words(input_ids) * attention_mask[..., None]).sum(1))  # type: ignore[no-any-return]


def test_saved_models_of_several_tensors(tmp_path: Path, serving: Any, open_folder: Any) -> None:
    torch.manual_seed(0)
    x = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    model = anytime.attach_exits(Two(), at=["words"], example=x)
    folder = anytime.save(model, tmp_path / "two", rule="latest", policy=Confidence((0.0, 1.0)), class_names=list("abcde"))
    live = serving(open_folder(folder, build=Two, engine="eager"))
    described = [
        {"name": name, "datatype": "INT64", "shape": [2, 3], "data": tensor.flatten().tolist()} for name, tensor in x.items()
    ]
    found = live.post("/v2/models/two/infer", json={"inputs": described})
    with torch.inference_mode():
        assert labels(found) == model.eval()(x)[0].argmax(-1).tolist()
    assert (found.json()["parameters"]["exit"], found.json()["parameters"]["reason"]) == (1, "policy")
    assert [each["name"] for each in live.get("/v2/models/two").json()["inputs"]] == list(x)


def test_text_models(tmp_path: Path, serving: Any, open_folder: Any) -> None:
    pytest.importorskip("tokenizers", reason="texts need the extra text")
    torch.manual_seed(0)
    texts = ["my card was stolen", "what is my balance", "freeze the account"]
    tokenizer = collect_vocabulary(texts, size=60)
    network = create("encoder-tiny", classes=6, vocabulary=len(tokenizer.vocabulary)).eval()
    save(network, tmp_path / "model")
    settings = save_tokenizer(tmp_path, tokenizer, length=8)
    words = [f"intent {number}" for number in range(6)]
    (tmp_path / "data.json").write_text(json.dumps({"name": "bank", "mean": [], "std": [], "class_names": words, **settings}))
    seal(tmp_path, ["data.json", "vocab.txt"], kind="run")
    live = serving(open_folder(tmp_path, name="bank"))
    ids, lengths = tokenizer.encode(texts, length=8)
    with torch.inference_mode():
        wanted = live.service.runner.rule(network(ids[:, : int(lengths.max())])).labels[-1].tolist()
    described = {"name": "input", "datatype": "BYTES", "shape": [3], "data": texts}
    assert labels(live.post("/v2/models/bank/infer", json={"inputs": [described]})) == wanted
    alone = live.post("/predict", content=texts[0].encode(), headers={"content-type": "text/plain"})
    assert alone.json()["answers"][0]["name"].startswith("intent ")
    several = live.post("/predict", json={"input": texts}).json()
    assert [answer["label"] for answer in several["answers"]] == wanted
    for content, kind in ((b"\xff", "text/plain"), (b"GIF87a", "image/gif"), (b'{"input": [1]}', "application/json")):
        refused = live.post("/predict", content=content, headers={"content-type": kind})
        assert refused.status_code in (400, 415)


def test_published_runs(serving: Any, open_folder: Any) -> None:
    folder = ROOT / "results" / "msdnet-cifar100-seed0"
    if not list(folder.glob("weights-*")):
        pytest.skip("the published weights are not here")
    live = serving(open_folder(folder))
    x = np.zeros((1, 3, 32, 32), np.float32)
    described = {"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    response = live.post("/v2/models/msdnet-cifar100-seed0/infer", json={"inputs": [described]}, timeout=60)
    with torch.inference_mode():
        wanted = live.service.runner.rule(live.service.opened.model(torch.from_numpy(x)))
    assert labels(response) == wanted.labels[response.json()["parameters"]["exit"] - 1].tolist()


def test_a_name_that_is_no_address_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(create("mlp-toy", classes=5, exits=2).eval(), tmp_path / "a model?")
    with pytest.raises(anytime.errors.OptionError, match="--name"):
        open_service(tmp_path / "a model?", deadline=1.0, longest=1.0, engine="eager")


@contextmanager
def command(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`anytime serve` as a process, and its address."""
    words = [sys.executable, "-m", "anytime.cli", "serve", "--port", "0", "--engine", "eager", *arguments]
    started = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    try:
        assert started.stdout is not None
        lines = iter(started.stdout.readline, "")
        address = next((line.split()[-1] for line in lines if line.startswith("listening on ")), None)
        assert address is not None, started.stderr.read() if started.stderr else ""
        yield started, address
    finally:
        started.kill()
        started.communicate()


def test_sigterm_answers_what_is_in_flight() -> None:
    with (
        command("--deadline", "30s", "--log-level", "debug") as (process, address),
        httpx.Client(base_url=address, timeout=30) as client,
    ):
        assert client.get("/v2/health/ready").status_code == 200
        request = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [32, 1, 16, 16], "data": [0.1] * 8192}]}
        found: list[httpx.Response] = []

        def ask() -> None:
            with suppress(httpx.TransportError):  # a connection that was not accepted yet
                found.append(client.post("/v2/models/digits/infer", json=request))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while "anytime_in_flight 0.0" in client.get("/metrics").text and not found and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert found
        assert all(response.status_code == 200 for response in found)
        assert process.wait(30) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr if line.startswith("{")]
        assert [line["message"] for line in lines if line["level"] == "info"] == ["ready", "closing"]
        assert {"endpoint": "infer", "outcome": "answered", "level": "debug"}.items() <= lines[1].items()


def test_a_token_from_the_environment_and_ctrl_c() -> None:
    token = {"ANYTIME_TOKEN": "a-token-of-some-length"}
    with command("--host", "127.0.0.1", environment=token) as (process, address):
        assert httpx.get(f"{address}/v2").status_code == 401
        header = {"authorization": f"Bearer {token['ANYTIME_TOKEN']}"}
        assert httpx.get(f"{address}/v2", headers=header).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is no folder"),
        (["--deadline", "soon"], "not a valid duration"),
        (["--max-body", "0"], "--max-body"),
        (["--max-batch", "0"], "batch"),
        (["--policy", "random"], "policy"),
        (["--rule", "magic"], "magic"),
        (["--name", "a/b"], "--name"),
    ],
)
def test_wrong_calls_are_explained(arguments: list[str], words: str, capsys: Callable[..., Any]) -> None:
    assert run(["serve", "--port", "0", "--engine", "eager", *arguments]) == 2
    assert words in capsys.readouterr().err  # type: ignore[attr-defined]
