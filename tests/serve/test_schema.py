"""The OpenAPI description is true: schemathesis generates requests from it, and finds no server error and no violation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which("schemathesis")
# That the data of a tensor fit its shape cannot be said in a schema: a request that conforms may get 400.
CHECKS = ["--exclude-checks", "positive_data_acceptance"]


def check(url: str, examples: int, tmp_path: Path) -> None:
    if PROGRAM is None:
        pytest.skip("schemathesis is not installed")
    words = ["run", f"{url}/openapi.json", "--max-examples", str(examples), "--phases", "examples,coverage,fuzzing", *CHECKS]
    more = [
        "--generation-database",
        "none",
        "--no-color",
        "--warnings",
        "off",
        "--request-timeout",
        "60",
        "--seed",
        os.environ.get("BATTERY", "17"),
    ]
    done = subprocess.run(
        [PROGRAM, *words, *more], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"\d+ generated, \d+ passed", done.stdout)


@pytest.mark.timeout(600)
def test_two_hundred_cases_per_operation(live: Any, tmp_path: Path) -> None:
    check(live.url, 200, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_thousand_cases_per_operation(live: Any, tmp_path: Path) -> None:
    check(live.url, 2000, tmp_path)


def test_every_route_is_described(live: Any) -> None:
    described = live.get("/openapi.json").json()["paths"]
    routes = {route.path for route in live.app.routes} - {"/openapi.json", "/page"}  # what the page asks is not for programs
    assert set(described) == routes
    for path in described.values():
        for operation in path.values():
            assert "422" not in operation["responses"] or "exit" in operation["responses"]["422"]["description"]


def test_the_example_of_the_schema_is_answered(live: Any) -> None:
    described = live.get("/openapi.json").json()["paths"]["/v2/models/{name}/infer"]["post"]
    example = described["requestBody"]["content"]["application/json"]["schema"]["example"]
    assert live.post("/v2/models/digits/infer", json=example).status_code == 200
