"""Damaged files of every kind that the library reads, through the functions that read them.

Each case damages one sample file: bits, cuts, insertions, parts that change places, numbers and values that nobody would
write, files of another kind. A checksum in the way is renewed half of the time, so that what lies behind it is reached too.
What becomes of it is a result or a typed error, within a time limit, and the files stay as they are.

A failure names its seed and case; `python -m pytest tests/long/test_damaged_files.py` with `BATTERY=SEED:CASE` in the
environment runs that case alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import tarfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.artifacts import json_text, tensors_to_bytes, write_bundle
from anytime.calibrate import fit_product, fit_temperature
from anytime.checks import check_logits
from anytime.cli.curve import write_curve
from anytime.cli.logits import refuse_same_file
from anytime.cli.rules import read_rule
from anytime.conformal import fit_conformal_sets
from anytime.data import ImageData, Split, hold_out, load_digits, load_text
from anytime.data.cifar_archive import ARCHIVES, read_archive
from anytime.data.cifar_shards import read_shards
from anytime.data.description import read_description
from anytime.data.images import read_image
from anytime.data.text import collect_vocabulary, load_tokenizer, save_tokenizer
from anytime.data.wordpiece import WordPiece
from anytime.errors import AnytimeError
from anytime.fitted import _checksum
from anytime.loading.inputs import read_array, read_texts
from anytime.models import AveragedEnsemble, create, load, save
from anytime.models.base import MultiExit
from anytime.models.text.pretrained import load_pretrained
from anytime.policy import Confidence
from anytime.reproduce.runs import read_run
from anytime.run import Profile
from anytime.run.export import load_exported
from anytime.train import checkpoint
from anytime.train.checkpoint import TrainState
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.rows import RowsStep
from anytime.train.log import CsvLog
from anytime.train.objectives.losses import joint_cross_entropy, on_logits
from anytime.train.run import _read_result
from anytime.train.settings import read_pair, read_settings, resolve
from anytime.train.start import start_network

SECONDS, SEED, MEGABYTES = 30, 15, 1500
NUMBERS = ["0", "-1", "1", "2", "255", "65536", "4294967296", "1000000000000", "9" * 30, "9" * 5000, "1e999", "-1e999", "1e39"]
VALUES: list[Any] = [None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**30, -(10**400), 0.5, 1e308, -1e-308, "", "x", "nan"]
VALUES += ["\ud800", "é" * 9, "../x", [], {}, [[]], [None], {"a": 1}, ["x"] * 50, [1] * 2000, {"float": "nan"}, {"dict": {}}]
VALUES += [{"tensor": "int64", "shape": [2, -2], "data": [1]}, {"tensor": "float32", "shape": [10**12], "data": "AAAA"}]
LABELS = np.arange(60) % 5
LOGITS = (np.random.default_rng(0).normal(size=(3, 60, 5)) * 2 + 2 * np.eye(5)[LABELS]).astype("f4")


@dataclass(frozen=True)
class Kind:
    """A kind of file: what makes good ones in a folder, which of these are damaged, and what reads the folder.

    Attributes:
        make: Writes good files.
        damaged: The files to damage, by name.
        read: Reads them.
        share: How often it is taken: what is slow is taken less often.
    """

    make: Callable[[Path], object]
    damaged: tuple[str, ...]
    read: Callable[[Path], object]
    share: float = 1.0


def save_npz(writer: Callable[..., None]) -> Callable[[Path], None]:
    return lambda folder: writer(folder / "a.npz", logits=LOGITS, labels=LABELS, indices=np.arange(60))


def read_logits(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        source = anytime.open_logits(folder / name)
        check_logits(source.logits[...])
        refuse_same_file(source.path, source.labels, Path(__file__), None)

    return read


def make_safetensors(folder: Path) -> None:
    tensors = {"logits": torch.from_numpy(LOGITS), "labels": torch.from_numpy(LABELS)}
    (folder / "a.safetensors").write_bytes(tensors_to_bytes(tensors))


def make_fitted(folder: Path) -> None:
    logits, labels = torch.from_numpy(LOGITS), torch.from_numpy(LABELS)
    fit_temperature(logits, labels).save(folder / "temperature.json")
    fit_product(logits, labels, steps=3).save(folder / "product.json")
    fit_conformal_sets(logits, labels, rule=anytime.Product()).save(folder / "sets.json")


def read_fitted(folder: Path) -> None:
    for path in folder.glob("*.json"):
        for read in (anytime.load, lambda path: read_rule(str(path))):
            with contextlib.suppress(AnytimeError):
                read(path)


def make_settings(folder: Path) -> None:
    text = "data: digits\nmodel: msdnet-cifar\nepochs: 3\nlr: 1e-3\nmilestones: [0.5, 0.75]\noptions: {layers: [6], a: b}\n"
    (folder / "a.yaml").write_text(text + "exit_weights: [1, 2]\nl2w: {strength: 0.5}\nabout: &x some words\nseed: 3\n")


def read_yaml(folder: Path) -> None:
    with contextlib.suppress(AnytimeError):
        read_pair("options=" + (folder / "a.yaml").read_bytes()[:300].decode("latin1"))
    resolve(read_settings(folder / "a.yaml"))


def make_log(folder: Path) -> None:
    lines = "".join(f"{epoch},{10 * epoch},0.1,1.5,0.7,0.5,0.6,100,2\n" for epoch in range(1, 9))
    header = "epoch,step,lr,loss_1,loss_2,val_accuracy_1,val_accuracy_2,images_per_second,seconds\n"
    (folder / "log.csv").write_text(header + lines)


def read_csv(folder: Path) -> None:
    copy = folder.parent / "copy.csv"  # a run that goes on writes its log anew
    shutil.copy(folder / "log.csv", copy)
    CsvLog(copy).start(40)
    write_curve(folder / "log.csv", folder.parent / "curve.svg")


def make_summary(folder: Path) -> None:
    found = {"steps": 36, "test_accuracy": [0.5, 0.6], "expected_accuracy": [0.4, 0.5], "tolerance": 0.1, "missed_exits": [1]}
    (folder / "summary.json").write_text(json_text({"data": "digits", "seconds": 3.5, **found}))


class Small(MultiExit):
    """Two exits on digits."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList((nn.Linear(64, 8), nn.Linear(8, 8)))
        self.heads = nn.ModuleList((nn.Linear(8, 10), nn.Linear(8, 10)))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        x = x.flatten(1)
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x).relu()
            yield head(x)


