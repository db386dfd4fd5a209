"""The command `anytime predict` as its users meet it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytime.artifacts import seal
from anytime.cli import predict, run
from anytime.cli.predict import reason
from anytime.combine import Caching, Prediction
from anytime.conformal import fit_conformal_sets
from anytime.data import load_digits
from anytime.data.description import KNOWN
from anytime.data.images import decode_image, read_image
from anytime.data.text import collect_vocabulary, save_tokenizer
from anytime.errors import Overloaded
from anytime.loading.inputs import fit_image, read_input
from anytime.loading.models import open_model
from anytime.models import create, load, save
from anytime.run import Answer

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
SMALL = {
    "exits": 3, "base": 1, "step": 1, "channels": 4, "growth": 2, "growth_factors": (1, 2), "bottleneck_factors": (1, 2),
    "image_size": 16,
}  # fmt: skip
MEAN, STD, WORDS = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7), ("ant", "bee", "cat", "dog")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with a network of three exits and four classes, and inputs beside it."""
    torch.manual_seed(0)
    made: Path = tmp_path_factory.mktemp("run")
    save(create("msdnet-cifar", classes=4, **SMALL).eval(), made / "model")
    (made / "data.json").write_text(json.dumps({"name": "pets", "class_names": WORDS, "mean": MEAN, "std": STD}))
    (made / "config.yaml").write_text("data: pets\n")
    seal(made, ["data.json", "config.yaml"], kind="run")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels[0]).save(made / "pet.png")
    np.save(made / "pixels.npy", pixels)
    return made


