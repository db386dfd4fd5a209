"""The studies of further networks and of finetuning: on runs in a folder, against plain loops, and with missing runs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from anytime.artifacts import read_bundle, write_bundle
from anytime.errors import FormatError, MissingFileError
from anytime.reproduce import find
from anytime.reproduce.runs import Runs

Publish = Callable[..., Path]


def softplus_product(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The product with softplus and weights of one, written out."""
    out = np.empty_like(logits)
    for row in range(logits.shape[1]):
        total = np.ones(logits.shape[2])
        for exit in range(len(logits)):
            total = total * np.log1p(np.exp(logits[exit, row]))
            out[exit, row] = total / total.sum()
    return out


def calibration_error(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """ECE of one exit: 15 bins of equal width, closed on the left, the last on both sides."""
    confidence, right = probabilities.max(-1), probabilities.argmax(-1) == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [
        abs(right[bins == place].mean() - confidence[bins == place].mean()) * (bins == place).mean()
        for place in range(15)
        if (bins == place).any()
    ]
    return float(sum(gaps))


def two_runs(publish: Publish) -> Runs:
    publish("msdnet", seed=0)
    return Runs.open(publish("tuned", objective="joint-then-product", seed=1))


def test_the_finetuned_network_is_measured_under_its_training_product(publish: Publish) -> None:
    runs = two_runs(publish)
    found = find("finetune").run(runs)
    logits, labels = runs.find("msdnet-finetuned", "cifar100")[0].logits()
    plain = softplus_product(logits.double().numpy())
    numbers = found.numbers["cifar100"]
    expected = [calibration_error(each, labels.numpy()) for each in plain]
    assert numbers["finetuned"]["ece"][0] == pytest.approx(expected, abs=1e-6)
    assert numbers["finetuned"]["accuracy"][0] == pytest.approx(
        [float((each.argmax(-1) == labels.numpy()).mean()) for each in plain]
    )
    assert [row.what for row in found.comparisons] == [f"CIFAR-100, ECE, finetuned, exit {exit}" for exit in (1, 7)]
    assert {row.tolerance for row in found.comparisons} == {0.03}
    assert found.runs == ("msdnet", "tuned")


def test_both_networks_are_measured_on_the_rows_kept_for_both(publish: Publish) -> None:
    publish("msdnet")
    folder = publish("tuned", objective="joint-then-product")
    keep_rows(folder / "tuned", np.arange(59, 19, -1))
    runs = Runs.open(folder)
    found = find("finetune").run(runs)
    assert "40 test rows" in found.rows
    logits, labels = runs.find("msdnet", "cifar100")[0].logits()  # the same numbers under both names
    right = [float((each[20:].argmax(-1) == labels[20:]).double().mean()) for each in logits]
    assert found.numbers["cifar100"]["latest"]["accuracy"][0] == pytest.approx(right)
    plain = softplus_product(logits[:, 20:].double().numpy())
    assert found.numbers["cifar100"]["finetuned"]["ece"][0] == pytest.approx(
        [calibration_error(each, labels[20:].numpy()) for each in plain], abs=1e-6
    )
    keep_rows(folder / "msdnet", np.arange(10))
    with pytest.raises(FormatError, match="no test row was kept by all"):
        find("finetune").run(Runs.open(folder))


def test_heads_alone_and_the_epoch_chosen_on_validation_rows_are_in_the_table_only(publish: Publish) -> None:
    publish("msdnet")
    publish("heads", objective="product", seed=2)
    folder = publish("tuned", objective="joint-then-product", seed=1)
    change_config(folder / "heads", frozen=["blocks"])
    # The lowest ECE on validation rows is after epoch 3, on test rows after epoch 2.
    errors = {"val": {2: 0.3, 3: 0.1, 4: 0.2}, "test": {2: 0.05, 3: 0.15, 4: 0.25}}
    epochs = {split: {epoch: after(error) for epoch, error in by_epoch.items()} for split, by_epoch in errors.items()}
    write_bundle(folder / "tuned", {**read_bundle(folder / "tuned"), "epochs.json": json.dumps(epochs).encode()})
    found = find("finetune").run(Runs.open(folder))
    rows = {row[1]: row for row in found.table}
    assert len(rows) == 7
    assert rows["finetuned, epoch 3 of 4"][3] == ", ".join(["0.150"] * 7)
    assert "heads alone finetuned" in rows
    assert not any("heads" in claim.what for claim in found.claims)
    assert found.runs == ("msdnet", "tuned", "heads")


def after(error: float) -> dict[str, object]:
    """Metrics after an epoch."""
    return {"product, softplus, ones": {"accuracy": [0.5] * 7, "ece": [error] * 7, "label_drop_percent_0.1": 10.0}}


def change_config(folder: Path, **recipe: object) -> None:
    """Publish a run again with other settings."""
    files = read_bundle(folder)
    config = json.loads(files["config.json"])
    config["recipe"] |= recipe
    write_bundle(folder, {**files, "config.json": json.dumps(config).encode()})


def keep_rows(folder: Path, rows: NDArray[np.int64]) -> None:
    """Publish a run again with some of its test rows, in this order."""
    files = read_bundle(folder)
    stored = np.load(io.BytesIO(files["test-sample.npz"]))
    packed = io.BytesIO()
    np.savez(packed, logits=stored["logits"][:, rows], labels=stored["labels"][rows], indices=stored["indices"][rows])
    write_bundle(folder, {**files, "test-sample.npz": packed.getvalue()})


def test_the_claim_on_calibration_is_about_every_exit(publish: Publish) -> None:
    found = find("finetune").run(two_runs(publish))
    numbers = found.numbers["cifar100"]
    pairs = zip(numbers["finetuned"]["ece"][0], numbers["latest"]["ece"][0], strict=True)
    claim = next(claim for claim in found.claims if "at every exit" in claim.what)
    assert claim.holds == all(mine <= base for mine, base in pairs)
    assert len(found.table) == 5


def test_the_papers_claim_on_cifar100_is_not_checked_on_cifar10(publish: Publish) -> None:
    publish("msdnet", data="cifar10")
    found = find("finetune").run(Runs.open(publish("tuned", objective="joint-then-product", data="cifar10", seed=1)))
    assert not found.comparisons
    assert not any("at every exit" in claim.what for claim in found.claims)


def test_a_finetuned_network_needs_its_backbone(publish: Publish) -> None:
    runs = Runs.open(publish("tuned", objective="joint-then-product"))
    with pytest.raises(MissingFileError, match="no run of msdnet on cifar100") as caught:
        find("finetune").run(runs)
    assert "cifar100-msdnet" in caught.value.fix


@pytest.mark.parametrize(
    ("study", "options"),
    [("dvit", {"model": "dvit-cifar"}), ("l2w", {"objective": "l2w", "model": "msdnet-cifar-linear"})],
)
def test_a_further_network_is_measured_on_every_data_set_it_has_a_run_of(
    study: str, options: dict[str, str], publish: Publish
) -> None:
    publish("other", seed=3)
    publish("ten", data="cifar10", **options)
    runs = Runs.open(publish("hundred", seed=1, **options))
    found = find(study).run(runs)
    assert found.runs == ("ten", "hundred")
    assert (len(found.plots), len(found.claims)) == (4, 6)
    logits, labels = runs.find(study, "cifar100")[0].logits()
    accuracy = [float((each.argmax(-1) == labels).double().mean()) for each in logits]
    assert found.numbers["cifar100"]["latest"]["accuracy"][0] == pytest.approx(accuracy)


@pytest.mark.parametrize(("study", "recipe"), [("dvit", "dvit"), ("l2w", "l2w"), ("finetune", "msdnet-finetuned")])
def test_a_missing_run_is_named_with_the_recipe_that_makes_one(study: str, recipe: str) -> None:
    with pytest.raises(MissingFileError) as caught:
        find(study).run(Runs())
    assert f"anytime train cifar100-{recipe} " in caught.value.fix
