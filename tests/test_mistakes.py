"""Common mistakes: each raises an error with what was passed, what was expected and how to fix it.

The first half are calls from Python, the second half command lines, which exit with code 2 and print all three parts on
stderr, nothing on stdout and no traceback.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.checks import check_disjoint
from anytime.cli import run
from anytime.errors import (
    AnytimeError,
    DeviceError,
    DtypeError,
    FormatError,
    InputError,
    IntegrityError,
    LabelError,
    MissingFileError,
    NonFiniteError,
    OptionError,
    OverlapError,
    ScaleError,
    ShapeError,
    StateError,
)

GOOD = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.arange(40) % 5
OTHER = {"logits": GOOD.numpy() + 1, "labels": LABELS.numpy()}
LAUGHS = b"a: &a [x,x]\n" + b"".join(b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in range(97, 110))
BAD = GOOD.clone()
BAD[1, 7, 2] = math.nan


def first_step(batch: int = 4) -> tuple[anytime.Product, anytime.combine.State]:
    rule = anytime.Product()
    return rule, rule.step(rule.start(2), torch.ones(batch, 3))[0]


def step_on_another_device() -> None:
    rule, state = first_step()
    rule.step(state, torch.ones(4, 3, device="meta"))


CALLS: dict[str, tuple[Callable[[], object], type[AnytimeError], str]] = {
    "logits of one exit": (lambda: anytime.Product()(GOOD[0]), ShapeError, "stack"),
    "logits of rank 4": (lambda: anytime.Product()(GOOD[None]), ShapeError, "(exits, batch, classes)"),
    "no exits": (lambda: anytime.Product()(GOOD[:0]), ShapeError, "no exits"),
    "no classes": (lambda: anytime.Product()(GOOD[..., :0]), ShapeError, "no classes"),
    "a list of tensors": (lambda: anytime.Product()(list(GOOD)), DtypeError, "torch.stack"),
    "a path as logits of a rule": (lambda: anytime.Product()("logits.npz"), DtypeError, "str"),
    "None as logits": (lambda: anytime.Product()(None), DtypeError, "NoneType"),
    "integer logits": (lambda: anytime.Product()(GOOD.long()), DtypeError, "int64"),
    "boolean logits": (lambda: anytime.Product()(GOOD > 0), DtypeError, "bool"),
    "complex logits": (lambda: anytime.Product()(GOOD.to(torch.complex64)), DtypeError, "complex"),
    "an array of objects": (lambda: anytime.Product()(np.array([[[None]]])), DtypeError, "object"),
    "an array of strings": (lambda: anytime.Product()(np.array([[["1.0"]]])), DtypeError, "astype"),
    "NaN": (lambda: anytime.Product()(BAD), NonFiniteError, "exit 2, row 7"),
    "infinity": (lambda: anytime.Product()(GOOD / 0.0), NonFiniteError, "exit 1, row 0"),
    "a class masked with -inf": (lambda: anytime.Latest()(GOOD.masked_fill(GOOD < -5, -math.inf)), NonFiniteError, "mask"),
    "a step too many": (lambda: first_step()[0].step(anytime.combine.State(2, 2), GOOD[0]), StateError, "at most 2"),
    "a step of all exits": (lambda: anytime.Product().step(anytime.Product().start(3), GOOD), ShapeError, "rule(logits)"),
    "a step of another batch": (lambda: first_step()[0].step(first_step()[1], torch.ones(5, 3)), ShapeError, "(4, 3)"),
    "a step on another device": (step_on_another_device, DeviceError, "cpu"),
    "a foreign state": (lambda: anytime.Caching().step(first_step()[1], torch.ones(4, 3)), StateError, "start"),
    "no exits to start": (lambda: anytime.Product().start(0), OptionError, "at least 1"),
    "half an exit": (lambda: anytime.Product().start(1.5), OptionError, "whole number"),
    "an unknown rule": (lambda: anytime.parse_rule("prodct"), OptionError, "did you mean 'product'"),
    "an activation as a rule": (lambda: anytime.parse_rule("relu"), OptionError, "latest, caching"),
    "an unknown activation": (lambda: anytime.parse_rule("product(gelu)"), OptionError, "activation"),
    "an activation by name": (lambda: anytime.Product(activation="relu"), OptionError, "ReLU()"),
    "an activation's class": (lambda: anytime.Product(activation=anytime.ReLU), OptionError, "parentheses"),
    "unknown weights": (lambda: anytime.Product(weights="quadratic"), OptionError, "linear"),
    "negative weights": (lambda: anytime.Product(weights=(1, -1)), OptionError, "at least 0"),
    "too few weights": (lambda: anytime.Product(weights=(1.0, 2.0))(GOOD), OptionError, "3 weights"),
    "a clip limit of zero": (lambda: anytime.combine.ClippedReLU(0), OptionError, "above 0"),
    "a negative threshold": (lambda: anytime.combine.ThresholdReLU(-1), OptionError, "Heaviside"),
    "evaluating one exit": (lambda: anytime.evaluate(GOOD[:1], LABELS), ShapeError, "one exit"),
    "evaluating one class": (lambda: anytime.evaluate(GOOD[..., :1], LABELS * 0), ShapeError, "one class"),
    "evaluating nothing": (lambda: anytime.evaluate(GOOD[:, :0], LABELS[:0]), ShapeError, "no samples"),
    "labels counted from one": (lambda: anytime.evaluate(GOOD, LABELS + 1), LabelError, "subtract 1"),
    "labels of another class list": (lambda: anytime.evaluate(GOOD, LABELS * 7), LabelError, "0 to 4"),
    "negative labels": (lambda: anytime.evaluate(GOOD, LABELS - 1), LabelError, "row 0"),
    "rows before exits": (lambda: anytime.evaluate(GOOD.swapaxes(0, 1), LABELS), LabelError, "swapaxes(0, 1)"),
    "labels as texts": (lambda: anytime.evaluate(GOOD, np.array(["cat"] * 40)), DtypeError, "numpy.unique"),
    "a model as logits": (lambda: anytime.evaluate(torch.nn.Linear(2, 2), LABELS), DtypeError, "collect_logits"),
    "a rule with an unknown sign": (lambda: anytime.parse_rule("product(weights=√i)"), OptionError, "docs/rules.md"),
    "a bracket too few": (lambda: anytime.parse_rule("product(relu"), OptionError, "balance the brackets"),
    "a percentage as a confidence": (lambda: anytime.certify(GOOD, LABELS, rule="product", confidence=95), OptionError, "0.95"),
    "too few labels": (lambda: anytime.evaluate(GOOD, LABELS[:-1]), LabelError, "39"),
    "one-hot labels": (lambda: anytime.evaluate(GOOD, torch.eye(5)[LABELS]), DtypeError, "argmax"),
    "labels as floats": (lambda: anytime.evaluate(GOOD, LABELS.double()), DtypeError, "long"),
    "labels in a column": (lambda: anytime.evaluate(GOOD, LABELS[:, None]), ShapeError, "squeeze"),
    "probabilities as logits": (lambda: anytime.evaluate(GOOD.softmax(-1), LABELS), ScaleError, "probabilities=True"),
    "log-probabilities as logits": (lambda: anytime.evaluate(GOOD.log_softmax(-1), LABELS), ScaleError, "log-probabilities"),
    "one exit after its softmax": (
        lambda: anytime.evaluate(torch.cat((GOOD[:2], GOOD[2:].softmax(-1))), LABELS),
        ScaleError,
        "exit 3",
    ),
    "logits as probabilities": (lambda: anytime.evaluate(GOOD, LABELS, probabilities=True), ScaleError, "remove"),
    "samples first": (lambda: anytime.evaluate(GOOD.transpose(0, 1), LABELS), LabelError, "3 inputs"),
    "costs that decrease": (lambda: anytime.evaluate(GOOD, LABELS, costs=[1, 3, 2]), OptionError, "cumsum"),
    "too few costs": (lambda: anytime.evaluate(GOOD, LABELS, costs=[1, 2]), ShapeError, "3 numbers"),
    "costs of zero": (lambda: anytime.evaluate(GOOD, LABELS, costs=[0, 1, 2]), OptionError, "positive"),
    "no rules": (lambda: anytime.evaluate(GOOD, LABELS, rules=[]), OptionError, "at least one"),
    "a rule twice": (lambda: anytime.evaluate(GOOD, LABELS, rules=["latest", "latest"]), OptionError, "twice"),
    "a rule's class": (lambda: anytime.evaluate(GOOD, LABELS, rules={"p": anytime.Product}), OptionError, "create"),
    "blocks of no rows": (lambda: anytime.evaluate(GOOD, LABELS, block_rows=0), OptionError, "at least 1"),
    "sets that miss nothing": (lambda: anytime.conformal.Raps(alpha=0), OptionError, "above 0 and below 1"),
    "the same rows for fitting and testing": (
        lambda: check_disjoint(GOOD, GOOD, names=("fitting", "testing")),
        OverlapError,
        "random split",
    ),
    "an interval upside down": (
        lambda: anytime.Intersection()(torch.ones(2, 1), torch.zeros(2, 1)),
        AnytimeError,
        "lower ends first",
    ),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_in_python_is_explained(mistake: str, explained: Any) -> None:
    explained(*CALLS[mistake])


class Files:
    """A folder of files, good and bad."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        np.savez(folder / "good.npz", logits=GOOD.numpy(), labels=LABELS.numpy())
        np.save(folder / "logits.npy", GOOD.numpy())
        np.save(folder / "labels.npy", LABELS.numpy())
        self.good = (folder / "good.npz").read_bytes()

    def write(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return str(self.folder / name)

    def npz(self, name: str, **arrays: np.ndarray) -> str:
        np.savez(self.folder / name, **arrays)
        return str(self.folder / name)

    def pipe(self, name: str) -> str:
        os.mkfifo(self.folder / name)
        return str(self.folder / name)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def flipped(self) -> bytes:
        data = bytearray(self.good)
        data[len(data) // 3] ^= 0x40
        return bytes(data)

    def pickle_in_npz(self) -> str:
        member = io.BytesIO()
        np.lib.format.write_array(member, np.array([[[print]]], dtype=object), allow_pickle=True)
        with zipfile.ZipFile(self.folder / "pickle.npz", "w") as archive:
            archive.writestr("logits.npy", member.getvalue())
        return self.path("pickle.npz")

    def lying_header(self) -> str:
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": (9, 10**9, 10)})
        return self.write("lying.npy", member.getvalue() + b"\0" * 64)


SHELL: dict[str, tuple[Callable[[Files], list[str]], str]] = {
    "no verb that exists": (lambda f: ["evaluat", f.path("good.npz")], "evaluat"),
    "no file": (lambda f: ["evaluate"], "FILE"),
    "two files": (lambda f: ["evaluate", f.path("good.npz"), f.path("good.npz")], "good.npz"),
    "an unknown option": (lambda f: ["evaluate", f.path("good.npz"), "--rulez", "latest"], "--rules"),
    "a seed that is not a number": (lambda f: ["evaluate", f.path("good.npz"), "--seed", "one"], "seed"),
    "an unknown kind of sets": (lambda f: ["evaluate", f.path("good.npz"), "--sets", "aps"], "sets"),
    "a file that is not there": (lambda f: ["evaluate", f.path("nowhere.npz")], "no file"),
    "a folder": (lambda f: ["evaluate", str(f.folder)], "in a folder, every file is read"),
    "an empty file": (lambda f: ["evaluate", f.write("empty.npz", b"")], "empty"),
    "a text file": (lambda f: ["evaluate", f.write("logits.csv", b"1,2,3")], ".npz"),
    "a file without an ending": (lambda f: ["evaluate", f.write("logits", f.good)], ".safetensors"),
    "a torch checkpoint": (lambda f: ["evaluate", f.write("logits.pt", pickle.dumps(1))], "pickle"),
    "text called npz": (lambda f: ["evaluate", f.write("text.npz", b"hello, logits")], "damaged"),
    "text called npy": (lambda f: ["evaluate", f.write("text.npy", b"hello, logits")], "damaged"),
    "text called safetensors": (lambda f: ["evaluate", f.write("text.safetensors", b"hello, logits")], "damaged"),
    "a truncated npz": (lambda f: ["evaluate", f.write("short.npz", f.good[:-200])], "damaged"),
    "a truncated npy": (
        lambda f: ["evaluate", f.write("short.npy", (f.folder / "logits.npy").read_bytes()[:-9])],
        "damaged",
    ),
    "a flipped bit": (lambda f: ["evaluate", f.write("flipped.npz", f.flipped())], "damaged"),
    "a header that lies": (lambda f: ["evaluate", f.lying_header()], "damaged"),
    "a pickle inside an npz": (lambda f: ["evaluate", f.pickle_in_npz()], "pickle"),
    "other keys": (lambda f: ["evaluate", f.npz("keys.npz", output=GOOD.numpy())], "'output'"),
    "an empty archive": (lambda f: ["evaluate", f.npz("nothing.npz")], "logits"),
    "labels that are not there": (lambda f: ["evaluate", f.path("logits.npy"), "--labels", f.path("no.npy")], "no file"),
    "labels without their key": (
        lambda f: ["evaluate", f.path("logits.npy"), "--labels", f.npz("targets.npz", y=LABELS.numpy())],
        "labels",
    ),
    "logits as labels": (lambda f: ["evaluate", f.path("logits.npy"), "--labels", f.path("logits.npy")], "integers"),
    "labels as logits": (lambda f: ["evaluate", f.path("labels.npy")], "rank 1"),
    "labels counted from one": (
        lambda f: ["evaluate", f.npz("one.npz", logits=GOOD.numpy(), labels=LABELS.numpy() + 1)],
        "subtract 1",
    ),
    "NaN in the file": (lambda f: ["evaluate", f.npz("nan.npz", logits=BAD.numpy(), labels=LABELS.numpy())], "exit 2, row 7"),
    "probabilities in the file": (lambda f: ["evaluate", f.npz("p.npz", logits=GOOD.softmax(-1).numpy())], "--probabilities"),
    "logits called probabilities": (lambda f: ["evaluate", f.path("good.npz"), "--probabilities"], "remove"),
    "one exit in the file": (lambda f: ["evaluate", f.npz("exit.npz", logits=GOOD[:1].numpy())], "one exit"),
    "an array of strings": (lambda f: ["evaluate", f.npz("words.npz", logits=np.array([["a"]]))], "numbers"),
    "structured logits": (lambda f: ["evaluate", f.npz("rec.npz", logits=np.zeros(3, dtype=[("a", "f4")]))], "numbers"),
    "an unknown rule": (lambda f: ["evaluate", f.path("good.npz"), "--rules", "latest,prodct"], "product"),
    "rules that cannot be read": (lambda f: ["evaluate", f.path("good.npz"), "--rules", "product(relu"], "brackets"),
    "no rules at all": (lambda f: ["evaluate", f.path("good.npz"), "--rules", ""], "rule"),
    "costs in words": (lambda f: ["evaluate", f.path("good.npz"), "--costs", "few,more,many"], "numbers"),
    "too many costs": (lambda f: ["evaluate", f.path("good.npz"), "--costs", "1,2,3,4"], "3 numbers"),
    "a negative seed": (lambda f: ["evaluate", f.path("good.npz"), "--seed", "-1"], "seed is -1"),
    "a seed beyond 64 bits": (lambda f: ["tune", f.path("good.npz"), "--seed", str(2**64)], "seed is"),
    "a seed for sets": (lambda f: ["conformal", f.path("good.npz"), f.npz("b.npz", **OTHER), "--seed", "-1"], "seed is -1"),
    "a seed for training": (lambda f: ["train", "digits-msdnet", "--seed", "-1", "--out", f.path("run")], "seed is -1"),
    "a seed for the demo": (lambda f: ["demo", "--seed", "-1", "--out", f.path("run")], "seed is -1"),
    "weights in words": (lambda f: ["evaluate", f.path("good.npz"), "--rules", "product(weights=(a,b,c))"], "weights"),
    "a batch beyond all memory": (lambda f: ["profile", "mlp-toy", "--batch", "99999999999"], "--batch"),
    "inputs beyond all memory": (lambda f: ["profile", "mlp-toy", "--input-shape", "1048576,1048576"], "GiB"),
    "an input shape in words": (lambda f: ["profile", "mlp-toy", "--input-shape", "wide"], "--input-shape"),
    "too many threads": (lambda f: ["profile", "mlp-toy", "--threads", "99999999999"], "threads"),
    "too many repeats": (lambda f: ["profile", "mlp-toy", "--repeats", "99999999999"], "--repeats"),
    "too many processes": (lambda f: ["train", "digits-msdnet", "--processes", "99999", "--out", f.path("run")], "processes"),
    "a path that is too long": (lambda f: ["evaluate", f.path("x" * 5000 + ".npz")], "cannot be read"),
    "a folder that is too long": (lambda f: ["predict", f.path("x" * 5000), "x.npy"], "x"),
    "a rule's path that is too long": (lambda f: ["certify", f.path("good.npz"), "--rule", "x" * 5000 + ".json"], "read"),
    "a pipe as logits": (lambda f: ["evaluate", f.pipe("pipe.npz")], "is a pipe"),
    "a pipe as a rule": (lambda f: ["evaluate", f.path("good.npz"), "--rules", f.pipe("pipe.json")], "is a pipe"),
    "a pipe as settings": (lambda f: ["train", "--config", f.pipe("pipe.yaml"), "--out", f.path("run")], "is a pipe"),
    "settings that repeat themselves": (
        lambda f: ["train", "--config", f.write("a.yaml", LAUGHS), "--out", f.path("run")],
        "alias",
    ),
    "a setting that repeats itself": (
        lambda f: ["train", "digits-msdnet", "--set", "options=&a [*a]", "--out", f.path("run")],
        "alias",
    ),
    "a file as the output folder": (lambda f: ["evaluate", f.path("good.npz"), "--out", f.path("labels.npy")], "labels.npy"),
    "an output folder inside a file": (
        lambda f: ["evaluate", f.path("good.npz"), "--out", f.path("labels.npy/run")],
        "labels.npy",
    ),
}


@pytest.mark.parametrize("mistake", SHELL)
def test_a_mistake_on_the_command_line_is_explained(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Files(tmp_path)
    arguments, hint = SHELL[mistake]
    command = arguments(files)
    before = sorted(tmp_path.rglob("*"))
    assert run(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert hint in err
    assert "expected:" in err
    assert "fix:" in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before, "nothing half-written"


def test_every_kind_of_wrong_input_is_among_the_mistakes() -> None:
    tried = {kind for _, kind, _ in CALLS.values()}
    assert {*InputError.__subclasses__(), OptionError, StateError} <= tried


def test_errors_are_also_what_python_programmers_catch() -> None:
    with pytest.raises(ValueError):
        anytime.parse_rule("nonsense")
    with pytest.raises(TypeError):
        anytime.Product()(None)
    with pytest.raises(FileNotFoundError):
        anytime.open_logits("nowhere.npz")
    for kind in (MissingFileError, IntegrityError, FormatError):
        assert issubclass(kind, AnytimeError)


def test_a_threshold_beyond_all_logits_leaves_nothing_and_one_beyond_float32_is_refused() -> None:
    for mode in ("gate", "clamp"):
        found = anytime.Product(anytime.combine.ThresholdReLU(1e30, mode=mode))(GOOD)
        assert bool(found.log_probs.exp().sum(-1).sub(1).abs().max() < 1e-5)
    assert bool(anytime.Product(anytime.combine.ThresholdReLU(1e30))(GOOD).fell_back.all())
    with pytest.raises(OptionError, match="threshold is"):
        anytime.combine.ThresholdReLU(1e39)


def test_logits_beyond_float32_can_be_calibrated_on(capsys: pytest.CaptureFixture[str]) -> None:
    from anytime.calibrate import fit_product

    for scale in (1e30, 1e100, 1e299):
        assert math.isfinite(fit_product(GOOD.double() * scale, LABELS, steps=5).loss)


def test_a_file_name_that_is_not_utf_8_is_read_and_reported(tmp_path: Path) -> None:
    files = Files(tmp_path)
    name = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.npz")
    Path(name).write_bytes(files.good)
    assert run(["evaluate", name, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert "b?.npz" in (tmp_path / "run" / "report.html").read_text()
