"""Writers that are killed, or meet a full or faulty disk, at every single file operation."""

import errno
import fcntl
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anytime.artifacts import files, open_bundle, read_bundle, verify_bundle, write_bundle, write_bytes
from anytime.errors import FileError

OPERATIONS = [(os, name) for name in ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "chmod")]
OPERATIONS.append((fcntl, "flock"))
OLD, NEW, LATER = b"old" * 1000, b"new!" * 50_000, b"later"
OLD_BUNDLE = {"config.json": b"{}", "model": OLD, "only-old": b"1"}
NEW_BUNDLE = {"config.json": b'{"new": 1}', "model": NEW}
LATER_BUNDLE = {"config.json": LATER, "model": LATER}
Fault = Callable[[str, Callable, tuple], object]


@pytest.fixture(autouse=True)
def fsync_is_quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: os.fstat(handle) and None)


def inject(fault: Fault, *, at: int, patch: Callable[..., None], sticky: bool = False) -> list[str]:
    """Put `fault` in the place of file operation number `at` (and, if sticky, of all after it); log what is done."""
    done: list[str] = []
    count = 0

    def counted(name: str, real: Callable) -> Callable:
        def operation(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == at or (sticky and count > at):
                done.append(f"fault in {name}")
                return fault(name, real, args)
            result = real(*args, **options)
            done.append(name)
            return result

        return operation

    for module, name in OPERATIONS:
        patch(module, name, counted(name, getattr(module, name)))
    return done


def kill(name: str, real: Callable, args: tuple) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tear(name: str, real: Callable, args: tuple) -> None:
    """Do half of a write, or all of another operation, and die."""
    real(args[0], args[1][: len(args[1]) // 2]) if name == "write" else real(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> Fault:
    def fault(name: str, real: Callable, args: tuple) -> None:
        if name == "close":
            real(*args)
        raise OSError(number, os.strerror(number))

    return fault


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child only handles files
        return os.fork()


def survives(write: Callable[[], None], fault: Fault, *, at: int) -> bool:
    """Run `write` in a child with the fault at operation `at`; whether it came to its end."""
    child = fork()
    if child == 0:
        try:
            inject(fault, at=at, patch=setattr)
            write()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return not os.WIFSIGNALED(status)


def every_kill(tmp_path: Path, prepare: Callable[[Path], None], write: Callable[[Path], None], fault: Fault) -> Iterator[Path]:
    """A prepared folder after a write killed at operation 1, 2, … until one comes to its end."""
    for at in range(1, 500):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        prepare(folder)
        ended = survives(lambda folder=folder: write(folder), fault, at=at)
        yield folder
        if ended:
            assert at > 10
            return
    raise AssertionError("the write never ends")


def every_error(tmp_path: Path, prepare: Callable[[Path], None], write: Callable[[Path], None], number: int, sticky: bool):
    """A prepared folder, the error raised (or None) and the operations done, for a fault at operation 1, 2, …"""
    for at in range(1, 500):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        prepare(folder)
        error = None
        with pytest.MonkeyPatch.context() as patch:
            done = inject(fail(number), at=at, patch=patch.setattr, sticky=sticky)
            try:
                write(folder)
            except FileError as caught:
                error = caught
        yield folder, error, done
        if len(done) < at:
            assert error is None
            return
    raise AssertionError("the write never ends")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def temporaries(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith(".anytime")]


def write_old(folder: Path) -> None:
    write_bytes(folder / "file", OLD)


def write_new(folder: Path) -> None:
    write_bytes(folder / "file", NEW)


def write_old_bundle(folder: Path) -> None:
    (folder / "mine").write_bytes(b"mine")
    write_bundle(folder, OLD_BUNDLE)


def write_new_bundle(folder: Path) -> None:
    write_bundle(folder, NEW_BUNDLE)


def check_a_later_bundle_is_clean(folder: Path) -> None:
    write_bundle(folder, LATER_BUNDLE)
    assert read_bundle(folder) == LATER_BUNDLE
    assert temporaries(folder) == []
    assert set(names(folder)) <= {"config.json", "model", "only-old", "mine", "manifest.json"}


@pytest.mark.parametrize("fault", [kill, tear])
def test_a_killed_write_leaves_the_old_or_the_new_file(tmp_path, fault):
    seen = []
    for folder in every_kill(tmp_path, write_old, write_new, fault):
        seen.append((folder / "file").read_bytes())
        write_bytes(folder / "file", LATER)
        assert names(folder) == ["file"]
        assert (folder / "file").read_bytes() == LATER
    assert set(seen) == {OLD, NEW}
    assert seen == sorted(seen, key=[OLD, NEW].index)


@pytest.mark.parametrize("fault", [kill, tear])
def test_a_killed_first_write_leaves_no_file_or_the_whole_one(tmp_path, fault):
    def write_deep(folder: Path) -> None:
        write_bytes(folder / "deep" / "er" / "file", NEW)

    for folder in every_kill(tmp_path, lambda folder: None, write_deep, fault):
        path = folder / "deep" / "er" / "file"
        assert not path.exists() or path.read_bytes() == NEW
        write_deep(folder)
        assert names(folder) == ["file"]


@pytest.mark.parametrize("fault", [kill, tear])
def test_a_killed_bundle_write_leaves_the_old_or_the_new_bundle(tmp_path, fault):
    seen = []
    for folder in every_kill(tmp_path, write_old_bundle, write_new_bundle, fault):
        before = {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
        seen.append(read_bundle(folder))
        verify_bundle(folder)
        assert {name: path.read_bytes() for name, path in open_bundle(folder).items()} == seen[-1]
        assert {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before
        check_a_later_bundle_is_clean(folder)
    assert seen == sorted(seen, key=[OLD_BUNDLE, NEW_BUNDLE].index)
    assert OLD_BUNDLE in seen
    # Several states after the commit are read through the journal.
    assert seen.count(NEW_BUNDLE) > 5


def test_a_killed_first_bundle_write_leaves_nothing_or_the_whole_bundle(tmp_path):
    for folder in every_kill(tmp_path, lambda folder: None, lambda folder: write_new_bundle(folder / "new"), kill):
        try:
            assert read_bundle(folder / "new") == NEW_BUNDLE
        except FileNotFoundError:
            assert not (folder / "new" / "manifest.json").exists()
        check_a_later_bundle_is_clean(folder / "new")


def stop_half_way(folder: Path, renames: int) -> None:
    """Leave a committed bundle with `renames` of its files in place."""
    write_old_bundle(folder)
    left = 1 + renames

    def stop(name: str, real: Callable, args: tuple) -> object:
        nonlocal left
        if name == "replace":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        inject(stop, at=1, patch=patch.setattr, sticky=True)
        with pytest.raises(KeyboardInterrupt):
            write_new_bundle(folder)
    assert ".anytime-journal.json" in names(folder)
    assert read_bundle(folder) == NEW_BUNDLE


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_writer_killed_while_finishing_for_another_leaves_one_of_the_bundles(tmp_path, renames):
    def write(folder: Path) -> None:
        write_bundle(folder, LATER_BUNDLE)

    for folder in every_kill(tmp_path, lambda folder: stop_half_way(folder, renames), write, kill):
        assert read_bundle(folder) in (NEW_BUNDLE, LATER_BUNDLE)
        check_a_later_bundle_is_clean(folder)


def test_a_single_file_written_beside_a_pending_bundle_leaves_it_whole(tmp_path):
    stop_half_way(tmp_path, 1)
    write_bytes(tmp_path / "report.html", b"report")
    assert read_bundle(tmp_path) == NEW_BUNDLE


def test_an_interrupt_right_after_the_commit_keeps_the_new_bundle(tmp_path):
    write_old_bundle(tmp_path)

    def interrupt(name: str, real: Callable, args: tuple) -> object:
        result = real(*args)
        if name == "replace":
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch:
        inject(interrupt, at=1, patch=patch.setattr, sticky=True)
        with pytest.raises(KeyboardInterrupt):
            write_new_bundle(tmp_path)
    assert read_bundle(tmp_path) == NEW_BUNDLE
    check_a_later_bundle_is_clean(tmp_path)


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_error_leaves_the_old_file_until_the_rename(tmp_path, number, sticky):
    raised = 0
    for folder, error, done in every_error(tmp_path, write_old, write_new, number, sticky):
        assert (folder / "file").read_bytes() == (NEW if "replace" in done else OLD)
        if error is not None:
            raised += 1
            assert os.strerror(number) in str(error)
            assert isinstance(error.__cause__, OSError)
        if not sticky:  # a disk that is broken for good does not let go of the temporary file either
            assert names(folder) == ["file"]
        write_bytes(folder / "file", LATER)
        assert names(folder) == ["file"]
    assert raised > 5


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_error_leaves_the_old_bundle_until_the_commit(tmp_path, number, sticky):
    raised = 0
    for folder, error, done in every_error(tmp_path, write_old_bundle, write_new_bundle, number, sticky):
        assert read_bundle(folder) == (NEW_BUNDLE if "replace" in done else OLD_BUNDLE)
        raised += error is not None
        if not sticky and "replace" not in done:
            assert temporaries(folder) == []
        check_a_later_bundle_is_clean(folder)
    assert raised > 20


def test_a_process_forked_during_a_write_does_not_keep_the_folder_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    with files.lock_folder(tmp_path):
        child = fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        write_bytes(tmp_path / "file", NEW)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_short_writes_still_write_everything(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:1000]))
    write_new(tmp_path)
    write_new_bundle(tmp_path)
    assert (tmp_path / "file").read_bytes() == NEW
    assert read_bundle(tmp_path) == NEW_BUNDLE


def log_order(monkeypatch) -> list[tuple[str, str]]:
    """What is synced (by name) and renamed (from a name), in order."""
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(os, "fsync", lambda handle: log.append(("sync", os.path.realpath(f"/proc/self/fd/{handle}"))))
    for name in ("replace", "unlink"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: log.append((name, str(args[0]))) or real(*args))
    return log


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
def test_files_are_synced_before_their_rename_and_folders_after(tmp_path, monkeypatch):
    folder = tmp_path.resolve() / "new"
    log = log_order(monkeypatch)
    write_bundle(folder, NEW_BUNDLE)
    moves = [index for index, (what, _) in enumerate(log) if what == "replace"]
    assert log[0] == ("sync", str(tmp_path.resolve()))
    assert all(("sync", log[index][1]) in log[: moves[0]] for index in moves)
    commit, *rest = moves
    assert log[commit - 1] == log[commit + 1] == ("sync", str(folder))
    assert rest == list(range(rest[0], rest[0] + len(rest)))
    assert log[rest[-1] + 1 :] == [
        ("sync", str(folder)),
        ("unlink", str(folder / ".anytime-journal.json")),
        ("sync", str(folder)),
    ]


@pytest.mark.parametrize("fault", [kill, tear])
def test_a_killed_report_is_the_old_run_or_the_new_one(tmp_path: Path, fault: Fault) -> None:
    import json

    import torch
    import yaml

    from anytime import evaluate
    from anytime.report import write_folder

    logits, labels = torch.randn(2, 20, 3), torch.arange(20) % 3
    runs = {seed: evaluate(logits, labels, rules=["latest"], seed=seed) for seed in (1, 2)}

    def write(folder: Path, seed: int) -> None:
        write_folder(folder / "run", runs[seed], source="logits.npz", environment={})

    for folder in every_kill(tmp_path, lambda folder: write(folder, 1), lambda folder: write(folder, 2), fault):
        files = read_bundle(folder / "run")
        seed = json.loads(files["metrics.json"])["settings"]["seed"]
        assert seed in runs
        assert yaml.safe_load(files["config.yaml"])["seed"] == seed
        assert files["report.html"].rstrip().endswith(b"</html>")
        assert (folder / "run" / "report.html").read_bytes().rstrip().endswith(b"</html>")