def predicted(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert run(["predict", *arguments, "--json", "--engine", "eager"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def expected(folder: Path, rows: int) -> Prediction:
    pixels = torch.from_numpy(np.load(folder / "pixels.npy")[:rows]).permute(0, 3, 1, 2).float() / 255
    ready = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.inference_mode():
        return Caching()(load(folder / "model")(ready))


def test_the_answers_are_the_rules_answers_for_the_networks_logits(folder: Path, capsys: Captured) -> None:
    found = predicted(capsys, str(folder), str(folder / "pixels.npy"))
    wanted = expected(folder, 5)
    labels = [[answer["label"] for answer in exit["answers"]] for exit in found["growth"]]
    assert labels == wanted.labels.tolist()
    for answer, probs in zip(found["answers"], wanted.probs[-1], strict=True):
        assert answer["probability"] == pytest.approx(float(probs.max()), abs=1e-5)
        assert [each["probability"] for each in answer["top"]] == sorted(probs[probs > 0].tolist(), reverse=True)
        assert answer["name"] == WORDS[answer["label"]]
    assert (found["inputs"], found["exits"], found["exit"], found["stopped"]) == (5, 3, 3, "finished")
    assert found["rule"] == repr(Caching())
    assert found["deadline_met"] is None
    assert found["answers"][0]["set"] is None


def test_an_image_is_the_same_as_its_pixels(folder: Path, capsys: Captured) -> None:
    picture = predicted(capsys, str(folder), str(folder / "pet.png"))
    assert picture["growth"][-1]["answers"][0]["probability"] == pytest.approx(
        float(expected(folder, 1).confidence[-1]), abs=1e-5
    )
    inside = predicted(capsys, str(folder / "model"), str(folder / "pet.png"))
    assert inside["answers"] == picture["answers"]
    assert inside["model"] == folder.name


def test_a_published_run_is_a_model_too(tmp_path: Path, capsys: Captured) -> None:
    published = Path(__file__).parents[2] / "results" / "msdnet-cifar100-seed0"
    if not published.is_dir():
        pytest.skip("results/ is not beside the tests")
    np.save(tmp_path / "grey.npy", np.full((32, 32, 3), 128, dtype=np.uint8))
    found = predicted(capsys, str(published), str(tmp_path / "grey.npy"), "--exits", "2")
    assert (found["model"], found["exits"], found["exit"]) == ("msdnet-cifar100-seed0", 7, 2)


def test_words_say_how_the_answer_grew(folder: Path, capsys: Captured) -> None:
    assert run(["predict", str(folder), str(folder / "pet.png"), "--deadline", "1h", "--engine", "eager", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    grown = [line for line in lines if re.match(r"exit +\d +[\d.]+ ms  (ant|bee|cat|dog) +0\.\d{3}|exit .* 1\.000", line)]
    assert len(grown) == 3
    assert "stopped: all exits are done" in lines
    assert any(re.fullmatch(r"(ant|bee|cat|dog), [\d.]+, from exit 3 of 3(, fell back)?", line) for line in lines)
    assert re.search(r"^deadline met: [\d.]+ m?s of 3600.00 s$", out, re.MULTILINE)
    assert "engine: eager" in err
    assert sum(line.startswith("  ") for line in lines) <= 2


def test_exits_and_rules_can_be_chosen(folder: Path, capsys: Captured) -> None:
    found = predicted(capsys, str(folder), str(folder / "pet.png"), "--exits", "2", "--rule", "latest")
    assert (found["exit"], found["stopped"], found["rule"]) == (2, "exits", "Latest()")
    assert [exit["exit"] for exit in found["growth"]] == [1, 2]


def test_a_batch_shows_what_changed_and_every_answer(folder: Path, capsys: Captured) -> None:
    assert run(["predict", str(folder), str(folder / "pixels.npy"), "--engine", "eager"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^exit .* answers changed", out, re.MULTILINE)) == 2
    assert len(re.findall(r"^input \d: (ant|bee|cat|dog)", out, re.MULTILINE)) == 5


def test_a_deadline_too_short_leaves_with_one_and_its_words(folder: Path, capsys: Captured) -> None:
    assert run(["predict", str(folder), str(folder / "pet.png"), "--deadline", "1ns", "--engine", "eager"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the forecast for the first exit" in err


def test_a_deadline_refused_by_the_queue_is_too_short(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise Overloaded("a request behind others", expected="room", fix="try again", retry_after=0.002)

    monkeypatch.setattr(predict, "answer_stream", refuse)
    assert run(["predict", str(folder), str(folder / "pet.png"), "--deadline", "1ms", "--engine", "eager"]) == 1
    err = capsys.readouterr().err
    assert "a deadline of 1ms, too short for the first exit" in err
    assert "about 3 ms or more" in err
    assert "allow more time with --deadline" in err


def test_a_stream_that_ends_early_was_stopped_by_its_deadline() -> None:
    prediction = Prediction(torch.zeros(1, 1), torch.zeros(1, dtype=torch.bool))
    assert reason(Answer(prediction, 1, 3, 0.1, True, None)) == "forecast"
    assert reason(Answer(prediction, 1, 3, 0.1, False, None)) == "deadline"
    assert reason(Answer(prediction, 3, 3, 0.1, False, "finished")) == "finished"


def test_calibration_brings_prediction_sets_and_its_rule(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    chance = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (200,), generator=chance)
    logits = torch.randn(3, 200, 4, generator=chance) + 2 * torch.nn.functional.one_hot(labels, 4)
    fit_conformal_sets(logits, labels, rule="caching").save(tmp_path / "sets.json")
    options = ["--calibration", str(tmp_path / "sets.json")]
    found = predicted(capsys, str(folder), str(folder / "pet.png"), *options)
    assert found["rule"].startswith("Caching")
    assert set(found["answers"][0]["set"]) <= set(range(4))
    assert run(["predict", str(folder), str(folder / "pet.png"), "--engine", "eager", *options]) == 0
    assert re.search(r"prediction set for \d+ %: (ant|bee|cat|dog|empty)", capsys.readouterr().out)
    fit_conformal_sets(logits[:2], labels, rule="caching").save(tmp_path / "sets.json")
    assert run(["predict", str(folder), str(folder / "pet.png"), *options]) == 2
    assert "3 exits and 4 classes" in capsys.readouterr().err


def test_another_size_is_scaled_and_said(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    Image.new("RGBA", (40, 20), (200, 10, 10, 255)).save(tmp_path / "wide.png")
    assert run(["predict", str(folder), str(tmp_path / "wide.png"), "--engine", "eager"]) == 0
    assert "wide.png is 40 × 20: scaled and cropped to 16 × 16" in capsys.readouterr().err


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_a_pixel_are_scaled_to_eight(tmp_path: Path, channels: int) -> None:
    pixels = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    read = np.asarray(read_image(tmp_path / "deep.png", mode="RGB" if channels == 3 else "L")).reshape(5, channels)
    assert read[:, 0].tolist() == [0, 0, 1, 128, 255]


def test_the_centre_of_an_image_is_kept() -> None:
    stripes = np.zeros((16, 48, 3), np.uint8)
    stripes[:, 16:32] = 255
    image = Image.fromarray(stripes)
    assert np.asarray(fit_image(image, 16, like="cifar10")).min() == 255
    assert fit_image(image, 14, like="imagenet").size == (14, 14)
    assert fit_image(image.crop((0, 0, 16, 16)), 16, like="imagenet").size == (16, 16)


def test_one_input_and_a_batch_of_any_kind_of_numbers(folder: Path, tmp_path: Path) -> None:
    opened = open_model(folder)
    pixels = np.load(folder / "pixels.npy")
    ready, _ = read_input(str(folder / "pixels.npy"), opened)
    np.save(tmp_path / "one.npy", pixels[0].transpose(2, 0, 1))
    np.savez(tmp_path / "batch.npz", x=ready.numpy().astype(np.float64), y=np.zeros(5))
    assert torch.equal(read_input(str(tmp_path / "one.npy"), opened)[0], ready[:1])
    assert torch.equal(read_input(str(tmp_path / "batch.npz"), opened)[0], ready)


def test_numbers_alone_suit_a_perceptron(tmp_path: Path, capsys: Captured) -> None:
    save(create("mlp-toy", classes=3), tmp_path / "spiral")
    np.save(tmp_path / "point.npy", np.zeros(2))
    found = predicted(capsys, str(tmp_path / "spiral"), str(tmp_path / "point.npy"))
    assert found["answers"][0]["name"] == f"class {found['answers'][0]['label']}"
    Image.new("L", (4, 4)).save(tmp_path / "grey.png")
    assert run(["predict", str(tmp_path / "spiral"), str(tmp_path / "grey.png")]) == 2
    assert "takes 2 numbers" in capsys.readouterr().err


def test_a_network_without_a_run_needs_its_data_set(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    save(load(folder / "model"), tmp_path / "bare")
    assert run(["predict", str(tmp_path / "bare"), str(folder / "pet.png")]) == 2
    assert "pass --data cifar10" in capsys.readouterr().err
    found = predicted(capsys, str(tmp_path / "bare"), str(folder / "pet.png"), "--data", "cifar10")
    assert found["answers"][0]["name"].startswith("class ")
    same = predicted(capsys, str(tmp_path / "bare"), str(folder / "pet.png"), "--data", str(folder / "data.json"))
    assert same["answers"] == predicted(capsys, str(folder), str(folder / "pet.png"))["answers"]


def test_known_data_sets_have_one_number_per_channel() -> None:
    assert set(KNOWN) == {"cifar10", "cifar100", "imagenet"}
    assert all(len(each.mean) == len(each.std) == 3 for each in KNOWN.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["nowhere", "{run}/pet.png"], "there is no folder nowhere"),
        (["{run}", "{run}/gone.png"], "there is no"),
        (["{run}", "{run}"], "is a folder"),
        (["{run}", "{run}/data.json"], "cannot be decoded"),
        (["{run}", "{tmp}/wrong.npy"], "(2, 3, 9, 9)"),
        (["{run}", "{tmp}/nan.npy"], "NaN"),
        (["{run}", "{tmp}/whole.npy"], "int64"),
        (["{run}", "{tmp}/broken.npy"], "is damaged"),
        (["{run}", "{tmp}/two.npz"], "has a, b"),
        (["{run}", "{run}/pet.png", "--deadline", "soon"], "not a valid duration"),
        (["{run}", "{run}/pet.png", "--deadline=-5ms"], "not a valid duration"),
        (["{run}", "{run}/pet.png", "--exits", "0"], "exits is 0"),
        (["{run}", "{run}/pet.png", "--top", "0"], "--top is 0"),
        (["{run}", "{run}/pet.png", "--rule", "guess"], "there is no 'guess'"),
        (["{run}", "{run}/pet.png", "--engine", "steam"], "engine is 'steam'"),
        (["{run}", "{run}/pet.png", "--data", "mnist"], "there is no data set 'mnist'"),
        (["{run}", "{run}/pet.png", "--data", "{tmp}/odd.json"], "does not describe a data set"),
        (["{run}", "{run}/pet.png", "--data", "{tmp}/ten.json"], "has 10 classes"),
        (["{run}", "{run}/pet.png", "--calibration", "{run}/gone.json"], "there is no"),
        (["{run}", "{run}/pet.png", "--calibration", "{run}/data.json"], "does not hold a fitted object"),
    ],
)
def test_wrong_calls_are_named(folder: Path, tmp_path: Path, capsys: Captured, change: list[str], said: str) -> None:
    np.save(tmp_path / "wrong.npy", np.zeros((2, 3, 9, 9), np.float32))
    np.save(tmp_path / "nan.npy", np.full((3, 16, 16), np.nan))
    np.save(tmp_path / "whole.npy", np.zeros((3, 16, 16), np.int64))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.savez(tmp_path / "two.npz", a=np.zeros(1), b=np.zeros(1))
    (tmp_path / "odd.json").write_text('{"name": "x", "mean": [1], "std": [0], "class_names": []}')
    ten = {"name": "x", "mean": MEAN, "std": STD, "class_names": [str(number) for number in range(10)]}
    (tmp_path / "ten.json").write_text(json.dumps(ten))
    arguments = [part.format(run=folder, tmp=tmp_path) for part in change]
    assert run(["predict", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "fix:" in err


def test_a_run_without_a_network_says_how_to_go_on(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.yaml").write_text("data: digits\n")
    assert run(["predict", str(tmp_path), "x.png"]) == 2
    assert "anytime train --resume" in capsys.readouterr().err


def test_the_product_with_two_classes_is_advised_against_in_this_commands_own_way(tmp_path: Path, capsys: Captured) -> None:
    save(create("mlp-toy", classes=2), tmp_path / "spiral")
    np.save(tmp_path / "point.npy", np.zeros(2))
    for words, times in (([], 0), (["--rule", "product"], 1), (["--rule", "product", "--deadline", "10s"], 1)):
        assert run(["predict", str(tmp_path / "spiral"), str(tmp_path / "point.npy"), "--engine", "eager", *words]) == 0
        assert capsys.readouterr().err.count("anytime: Product with 2 classes") == times


def test_a_text_model_reads_a_text_or_the_lines_of_a_file(tmp_path: Path, capsys: Captured) -> None:
    tokenizer = collect_vocabulary(["who was the first", "where is the river"], size=60)
    torch.manual_seed(0)
    model = create("encoder-tiny", classes=2, vocabulary=len(tokenizer.vocabulary)).eval()
    save(model, tmp_path / "model")
    described = save_tokenizer(tmp_path, tokenizer, length=8)
    words = {"name": "questions", "class_names": ["person", "place"], "mean": [], "std": []}
    (tmp_path / "data.json").write_text(json.dumps({**words, **described}))
    seal(tmp_path, ["data.json", "vocab.txt"], kind="run")
    (tmp_path / "texts.txt").write_text("who was the first\n\nwhere is the river, and who was first there\n")
    alone = predicted(capsys, str(tmp_path), "who was the first")
    assert alone["input"] == "who was the first"
    with torch.inference_mode():
        wanted = Caching()(model(tokenizer.encode(["who was the first"], length=6)[0]))
    assert alone["answers"][0]["probability"] == pytest.approx(float(wanted.confidence[-1]), rel=1e-4)
    both = predicted(capsys, str(tmp_path), str(tmp_path / "texts.txt"))
    assert both["inputs"] == 2
    assert run(["predict", str(tmp_path), str(tmp_path / "texts.txt")]) == 0
    assert "truncated 1 of 2 texts to 8 tokens" in capsys.readouterr().err
    (tmp_path / "texts.md").write_text("who was the first\n")
    for wrong in ("absent.txt", "texts.md", f"{'long ' * 100}.txt"):
        assert run(["predict", str(tmp_path), str(tmp_path / wrong)]) == 2
        assert "one text per line" in capsys.readouterr().err
    (tmp_path / "vocab.txt").unlink()
    assert run(["predict", str(tmp_path), "who"]) == 2
    assert "vocab.txt" in capsys.readouterr().err


def test_a_training_run_stores_its_normalisation_and_classes(tmp_path: Path, capsys: Captured) -> None:
    network = str(SMALL).replace("(", "[").replace(")", "]").replace("'", "")
    options = ["--epochs", "1", "--set", f"options={network}"]
    assert run(["train", "digits-msdnet", "--out", str(tmp_path / "run"), *options]) == 0
    capsys.readouterr()
    test = load_digits(channels=3)["test"]
    doubled = test.images.repeat_interleave(2, -1).repeat_interleave(2, -2)
    np.save(tmp_path / "digits.npy", doubled.numpy())
    found = predicted(capsys, str(tmp_path / "run"), str(tmp_path / "digits.npy"), "--rule", "latest")
    stored = np.load(tmp_path / "run" / "test.npz")
    assert [answer["label"] for answer in found["answers"]] == stored["logits"][-1].argmax(-1).tolist()
    assert found["answers"][0]["name"] in "0123456789"


def test_only_known_image_formats_are_decoded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For PostScript Pillow starts Ghostscript, whatever the file is called."""
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **options: pytest.fail("a program was started"))
    (tmp_path / "evil.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "other.tiff")
    for name in ("evil.png", "other.tiff"):
        assert run(["predict", str(folder), str(tmp_path / name)]) == 2
    for name in ("a.jpg", "a.webp", "a.bmp", "a.gif"):
        Image.new("RGB", (16, 16)).save(tmp_path / name)
        assert read_image(tmp_path / name).size == (16, 16)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    monkeypatch.setattr("anytime.data.images.decode_image.__kwdefaults__", {**decode_image.__kwdefaults__, "most": 100})
    assert run(["predict", str(folder), str(folder / "pet.png")]) == 2
    assert "at most 100 pixels" in capsys.readouterr().err
