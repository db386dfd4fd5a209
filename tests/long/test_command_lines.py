"""Random command lines: verbs, options and values, valid and invalid, files and things that are not files.

The options come from the verbs' own functions, so that new ones are tested as well. Each line ends with one of the exit
codes 0, 1, 2 and 130, without a traceback. A line that takes long is interrupted, as by Ctrl-C, and must end then. The files
that the lines read stay unchanged.

A failure names its seed and case; `python -m pytest tests/long/test_command_lines.py` with `BATTERY=SEED:CASE` in the
environment runs that case alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from anytime.calibrate import fit_temperature
from anytime.cli import VERBS, run
from anytime.models import create, save

SEED, PATIENCE, SECONDS = 15, 3.0, 60.0
LABELS = np.arange(60) % 5
RANDOM = np.random.default_rng(0)
# Relative frequency of each verb; valid calls of some take seconds.
FREQUENCY = {
    "evaluate": 8,
    "certify": 6,
    "conformal": 5,
    "train": 5,
    "predict": 1.5,
    "tune": 0.5,
    "profile": 1,
    "reproduce": 0.5,
}
FREQUENCY |= {"bench": 1, "export": 0.3, "doctor": 0.1, "demo": 0.1}
ODD = ["", " ", "-", "--", "---", "-1", "0", "1e400", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "x" * 5000, "é", "a\tb"]
ODD += ["\udcff", "*", "%s", "{}", "[1]", "\x1b[31m", "none", "None", "true", "../..", "/dev/null", "/dev/zero", "/", ".", "~"]
ODD += ["1,2", ",", "=", "@x"]
WORDS: dict[str, list[str]] = {
    "int": ["0", "1", "2", "3", "-1", "7", "100", "4294967296", "18446744073709551616", "1.5", "1e3"],
    "float": ["0", "0.1", "0.05", "1", "-1", "0.5", "1e-9", "1e308", "nan", "inf", "0,1"],
    "rule": ["latest", "product", "caching", "mixture", "caching(ties=later)", "product(clipped(2), weights=ones)", "prodct"],
    "costs": ["1,2,3", "3,2,1", "1,2", "1,,2", "a,b,c", "1e308,2e308,3e308", "-1,0,1", "nan,1,2"],
    "deadline": ["5ms", "1s", "0", "-5ms", "soon", "1e9s", "1000", "5 ms", "nan", "1h"],
    "engine": ["eager", "eager", "eager", "folded", "auto", "steam", "onnxruntime", "cuda-graphs"],
    "policy": ["gain", "gain,slack-fit", "plain", "fifo", ","],
    "load": ["100%", "30,3000%", "0", "-5%", "%", "1e3", "100000"],
    "batch": ["1", "1,8", "0", "-1", "1,a", "99999999999", "8,8"],
    "shape": ["3,32,32", "2", "0", "1,1", "99999999999,9", "-3", "a", "1," * 50],
    "model": ["mlp-toy", "msdnet-cifar", "minilm-l6", "mlp", "nothing"],
    "recipe": ["digits-msdnet", "digits", "nothing", "cifar100-msdnet"],
    "objective": ["joint", "product", "sdn", "l2w", "none"],
    "device": ["cpu", "cuda", "cuda:7", "meta", "tpu"],
    "set": ["nesterov=true", "options={layers: [6]}", "x=1", "=", "lr=&a [*a]", "epochs=1e3", "seed=-1", "classes=[", "l2w={}"],
    "study": ["list", "all", "ablation", "spiral", "nothing", "figure-1"],
}
WORDS["rule"] += ["product(threshold(1e39))", "product(weights=(a,b,c,d))", "product(weights=(1e308,1e308,1e308))", "(" * 500]
WORDS["rule"] += ["powers", "scaled(latest)", "mixture(weights=(0,0,0))", "product(sigmoid, shift=1e308)", "latest,latest"]
WORDS["rule"] += ["product(relu", "in/rule.json", "in/broken.json", "in/pipe.json"]
KINDS = {"rules": "rule", "example_size": "shape", "input_shape": "shape", "set_": "set", "name": "study"}


def make_files(folder: Path) -> None:
    """Files for the command lines: valid, damaged, and things that are not files."""
    for name, scale in (("a", 1.0), ("b", 1.0), ("huge", 1e299)):
        logits = scale * (2 * RANDOM.normal(size=(3, 60, 5)) + 2 * np.eye(5)[LABELS])
        np.savez(folder / f"{name}.npz", logits=logits if scale > 1 else logits.astype("f4"), labels=LABELS)
    np.savez_compressed(folder / "packed.npz", logits=np.ones((3, 60, 5)), labels=LABELS)
    np.save(folder / "logits.npy", np.load(folder / "a.npz")["logits"])
    np.save(folder / "labels.npy", LABELS)
    np.save(folder / "point.npy", np.zeros((1, 2), np.float32))
    np.savez(folder / "one.npz", logits=np.zeros((1, 4, 3), np.float32))
    (folder / "broken.npz").write_bytes((folder / "a.npz").read_bytes()[:-100])
    (folder / "empty.npz").write_bytes(b"")
    (folder / "text.txt").write_text("some words\n")
    (folder / "settings.yaml").write_text("data: digits\nmodel: nothing\nepochs: 1\n")
    (folder / "laughs.yaml").write_text("a: &a [x,x]\nb: &b [*a,*a]\nabout: [*b,*b]\n")
    given = np.load(folder / "a.npz")
    fitted = fit_temperature(torch.from_numpy(given["logits"]), torch.from_numpy(given["labels"]))
    fitted.save(folder / "rule.json")
    (folder / "broken.json").write_text((folder / "rule.json").read_text()[:-30])
    save(create("mlp-toy", classes=4), folder / "model")
    os.mkfifo(folder / "pipe.npz")
    os.mkfifo(folder / "pipe.json")
    (folder / "picture.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    shutil.copy(folder / "a.npz", os.fsdecode(os.fsencode(folder) + b"/\xff.npz"))


class Kept:
    """The files that the lines read, and whether they changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_files(folder)
        self.files = {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
        self.names = [os.path.relpath(path, folder.parent) for path in self.files]

    def changed(self) -> list[str]:
        """The changed files, which are restored; new files are removed."""
        odd = [
            path for path, data in self.files.items() if data is not None and not (path.is_file() and path.read_bytes() == data)
        ]
        for path in odd:
            path.write_bytes(self.files[path] or b"")
        for path in self.folder.rglob("*"):
            if path not in self.files:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return [str(path) for path in odd]


def options_of(verb: str) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """The positional and keyword parameters of a verb."""
    function = getattr(importlib.import_module(f"anytime.cli.{verb}"), verb)
    given = list(inspect.signature(function, eval_str=True).parameters.values())
    return [one for one in given if one.kind is one.POSITIONAL_ONLY], [one for one in given if one.kind is one.KEYWORD_ONLY]


OPTIONS = {verb: options_of(verb) for verb in VERBS}


class Line:
    """A random command line."""

    def __init__(self, chance: random.Random, files: list[str], out: str) -> None:
        self.chance, self.files, self.out = chance, files, out

    def words(self) -> list[str]:
        """The whole line."""
        pick, chance = self.chance.choice, self.chance
        if chance.random() < 0.05:
            return [pick([*VERBS, *ODD, "--help", "--version", "-h", *self.files]) for _ in range(chance.randrange(4))]
        verb = chance.choices(list(FREQUENCY), list(FREQUENCY.values()))[0]
        places, names = OPTIONS[verb]
        words = [self.value(one) for one in places]
        if chance.random() < 0.1:
            words = words[: chance.randrange(3)] + [self.any_word() for _ in range(chance.randrange(2))]
        needed = [one for one in names if one.default is one.empty]
        for one in [*needed, *chance.sample(names, min(len(names), chance.choice([0, 1, 1, 2, 3, 5])))]:
            words += self.option(one)
        if verb in ("train", "demo") and chance.random() < 0.9:  # a valid call would train for minutes
            words += pick([["--seed", "-1"], ["--rot", "1"], ["--seed", "x"], ["--out", "/dev/null/x"]])
        if verb == "bench":
            words += ["--requests", pick(["1", "50", "0", "-3", "10" * 20])]
        if verb == "profile":
            words += ["--repeats", pick(["1", "2", "0", "-3", "10" * 20])]
        return [verb, *(["--help"] if chance.random() < 0.01 else []), *words]

    def option(self, one: inspect.Parameter) -> list[str]:
        name = "--" + one.name.strip("_").replace("_", "-")
        if self.chance.random() < 0.02:
            name = self.chance.choice([name[:-1], name + "x", name.upper(), "-" + name[2], name + "="])
        if "bool" in str(one.annotation) and self.chance.random() < 0.95:
            return [name]
        value = self.value(one)
        return self.chance.choice([[name, value], [name, value], [name + "=" + value]])

    def value(self, one: inspect.Parameter) -> str:
        pick = self.chance.choice
        if self.chance.random() < 0.15:
            return self.any_word()
        if one.name in ("out", "page"):
            return self.out
        kind, annotation = KINDS.get(one.name, one.name), str(one.annotation)
        if kind in WORDS and one.name != "model":
            return pick(WORDS[kind])
        if one.name == "model" and "Path" not in annotation:
            return pick([*WORDS["model"], "in/model"])
        if choices := [word for part in _parts(one.annotation) if typing.get_origin(part) is Literal for word in part.__args__]:
            return str(pick(choices))
        for kind in ("int", "float"):
            if kind in annotation:
                return pick(WORDS[kind])
        return pick(self.files)

    def any_word(self) -> str:
        return self.chance.choice([*ODD, *self.files, self.chance.choice(list(WORDS.values()))[0]])


def _parts(annotation: Any) -> list[Any]:
    inner = [part for argument in typing.get_args(annotation) for part in _parts(argument)] if annotation is not None else []
    return [annotation, *inner]


ENDED: Counter[int] = Counter()


class TooLongError(BaseException):
    """A line that does not end when it is interrupted."""


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send SIGINT every few seconds, and give up after a minute."""
    rings = 0

    def ring(number: int, frame: object) -> None:
        nonlocal rings
        rings += 1
        if rings * seconds > SECONDS:
            raise TooLongError
        os.kill(os.getpid(), signal.SIGINT)

    def dropped(lost: Any) -> None:  # raised in a callback, where it is lost; the next signal follows
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(lost)

    before, sys.unraisablehook = signal.signal(signal.SIGALRM, ring), dropped
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = sys.__unraisablehook__


def run_case(case: int, seed: int, kept: Kept) -> str | None:
    """Run a line in this process; returns the problem, if there is one."""
    words = line_of(case, seed, kept)
    where = f"BATTERY={seed}:{case} {[word[:60] for word in words]}"
    out, err = io.StringIO(), io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("ignore")
            with interrupted_after(PATIENCE):
                code = run(words)
    except TooLongError:
        return f"{where}: it does not end"
    except BaseException:
        return f"{where}:\n{traceback.format_exc(limit=-6)}"
    finally:
        torch.set_num_threads(1)
        shutil.rmtree(kept.folder.parent / "out", ignore_errors=True)
    ENDED[code] += 1
    if code not in (0, 1, 2, 130):
        return f"{where}: exit code {code}"
    printed = err.getvalue()
    if "Traceback" in printed or (code == 2 and not ("expected:" in printed and "fix:" in printed)):
        return f"{where}: {code} {printed[-500:]}"
    return f"{where}: {lost} have changed" if (lost := kept.changed()) else None


def line_of(case: int, seed: int, kept: Kept) -> list[str]:
    files = [*kept.names, "in", "nowhere", "in/nowhere.npz"]
    return Line(random.Random(f"{seed}:{case}"), files, "out").words()


def warm_up() -> None:
    """Import what the lines import: a module whose import was interrupted cannot be used later in the same process."""
    for name in (
        "torch._dynamo",
        "torch.onnx",
        "torch.export",
        "sympy.printing",
        "onnxscript",
        "onnxruntime",
        "scipy.optimize",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    lines = (["doctor"], ["profile", "mlp-toy", "--repeats", "1"], ["export", "in/model", "--out", "out"], ["train", "--list"])
    for line in lines:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(line)
    shutil.rmtree("out", ignore_errors=True)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANYTIME_SHARED", raising=False)
    return Kept(tmp_path / "in")


def cases(count: int) -> list[tuple[int, int]]:
    """Seeds and numbers of the cases: the one in the environment, or the first ones."""
    if given := os.environ.get("BATTERY"):
        seed, _, case = given.partition(":")
        return [(int(seed), int(case))]
    return [(SEED, case) for case in range(count)]


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_any_command_line_ends_with_an_exit_code_and_a_message(count: int, kept: Kept) -> None:
    warm_up()
    wrong = []
    for seed, case in cases(count):
        if (found := run_case(case, seed, kept)) is not None:
            wrong.append(found)
            print(found, flush=True)
    assert not wrong, f"{len(wrong)} of {count} lines:\n" + "\n".join(wrong[:20])
    assert len(cases(count)) == 1 or (ENDED[0] > count // 50 and ENDED[2] > count // 5), ENDED


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_real_processes_end_the_same_way(kept: Kept) -> None:
    """A sample in separate processes, half of them with a stdout or stderr that is closed, full or not read to its end."""
    wrong = []
    ends = ["", "", "", "| head -1", "> /dev/full", ">&-", "2>&-", "2> /dev/full | true"]
    for number in range(200):
        case, end = 1_000_000 + number, ends[number % len(ends)]
        words = line_of(case, SEED, kept)
        script = f'"$@" {end}\nexit ${{PIPESTATUS[0]}}'
        timeout = ["timeout", "-s", "INT", "-k", "60", "20"]
        command = ["bash", "-c", script, "bash", *timeout, sys.executable, "-m", "anytime.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        shutil.rmtree("out", ignore_errors=True)
        # 124 is the exit code of `timeout`, which has sent SIGINT.
        if (
            done.returncode not in (0, 1, 2, 124, 130)
            or "Traceback" in done.stderr
            or "ignored" in done.stderr
            or kept.changed()
        ):
            wrong.append(
                f"BATTERY={SEED}:{case} {end} {[word[:60] for word in words]}: {done.returncode} {done.stderr[-1500:]}"
            )
    assert not wrong, f"{len(wrong)} lines:\n" + "\n".join(wrong[:20])
