import getpass
import json
import os
import platform
import socket
import subprocess
import sys
import tomllib
import warnings
from dataclasses import replace
from importlib import metadata
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import anytime
from anytime import installed
from anytime.artifacts import write_json
from anytime.cli import doctor as module
from anytime.cli.doctor import doctor, render, to_json
from anytime.installed import Device, Extra, Package, _packages, environment, examine

CORE = ["torch", "numpy", "scikit-learn", "safetensors", "jinja2", "cyclopts", "rich", "pyyaml"]
NEEDS = [
    "torch>=2.6",
    "numpy (>=2.0)",
    "tomli>=2; python_version < '3.11'",
    'fastapi>=0.100; extra == "serve"',
    "uvicorn[standard]~=0.20,<2 ; extra == 'serve'",
    "uvloop>=1; sys_platform != 'win32' and extra == 'serve'",
    "numba; extra == 'fast'",
    "anytime-nn[serve,fast]; extra == 'all'",
]


@pytest.fixture(scope="module")
def health():
    return examine()


def shown(health) -> str:
    console = Console(width=100, file=StringIO())
    console.print(render(health))
    return console.file.getvalue()


def test_what_is_installed_is_found(health):
    found = {package.name: package for package in health.packages}
    assert found.keys() >= {"anytime-nn", *CORE}
    for name in CORE:
        assert found[name].version == metadata.version(name)
        assert found[name].minimum
    assert health.python.version == platform.python_version()
    assert health.python.minimum
    assert health.healthy


def test_the_extras_are_those_of_the_distribution(health):
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {extra.name for extra in health.extras} == set(declared["optional-dependencies"])
    dev = next(extra for extra in health.extras if extra.name == "dev")
    assert {"pytest", "hypothesis"} <= {package.name for package in dev.packages}
    assert "pytest" not in dev.lacking
    assert dev.command == "pip install 'anytime-nn[dev]'"


def test_the_machine_is_described(health):
    machine = health.machine
    assert machine.processor
    assert 1 <= machine.usable_cores <= machine.cores
    assert machine.threads == torch.get_num_threads()
    assert machine.interop_threads == torch.get_num_interop_threads()
    assert machine.memory is None or machine.memory > 2**20
    assert machine.devices[0] == Device("cpu", machine.processor, machine.memory)


@pytest.mark.parametrize(
    ("version", "minimum", "state"),
    [
        ("2.13.0+cpu", "2.6", "ok"),
        ("2.6", "2.6.0", "ok"),
        ("2.6.0", "2.6", "ok"),
        ("2.6rc1", "2.6", "ok"),
        ("2.5.9", "2.6", "too old"),
        ("9.0", "10.0", "too old"),
        ("strange", "1.0", "too old"),
        ("1", None, "ok"),
        (None, None, "missing"),
        (None, "1.0", "missing"),
    ],
)
def test_versions_are_compared_by_their_numbers(version, minimum, state):
    assert Package("any", version, minimum).state == state


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, {"torch": "2.6", "numpy": "2.0"}),
        ("serve", {"fastapi": "0.100", "uvicorn": "0.20"}),
        ("fast", {"numba": None}),
        ("all", {"fastapi": "0.100", "uvicorn": "0.20", "numba": None}),
        ("unknown", {}),
    ],
)
def test_requirements_are_sorted_by_extra(extra, expected):
    assert {package.name: package.minimum for package in _packages(NEEDS, extra)} == expected


@pytest.mark.parametrize("version", [None, "0.1"])
def test_a_core_package_that_is_missing_or_old_is_an_error(health, monkeypatch, capsys, version):
    sick = replace(health, packages=(*health.packages, Package("torch", version, "2.6")))
    monkeypatch.setattr(module, "examine", lambda: sick)
    assert doctor() == 1
    out = capsys.readouterr().out
    assert "2.6 or later is required" in out
    assert ("missing" if version is None else "too old") in out
    assert doctor(json=True) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_a_missing_extra_is_shown_with_its_command_and_is_not_an_error(health, monkeypatch, capsys):
    lacking = Extra("serve", (Package("fastapi", None, "0.100"), Package("numpy", "2.0")))
    monkeypatch.setattr(module, "examine", lambda: replace(health, extras=(lacking,)))
    assert doctor() == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "anytime-nn[serve] optional: fastapi; pip install 'anytime-nn[serve]'" in out


