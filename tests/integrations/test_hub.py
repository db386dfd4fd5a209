"""Saved models to and from a hub: its client library is real, and only the HTTP requests end here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytime
from anytime.errors import AnytimeError, FileError, FormatError, IntegrityError, OptionError

hub = pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")
httpx2 = pytest.importorskip("httpx2")

from anytime.integrations.hub import download, from_pretrained, push_to_hub  # noqa: E402

X = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))


class FakeHub:
    """The answers of a hub to the requests of its client: repositories in memory, one commit each."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}

    def answer(self, request: Any) -> Any:
        path = request.url.path
        if path == "/api/repos/create":
            document = json.loads(request.content)
            name = "/".join(filter(None, (document.get("organization") or "me", document["name"])))
            self.repositories.setdefault(name, {})
            return httpx2.Response(200, json={"url": f"https://huggingface.co/{name}"})
        if path == "/api/validate-yaml":
            return httpx2.Response(200, json={"errors": [], "warnings": []})
        if path == "/api/whoami-v2":
            return httpx2.Response(200, json={"name": "me", "type": "user"})
        match = re.fullmatch(r"(?:/api/models)?/(\w+/[\w.-]+)(?:/(\w+)/([^/]+)(?:/(.+))?)?", path)
        if match is None or match[1] not in self.repositories:
            return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"}, json={"error": "Repository not found"})
        files, verb = self.repositories[match[1]], match[2]
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        if verb == "preupload":
            wanted = json.loads(request.content)["files"]
            kept = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in wanted]
            return httpx2.Response(200, json={"files": kept})
        if verb == "commit":
            for line in request.content.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return httpx2.Response(200, json={"commitUrl": f"https://huggingface.co/{match[1]}/commit/1", "commitOid": commit})
        if verb == "tree":
            listed = [{"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()]
            return httpx2.Response(200, json=listed)
        if verb == "resolve":
            data = files[match[4]]
            headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Content-Length": str(len(data))}
            return httpx2.Response(200, headers=headers, content=b"" if request.method == "HEAD" else data)
        siblings = [{"rfilename": name} for name in files]
        return httpx2.Response(200, json={"id": match[1], "sha": commit, "siblings": siblings})


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    made = FakeHub()
    hub.set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(made.answer), follow_redirects=True))
    yield made
    hub.set_client_factory(httpx2.Client)


def make_backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))


def attached() -> Any:
    torch.manual_seed(0)
    return anytime.attach_exits(make_backbone(), at=["1"], example=X).eval()


def test_a_pushed_model_is_downloaded_as_it_was(fake: FakeHub, tmp_path: Path) -> None:
    model = attached()
    address = push_to_hub(model, "me/small", token="hf_x", rule="latest", class_names=list("abcde"))
    assert address.endswith("me/small")
    assert {"config.json", "model.safetensors", "README.md", "manifest.json"} <= set(fake.repositories["me/small"])
    assert b"library_name: anytime-nn" in fake.repositories["me/small"]["README.md"]
    again = from_pretrained("me/small", build=make_backbone, cache=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(X), model(X))
    with anytime.Runner.load(download("me/small", cache=tmp_path), build=make_backbone) as runner:
        assert runner.rule == anytime.Latest()


def test_a_new_commit_replaces_what_was_downloaded_before(fake: FakeHub, tmp_path: Path) -> None:
    first, second = attached(), attached()
    with torch.no_grad():
        second.heads[0].linear.bias += 1
    push_to_hub(first, "me/small", token="hf_x", policy=anytime.policy.Confidence(0.5))
    download("me/small", cache=tmp_path)
    fake.repositories["me/small"].clear()
    push_to_hub(second, "me/small", token="hf_x")
    found = anytime.run.open_folder(download("me/small", cache=tmp_path), build=make_backbone)
    assert found.policy is None
    with torch.no_grad():
        torch.testing.assert_close(found.model(X), second(X))


def test_a_folder_is_pushed_without_what_is_not_the_model_s(fake: FakeHub, tmp_path: Path) -> None:
    folder = anytime.save(attached(), tmp_path / "small")
    (folder / "secret.txt").write_text("x")
    push_to_hub(folder, "me/small", token="hf_x")
    assert set(fake.repositories["me/small"]) == {"README.md", "config.json", "manifest.json", "model.safetensors"}


def test_what_was_damaged_on_the_way_is_refused(fake: FakeHub, tmp_path: Path) -> None:
    push_to_hub(attached(), "me/small", token="hf_x")
    weights = fake.repositories["me/small"]["model.safetensors"]
    fake.repositories["me/small"]["model.safetensors"] = weights[:-1] + b"x"
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        download("me/small", cache=tmp_path)


def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    folder = anytime.save(anytime.create_model("mlp-toy", classes=3), tmp_path / "mlp")
    assert from_pretrained(folder).num_exits == 5


def test_a_new_process_knows_where_to_keep_what_it_downloads(tmp_path: Path) -> None:
    code = "from anytime.integrations.hub import download; download('me/nothing')"
    offline = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=False)
    assert "FileError: 'me/nothing' could not be downloaded" in found.stderr


def test_mistakes_are_explained(fake: FakeHub, tmp_path: Path) -> None:
    fake.repositories["me/bert"] = {"config.json": b"{}", "model.safetensors": b""}
    cases: dict[str, tuple[Any, type[AnytimeError], str]] = {
        "no repository": (lambda: download("me/nothing", cache=tmp_path), FileError, "me/nothing"),
        "a name that cannot be one": (lambda: download("a/b/c", cache=tmp_path), FileError, "a/b/c"),
        "a model of another library": (lambda: download("me/bert", cache=tmp_path), FormatError, "attach_exits"),
        "another folder": (lambda: push_to_hub(tmp_path, "me/x"), FormatError, "anytime.save(model, folder)"),
        "options with a folder": (lambda: push_to_hub(tmp_path, "me/x", rule="latest"), OptionError, "rule"),
    }
    for call, kind, hint in cases.values():
        with pytest.raises(kind) as caught:
            call()
        assert hint in str(caught.value)
