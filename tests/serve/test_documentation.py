"""The examples of docs/serving.md run against a live server; the files of deploy/ are well-formed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh curl\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SCRIPTS = re.findall(r"```python client\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, digits: Any, request_of: Any) -> Path:
    """The files that the commands name."""
    folder = tmp_path_factory.mktemp("files")
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    image.fromarray(digits[1][0, 0].numpy()).save(folder / "digit.png")
    (folder / "numbers.json").write_text(json.dumps({"input": digits[0][0].tolist()}))
    (folder / "request.json").write_text(json.dumps(request_of(digits[0][:1], timeout=30_000_000, set=True)))
    return folder


def here(text: str, live: Any) -> str:
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{live.port}").replace("500ms", "30s").replace("500_000", "30_000_000")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS)
def test_curl(command: str, live: Any, files: Path, offline: Any) -> None:
    done = subprocess.run(["bash", "-c", here(command, live)], capture_output=True, text=True, check=True, cwd=files)
    label = int(offline.labels[-1, 0])
    if "infer_stream" in command:
        found = [json.loads(block.partition("data: ")[2]) for block in done.stdout.split("\n\n") if block]
        assert [event["parameters"]["exit"] for event in found] == [1, 2, 3, 4, 5]
    elif "infer" in command:
        assert json.loads(done.stdout)["outputs"][1]["data"] == [label]
    elif "predict" in command:
        assert json.loads(done.stdout)["answers"][0]["label"] == label
    else:
        assert json.loads(done.stdout)["name"] == "digits"


@pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is not installed")
def test_tritonclient(live: Any) -> None:
    (script,) = SCRIPTS
    done = subprocess.run([sys.executable, "-c", here(script, live)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'exit': 5" in done.stdout
    assert "'set': " in done.stdout


@pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is not installed")
def test_tritonclient_reads_health_metadata_and_errors(live: Any) -> None:
    script = f"""
import numpy as np, tritonclient.http as triton
from tritonclient.utils import InferenceServerException
client = triton.InferenceServerClient("127.0.0.1:{live.port}")
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("digits")
assert client.get_server_metadata()["name"] == "anytime"
assert client.get_model_metadata("digits", "1")["inputs"][0]["shape"] == [-1, 1, 16, 16]
x = np.zeros((2, 1, 16, 16), dtype=np.float32)
for binary in (True, False):
    given = triton.InferInput("input", x.shape, "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("probabilities", "set", "fell_back")]
    found = client.infer("digits", [given], outputs=wanted, request_id="7")
    assert found.as_numpy("probabilities").shape == (2, 10) and found.as_numpy("set").dtype == bool
    assert found.get_response()["id"] == "7"
pending = [client.async_infer("digits", [given]) for _ in range(4)]
assert all(each.get_result().as_numpy("labels").shape == (2,) for each in pending)
for model, timeout, words in (("digits", 1, "first exit"), ("other", None, "no such model")):
    try:
        client.infer(model, [given], timeout=timeout)
    except InferenceServerException as error:
        assert words in error.message(), error.message()
    else:
        raise AssertionError(words)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_dashboard_shows_metrics_that_exist(live: Any) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"anytime_\w+", text)}
    text = live.get("/metrics").text
    known = {name + end for name in re.findall(r"# TYPE (\w+)", text) for end in ("", "_bucket", "_sum", "_count")}
    assert named <= known
    on_page = set(re.findall(r"`(anytime_\w+)`", PAGE))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in named} <= on_page <= known


def test_the_manifest_is_valid_yaml_and_speaks_the_protocol() -> None:
    service, runtime = yaml.safe_load_all((ROOT / "deploy" / "kserve.yaml").read_text())
    assert (service["kind"], runtime["kind"]) == ("InferenceService", "ServingRuntime")
    assert service["spec"]["predictor"]["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"


def test_the_dockerfile_has_known_instructions_and_a_call_that_exists() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "deploy" / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}
    assert {word for word, _ in lines} <= known
    assert lines[0][0] == "FROM"
    call = json.loads(next(rest for word, rest in lines if word == "ENTRYPOINT"))
    assert call[:2] == ["anytime", "serve"]
    for word, rest in lines:
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (ROOT / source).exists()