def training() -> RowsStep:
    data: ImageData = load_digits()["train"].take(torch.arange(64))
    return RowsStep(Small(), data, on_logits(joint_cross_entropy), TrainConfig(epochs=2, batch=32), Hardware())


def make_network(folder: Path) -> None:
    save(create("mlp-toy", classes=4), folder)


def make_exported(folder: Path) -> None:
    from anytime.run.export import export

    export(create("mlp-toy", classes=4), folder, rule=anytime.Product(), example=torch.zeros(1, 2))


def make_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = {"split": ["train"] * 40 + ["test"] * 20, "text": [f"text é {row}" for row in range(60)], "label": ["a", "b"] * 30}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "trec.parquet")


def make_images(folder: Path) -> None:
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 20, 3)).astype(np.uint8))
    for ending in ("png", "jpg", "webp", "bmp", "gif"):
        picture.save(folder / f"a.{ending}")


def read_images(folder: Path) -> None:
    for path in folder.glob("a.*"):
        with contextlib.suppress(AnytimeError):
            read_image(path)


def make_shards(folder: Path) -> None:
    from PIL import Image

    stored = io.BytesIO()
    Image.new("RGB", (3200, 320)).save(stored, "WEBP", lossless=True)
    sheet = {"sheets": np.frombuffer(stored.getvalue(), np.uint8), "offsets": np.array([0, len(stored.getvalue())])}
    labels = {"y_train": np.arange(1000) % 10, "y_test": np.arange(1000) % 10}
    np.savez(folder / "shard0.npz", **sheet)
    np.savez(folder / "shard1.npz", **sheet, **labels, class_names=np.array([f"class {number}" for number in range(10)]))


def make_archive(folder: Path) -> None:
    archive, place = ARCHIVES["cifar10"], folder / ARCHIVES["cifar10"].folder
    place.mkdir()
    records = np.ones((5, 3073), np.uint8)
    for name in (*archive.train, *archive.test):
        (place / name).write_bytes(records.tobytes())
    (place / archive.names).write_text("x\n" * 10)
    with tarfile.open(folder / archive.file, "w:gz") as tar:
        tar.add(place, archive.folder)


