"""Who may call, from where, and how the server is exposed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from anytime.cli import run
from anytime.errors import OptionError
from anytime.serve.security import check_exposure, is_loopback, read_token

TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_other_machines_need_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(OptionError, match="no token"):
        check_exposure(host, None, insecure=False)
    check_exposure(host, TOKEN, insecure=False)
    check_exposure(host, None, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    check_exposure(host, None, insecure=False)


def test_the_command_refuses_before_it_loads_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANYTIME_TOKEN", raising=False)
    assert run(["serve", "--host", "0.0.0.0"]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_tokens_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYTIME_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("ANYTIME_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}-2\n")
    assert read_token(file) == f"{TOKEN}-2"
    for weak in ("", "short", "with a space in the middle", "ümlaut-ümlaut-ümlaut"):
        file.write_text(weak)
        with pytest.raises(OptionError):
            read_token(file)


def test_a_token_is_needed_for_everything_but_health_and_the_files_of_the_page(serving: Any) -> None:
    live = serving(token=TOKEN)
    with httpx.Client(base_url=live.url) as client:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200
        for path in (
            "/page/info",
            "/page/model",
            "/page/report",
            "/page/load",
            "/metrics",
            "/v2",
            "/v2/models/digits",
            "/openapi.json",
            "/nowhere",
        ):
            for header in (None, "", TOKEN, "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"):
                response = client.get(path, headers={} if header is None else {"authorization": header})
                assert (response.status_code, response.json()["code"]) == (401, "no_token")
                assert response.headers["www-authenticate"] == "Bearer"
        for header in (f"Bearer {TOKEN}", f"bearer  {TOKEN}"):
            assert client.get("/v2", headers={"authorization": header}).status_code == 200
        for path in ("/predict", "/page/think", "/page/load"):
            assert client.post(path, json={}).status_code == 401
        for path in ("/", "/page/main.js", "/page/page.css"):  # the page asks for the token
            assert client.get(path).status_code == 200


def test_tokens_are_compared_in_constant_time() -> None:
    source = Path(__file__).parents[2] / "src" / "anytime" / "serve" / "security.py"
    assert "hmac.compare_digest(_digest(" in source.read_text()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "", "[::1", "127.0.0.1:80:80"]
)
def test_foreign_host_headers_are_refused(host: str, live: Any) -> None:
    response = live.get("/v2", headers={"host": host})
    assert (response.status_code, response.json()["code"]) == (400, "wrong_host")
    assert live.get("/v2/health/live", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "[::1]"])
def test_own_host_headers_are_accepted(host: str, live: Any) -> None:
    assert live.get("/v2", headers={"host": host}).status_code == 200


def test_further_names_can_be_allowed(serving: Any) -> None:
    live = serving(allowed=["Model.example"])
    assert live.get("/v2", headers={"host": "model.example:80"}).status_code == 200
    assert live.get("/v2", headers={"host": "other.example"}).status_code == 400


def test_other_web_pages_cannot_post(live: Any) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        response = live.post("/predict", json={"input": 1}, headers={"origin": origin})
        assert response.status_code == 403
    response = live.post("/predict", json={"input": 1}, headers={"origin": live.url})
    assert response.status_code == 400  # an answer to the body


def test_headers_reveal_nothing_and_forbid_sniffing(live: Any) -> None:
    response = live.get("/")
    assert "server" not in response.headers
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "access-control-allow-origin" not in response.headers


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err
