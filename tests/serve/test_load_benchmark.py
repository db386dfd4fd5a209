"""The load benchmark measures this library's server and its rivals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("onnxruntime")
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "load.py"


@pytest.mark.timeout(600)
def test_servers_answer_the_same_as_offline_and_every_request_is_counted(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "load.json"), "--picture", str(tmp_path / "load.svg")]
    command = [sys.executable, str(PROGRAM), "--smoke", "--servers", "anytime", "plain", "slack-fit", *files]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout
    assert "ratio to the best rival" in output
    document = json.loads((tmp_path / "load.json").read_text())
    assert [cell["load"] for cell in document["cells"]] == [100, 400]
    for cell in document["cells"]:
        assert list(cell["servers"]) == ["anytime", "plain", "slack-fit"]
        for found in cell["servers"].values():
            assert found["requests"] > 0
            assert found["wrong"] == 0
            assert set(found["statuses"]) <= {"0", "200", "422", "429", "503"}
            assert found["correct"] <= found["in_time_server"] <= 1.0
    assert "<svg" in (tmp_path / "load.svg").read_text()