def make_texts(folder: Path) -> None:
    tokenizer = collect_vocabulary(["some words", "other words é"], size=60)
    (folder / "data.json").write_text(json.dumps(save_tokenizer(folder, tokenizer, length=8)))
    model = {"type": "WordPiece", "vocab": dict(tokenizer.vocabulary), "max_input_chars_per_word": 100}
    rest = {"normalizer": {"type": "BertNormalizer", "lowercase": True}, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, **rest}))
    (folder / "lines.txt").write_text("one text\nanother é\n")


def read_tokenizers(folder: Path) -> None:
    for read in (
        load_tokenizer,
        lambda at: WordPiece.load(at / "tokenizer.json"),
        lambda at: read_texts(str(at / "lines.txt")),
    ):
        with contextlib.suppress(AnytimeError):
            read(folder)


def make_description(folder: Path) -> None:
    words = {"name": "x", "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "class_names": ["a", "b"]}
    (folder / "data.json").write_text(json.dumps(words))
    (folder / "split.json").write_text(hold_out(50, 10).to_json())


def read_descriptions(folder: Path) -> None:
    with contextlib.suppress(AnytimeError):
        read_description(folder / "data.json")
    Split.from_json((folder / "split.json").read_bytes().decode("latin1"), path=folder / "split.json")


def make_pretrained(folder: Path) -> None:
    make_texts(folder)
    shape = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 16, **shape}))
    (folder / "model.safetensors").write_bytes(tensors_to_bytes({"embeddings.word_embeddings.weight": torch.zeros(20, 8)}))


def read_pretrained(folder: Path) -> None:
    with contextlib.suppress(AnytimeError):
        load_pretrained(folder)
    start_network("minilm-l6", TrainConfig(), classes=2, init=folder)


def make_published(folder: Path) -> None:
    config = {"data": "cifar10", "model": "mlp-toy", "recipe": {"objective": "joint", "seed": 0}}
    figures = {"exits": 3, "samples": 60, "classes": 5, "rules": {"latest": {"accuracy": [0.5, 0.6, 0.7]}}}
    np.savez(folder / "logits", logits=LOGITS, labels=LABELS, indices=np.arange(60))
    sample = (folder / "logits.npz").read_bytes()
    (folder / "logits.npz").unlink()
    files = {"config.json": json.dumps(config).encode(), "test-metrics.json": json.dumps(figures).encode()}
    write_bundle(folder, {**files, "test-sample.npz": sample})


def read_published(folder: Path) -> None:
    run = read_run(folder)
    for ask in (run.logits, run.indices, run.rows, run.metrics, run.accuracy, run.load):
        with contextlib.suppress(AnytimeError):
            ask()


def read_arrays(folder: Path) -> None:
    for name in ("a.npy", "a.npz"):
        with contextlib.suppress(AnytimeError):
            read_array(folder / name)


def make_arrays(folder: Path) -> None:
    np.save(folder / "a.npy", LOGITS[0])
    np.savez_compressed(folder / "a.npz", x=LOGITS[0])


def make_checkpoint(folder: Path) -> None:
    checkpoint.save(folder, training(), TrainState(3, 1.5))


def make_backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 5))


def make_saved(folder: Path) -> None:
    logits, labels = torch.from_numpy(LOGITS), torch.from_numpy(LABELS)
    temperature = fit_temperature(logits, labels)
    members = [anytime.attach_exits(make_backbone(), at=["1", "2"], example=torch.zeros(1, 1, 4, 4)) for _ in range(2)]
    members[1].heads[0].linear.bias = members[0].heads[0].linear.bias
    anytime.save(
        AveragedEnsemble(members),
        folder,
        rule="latest",
        calibration=(temperature, fit_conformal_sets(logits, labels, rule=temperature.rule_for(anytime.Latest()))),
        policy=Confidence((0.5, 0.6, 0.7)),
        profile=Profile(3, 5, "eager", 1, {}, (1,), torch.ones(1, 3, 4), torch.ones(1, 3, 4), 1),
        class_names=list("abcde"),
        normalisation=([0.5], [0.5]),
    )


SAVED = ("config", "runner", "policy", "profile", "data", "calibration-1", "calibration-2", "manifest")


def build_saved() -> Any:
    shared: list[nn.Module] = []

    def build() -> nn.Module:
        made = anytime.attach_exits(make_backbone(), at=["1", "2"], example=torch.zeros(1, 1, 4, 4))
        shared.append(made.heads[0].linear)
        made.heads[0].linear.bias = shared[0].bias
        return made

    return build


def read_saved(folder: Path) -> None:
    anytime.Runner.load(folder, build=build_saved()).close()