def test_the_table_is_short_and_shows_all(health):
    text = shown(health)
    for name in ("python", *CORE, "anytime-nn[dev]", "system", "cores", "torch threads", "cpu"):
        assert name in text
    assert len(text.splitlines()) < 40


def test_json_is_one_document_on_stdout(capsys):
    code = doctor(json=True)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert code == 0
    assert captured.err == ""
    assert document.keys() == {"healthy", "packages", "extras", "machine", "notes"}
    found = {package["name"]: package for package in document["packages"]}
    assert found["torch"]["version"] == metadata.version("torch")
    assert found["torch"]["state"] == "ok"


def test_accelerators_are_listed(health, monkeypatch):
    gpu = SimpleNamespace(name="Some [bold] GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = examine()
    assert [device.kind for device in found.machine.devices] == ["cpu", "cuda", "cuda", "mps"]
    assert "Some [bold] GPU, 80.0 GiB" in shown(found)


def test_a_broken_torch_is_a_note(monkeypatch):
    def broken() -> int:
        raise OSError("libtorch.so: cannot open")

    monkeypatch.setattr(torch, "get_num_threads", broken)
    found = examine()
    assert found.machine.threads is None
    assert "libtorch.so" in shown(found)
    json.loads(to_json(found))


def test_a_warning_of_torch_is_a_note(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: warnings.warn("the driver is old", stacklevel=1) or 0)
    assert examine().notes[0] == "torch warns: the driver is old"


@pytest.mark.parametrize(("cuda", "said"), [(None, True), ("12.4", False)])
def test_torchvision_beside_a_cpu_torch_is_a_note(monkeypatch, cuda, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.20" if name == "torchvision" else real(name))
    assert any("torchmetrics" in note for note in examine().notes) is said


def test_a_checkout_that_is_not_installed_is_a_note(monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(metadata, "distribution", absent)
    found = examine()
    assert not found.healthy
    assert "not installed as a package" in shown(found)


@pytest.mark.parametrize(
    ("providers", "said"),
    [
        (["anytime-nn"], []),
        (["Anytime_NN"], []),
        (["anytime"], ["anytime"]),
        (["anytime-nn", "anytime"], ["anytime"]),
        ([], []),
    ],
)
def test_another_distribution_with_our_package_name_is_a_note(monkeypatch, providers, said):
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"anytime": providers})
    notes = [note for note in examine().notes if "another project" in note]
    assert [f"distribution {name!r}" in note for name, note in zip(said, notes, strict=True)] == [True] * len(said)
    assert all("pip uninstall" in note and "anytime-nn" in note for note in notes)


def test_requirements_are_known_in_a_source_tree_too(monkeypatch):
    real = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == "anytime-nn":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    found = examine()
    assert {package.name for package in found.packages} >= {"anytime-nn", *CORE}
    assert found.packages[0].version == anytime.__version__
    assert found.healthy
    monkeypatch.setattr(installed, "__file__", str(Path("/nowhere/src/anytime/installed.py")))
    assert examine().packages == (Package("anytime-nn", None),)


def test_the_environment_names_no_user_host_or_path(monkeypatch, tmp_path):
    def private(*_: object) -> str:
        raise AssertionError("this is private")

    for home, name in ((platform, "node"), (socket, "gethostname"), (getpass, "getuser"), (os, "getlogin")):
        monkeypatch.setattr(home, name, private)
    found = environment()
    write_json(tmp_path / "environment.json", found)
    text = (tmp_path / "environment.json").read_text()
    assert found.keys() == {"python", "packages", "machine"}
    assert found["packages"]["torch"] == metadata.version("torch")
    assert {"system", "processor", "cores", "usable_cores", "threads", "devices"} <= found["machine"].keys()
    for place in (Path.home(), Path.cwd(), Path(sys.prefix), tmp_path):
        assert str(place) not in text or place == Path("/")


def test_importing_the_doctor_does_not_import_torch():
    code = "import sys, anytime.cli.doctor; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
