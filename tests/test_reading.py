"""Files are opened as ordinary files, and what a parser raises becomes a typed error."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from anytime.errors import FileError, FormatError, IntegrityError, MissingFileError, OptionError
from anytime.reading import is_file, json_from, open_file, parsing, read_file, read_json


def test_pipes_devices_sockets_and_folders_are_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo("pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket")
    Path("link").symlink_to("pipe")
    for path, kind in (("pipe", "pipe"), ("link", "pipe"), ("socket", "socket"), (".", "folder"), ("/dev/zero", "device")):
        with pytest.raises(FormatError, match=kind):
            read_file(path)
        assert not is_file(path)
    listening.close()


def test_a_pipe_that_takes_the_place_of_a_file_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    ordinary = (tmp_path / "file").stat()
    monkeypatch.setattr(Path, "stat", lambda self, **options: ordinary)
    with pytest.raises(FormatError, match="pipe"):
        open_file(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000, "nul\0byte", "nowhere", "\udcff.npz", "file/inside"])
def test_a_path_that_names_nothing_is_a_typed_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(FileError):
        read_file(str(tmp_path / path))
    assert not is_file(str(tmp_path / path))
    with pytest.raises(MissingFileError):
        read_file(tmp_path / "nowhere")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    assert len(read_file(tmp_path / "file", most=11)) == 11
    with pytest.raises(FormatError, match="10 bytes"):
        read_file(tmp_path / "file", most=10)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), IndexError(), AssertionError(), RecursionError(), EOFError()]
)
def test_whatever_a_parser_raises_becomes_an_error_about_the_file(error: Exception) -> None:
    with pytest.raises(IntegrityError, match="some file") as caught, parsing("some file", expected="x"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit(), OptionError("a", expected="b", fix="c")])
def test_what_is_not_the_file_s_fault_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, parsing("some file", expected="x"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "NaN", "-Infinity", "9" * 10_000, '"\\ud800', "\x00"])
def test_what_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FormatError):
        read_json(tmp_path / "a.json", expected="JSON")
    with pytest.raises(FormatError):
        json_from(b"\xff" + text.encode(), "a.json", expected="JSON")