def make_attached(folder: Path) -> None:
    anytime.save(anytime.attach_exits(make_backbone(), at=["1"], example=torch.zeros(1, 1, 4, 4)), folder)


KINDS: dict[str, Kind] = {
    "npz": Kind(save_npz(np.savez), ("a.npz",), read_logits("a.npz"), 2),
    "compressed npz": Kind(save_npz(np.savez_compressed), ("a.npz",), read_logits("a.npz"), 2),
    "npy": Kind(lambda folder: np.save(folder / "a.npy", LOGITS), ("a.npy",), read_logits("a.npy")),
    "safetensors": Kind(make_safetensors, ("a.safetensors",), read_logits("a.safetensors")),
    "fitted objects": Kind(make_fitted, ("temperature.json", "product.json", "sets.json"), read_fitted),
    "settings": Kind(make_settings, ("a.yaml",), read_yaml),
    "log": Kind(make_log, ("log.csv",), read_csv),
    "summary": Kind(make_summary, ("summary.json",), _read_result),
    "checkpoint": Kind(
        make_checkpoint,
        ("state.json", "model.safetensors", "optimizer.safetensors", "manifest.json"),
        lambda folder: checkpoint.load(folder, training()),
        0.5,
    ),
    "network": Kind(make_network, ("config.json", "model.safetensors", "manifest.json"), load),
    "saved model": Kind(
        make_saved,
        ("model.safetensors", *(f"{name}.json" for name in SAVED)),
        read_saved,
        0.7,
    ),
    "attached exits": Kind(
        make_attached,
        ("config.json", "model.safetensors", "manifest.json"),
        lambda folder: anytime.load(folder, build=make_backbone),
        0.7,
    ),
    "images": Kind(make_images, ("a.png", "a.jpg", "a.webp", "a.bmp", "a.gif"), read_images),
    "CIFAR shards": Kind(make_shards, ("shard0.npz", "shard1.npz"), lambda folder: read_shards(folder, classes=10), 0.3),
    "CIFAR archive": Kind(
        make_archive,
        (ARCHIVES["cifar10"].file,),
        lambda folder: read_archive(folder / ARCHIVES["cifar10"].file, "cifar10", verify=False),
        0.5,
    ),
    "CIFAR unpacked": Kind(
        make_archive,
        tuple(f"{ARCHIVES['cifar10'].folder}/{name}" for name in ("data_batch_1.bin", "test_batch.bin", "batches.meta.txt")),
        lambda folder: read_archive(folder / ARCHIVES["cifar10"].folder, "cifar10", verify=False),
    ),
    "texts": Kind(make_texts, ("vocab.txt", "data.json", "tokenizer.json", "lines.txt"), read_tokenizers),
    "descriptions": Kind(make_description, ("data.json", "split.json"), read_descriptions),
    "pretrained encoder": Kind(make_pretrained, ("config.json", "model.safetensors", "vocab.txt"), read_pretrained, 0.5),
    "published run": Kind(
        make_published, ("config.json", "test-metrics.json", "test-sample.npz", "manifest.json"), read_published
    ),
    "input arrays": Kind(make_arrays, ("a.npy", "a.npz"), read_arrays),
}
if importlib.util.find_spec("pyarrow"):
    KINDS["parquet"] = Kind(make_parquet, ("trec.parquet",), lambda folder: load_text("trec", folder))
if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnxscript"):
    KINDS["exported stages"] = Kind(
        make_exported, ("exported.json", "stage_1.onnx", "stage_2.onnx", "manifest.json"), load_exported, 0.3
    )


