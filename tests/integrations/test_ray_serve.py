from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
httpx = pytest.importorskip("httpx")

from anytime.errors import MissingExtraError, OptionError, Overloaded  # noqa: E402
from anytime.integrations.ray_serve import Replica, app, make_application  # noqa: E402

PROGRAMS = Path(__file__).with_name("ray_programs.py")
CONFIG = Path(__file__).parents[2] / "deploy" / "ray-serve.yaml"
TOKEN = "0123456789abcdef"


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    (tmp_path / "token").write_text(TOKEN)
    made = Replica(
        None,
        token_file=str(tmp_path / "token"),
        insecure=False,
        allowed=(),
        limits={"batch": 2},
        deadline="30s",
        calibration=(),
        options={"workers": 1},
        engine="eager",
    )
    yield made
    made.service.runner.close()


def test_a_replica_is_the_server_with_its_token(replica: Replica) -> None:
    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(app=replica.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://any.name") as client:
            authorized = {"authorization": f"Bearer {TOKEN}"}
            paths = ("/v2/health/ready", "/v2", "/v2/models/digits")
            return [(await client.get(path, headers=headers)).status_code for path in paths for headers in ({}, authorized)]

    assert asyncio.run(statuses()) == [200, 200, 401, 200, 401, 200]


def test_a_busy_replica_is_healthy_and_a_broken_one_is_not(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(replica.check_health())
    for error, healthy in (
        (Overloaded("full", expected="fewer requests", fix="wait", retry_after=1.0), True),
        (RuntimeError("broken"), False),
    ):

        async def fail(*arguments: Any, error: Exception = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr(replica.service.runner, "predict_async", fail)
        if healthy:
            asyncio.run(replica.check_health())
        else:
            with pytest.raises(RuntimeError, match="broken"):
                asyncio.run(replica.check_health())


def test_nothing_starts_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYTIME_TOKEN", raising=False)
    with pytest.raises(OptionError, match="all interfaces"):
        make_application()
    with pytest.raises(OptionError, match="all interfaces"):
        app({"deadline": "20ms"})


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[ray\]"):
        make_application(insecure=True)


def test_neither_the_package_nor_its_help_imports_ray() -> None:
    script = "import sys, anytime.serve\nfrom anytime.cli import run\nrun(['--help'])\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def run_program(name: str, seconds: float) -> dict[str, Any]:
    pytest.importorskip("ray", reason="needs the extra ray")
    done = subprocess.run([sys.executable, PROGRAMS, name], capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_configuration_is_one_that_ray_reads() -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    import yaml

    script = "import sys, yaml; from ray.serve.schema import ServeDeploySchema; ServeDeploySchema(**yaml.safe_load(sys.stdin))"
    subprocess.run([sys.executable, "-c", script], input=CONFIG.read_bytes(), check=True, timeout=120)
    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    assert application["import_path"] == "anytime.integrations.ray_serve:app"


def test_a_replica_on_ray_answers_and_refuses_strangers() -> None:
    assert run_program("smoke", 280) == {"outcomes": {"correct": 10}, "ready": 200, "without_token": 401}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killing_a_replica_under_load_loses_no_more_than_it_held() -> None:
    found = run_program("kill", 500)
    assert found["replicas"] == 2
    assert found["replaced"]
    assert set(found["before"]) == {"correct"}
    assert found["after"].pop("wrong", 0) == 0
    assert found["after"].pop("correct") > 200
    assert sum(found["after"].values()) <= found["threads"], found  # those in flight


@pytest.mark.long
@pytest.mark.timeout(600)
def test_load_adds_a_replica_and_taking_it_away_loses_nothing() -> None:
    found = run_program("scale", 500)
    assert (found["before"], found["grown"], found["left"]) == (1, True, 1)
    assert set(found["outcomes"]) == {"correct"}