def damage(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """What becomes of a file."""
    way = chance.choice([flip, flip, cut, insert, remove, repeat, blank, swap, number, number, value, value, splice])
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        data = way(data, chance, others)
    return data


def flip(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        if changed:
            # Heads and tails say the most.
            place = chance.choice([chance.randrange(len(changed)), chance.randrange(min(200, len(changed))), -1])
            changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    return data[: chance.choice([0, 1, chance.randrange(len(data) + 1), max(0, len(data) - chance.randrange(1, 30))])]


def insert(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    more = chance.choice([chance.randbytes(chance.randrange(1, 40)), b"\0", b"[" * 5000, b"\xff\xfe", b"'\"\n", b"9" * 5000])
    return data[:place] + more + data[place:]


def remove(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + data[place + chance.randrange(1, 40) :]


def repeat(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + data[max(0, place - chance.randrange(1, 400)) :]


def blank(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    place, length = chance.randrange(len(data) + 1), chance.randrange(1, 40)
    return data[:place] + chance.choice([b"\0", b"\xff", b" "]) * len(data[place : place + length]) + data[place + length :]


def swap(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    a, b, c = sorted(chance.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def number(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    found = list(re.finditer(rb"\d+", data[:100_000]))
    if not found:
        return flip(data, chance, others)
    one = chance.choice(found)
    return data[: one.start()] + chance.choice(NUMBERS).encode() + data[one.end() :]


def value(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """Another value somewhere in a document of JSON."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return number(data, chance, others)
    places: list[tuple[Any, Any]] = []
    rest = [document]
    while rest:
        part = rest.pop()
        keys = part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        places += [(part, key) for key in list(keys)[:50]]
        rest += [part[key] for key in list(keys)[:50]]
    if not places or chance.random() < 0.05:
        return json.dumps(chance.choice(VALUES)).encode()
    part, key = chance.choice(places)
    if isinstance(part, dict) and chance.random() < 0.2:
        del part[key]
    else:
        part[key] = chance.choice(VALUES)
    return json.dumps(document).encode()


def splice(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """A file of another kind, or a part of it."""
    other = chance.choice(others)
    place = chance.randrange(len(data) + 1)
    return chance.choice([other, data[:place] + other[min(place, len(other)) :], data + other])


def renew(folder: Path, name: str) -> None:
    """Make the checksums fit what a file holds now, where there are any."""
    data = (folder / name).read_bytes()
    manifest = folder / "manifest.json"
    if manifest.is_file() and name != "manifest.json":
        document = json.loads(manifest.read_text())
        document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(document))
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(data)
        if isinstance(document, dict) and "sha256" in document:
            body = {key: part for key, part in document.items() if key != "sha256"}
            (folder / name).write_text(json.dumps({**body, "sha256": _checksum(body)}))


class TooLongError(BaseException):
    """A case that takes longer than it may."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run_case(case: int, seed: int, samples: dict[str, Path], place: Path) -> str | None:
    """Damage a file and read it; gives what went wrong, if something did."""
    chance = random.Random(f"{seed}:{case}")
    names = list(KINDS)
    kind = chance.choices(names, [KINDS[name].share for name in names])[0]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(samples[kind], place)
    name = chance.choice(KINDS[kind].damaged)
    others = [(samples[other] / file).read_bytes() for other in chance.sample(names, 2) for file in KINDS[other].damaged[:1]]
    (place / name).write_bytes(damage((place / name).read_bytes(), chance, others))
    if chance.random() < 0.5:
        renew(place, name)
    before, where = contents(place), f"BATTERY={seed}:{case} ({kind}, {name})"
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind].read(place)
    except AnytimeError as error:
        if not (error.got and error.expected and error.fix):
            return f"{where}: an error without words"
    except TooLongError:
        return f"{where}: more than {SECONDS} s"
    except BaseException:
        return f"{where}:\n{traceback.format_exc(limit=-6)}"
    return None if contents(place) == before else f"{where}: the files have changed"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good files of each kind, which are read without an error."""
    made = {}
    for name, kind in KINDS.items():
        made[name] = tmp_path_factory.mktemp("sample")
        torch.manual_seed(0)
        kind.make(made[name])
        assert all((made[name] / file).is_file() for file in kind.damaged), name
        with contextlib.suppress(AnytimeError if name == "pretrained encoder" else ()):  # it lacks weights
            kind.read(made[name])
    return made


def cases(count: int) -> list[tuple[int, int]]:
    """Seeds and numbers of the cases: those asked for by the environment, or the first ones."""
    if given := os.environ.get("BATTERY"):
        seed, _, case = given.partition(":")
        return [(int(seed), int(case))]
    return [(SEED, case) for case in range(count)]


@pytest.mark.parametrize(
    "count",
    [pytest.param(400, id="a few"), pytest.param(10_000, id="many", marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)
def test_a_damaged_file_gives_a_result_or_a_typed_error(count: int, samples: dict[str, Path], tmp_path: Path) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = []
    for seed, case in cases(count):
        if (found := run_case(case, seed, samples, tmp_path / "case")) is not None:
            wrong.append(found)
            print(found, flush=True)
    assert not wrong, f"{len(wrong)} of {count} cases:\n" + "\n".join(wrong[:20])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) >> 10
    assert grown < MEGABYTES, f"{grown} MB of memory"
