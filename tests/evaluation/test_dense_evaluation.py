"""Evaluation of dense predictions: positions are rows, labels may be missing, memory does not grow with the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import anytime
from anytime.cli import run
from anytime.evaluation.blocks import LogitRows
from anytime.evaluation.opening import open_rows

EXITS, IMAGES, CLASSES, HEIGHT, WIDTH = 3, 10, 4, 5, 6


def scenes(images: int = IMAGES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, CLASSES, (images, HEIGHT, WIDTH), generator=generator)
    logits = 2 * torch.randn(EXITS, images, CLASSES, HEIGHT, WIDTH, generator=generator)
    logits += 2 * torch.nn.functional.one_hot(labels, CLASSES).movedim(-1, 1)
    labels[:, 0, :2] = 255
    return logits, labels


def as_rows(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    used = labels.flatten() != 255
    return logits.movedim(2, -1).reshape(EXITS, -1, CLASSES)[:, used], labels.flatten()[used]


def test_metrics_are_those_of_the_labelled_pixels_as_rows() -> None:
    logits, labels = scenes()
    dense = anytime.evaluate(logits, labels, class_dim=2, ignore_index=255, sets=None)
    plain = anytime.evaluate(*as_rows(logits, labels), sets=None)
    for name, wanted in plain.rules.items():
        found = dense.rules[name]
        for metric in ("accuracy", "label_drop_percent", "final_drop_percent", "learned", "ece", "nll", "entropy"):
            assert getattr(found, metric) == pytest.approx(getattr(wanted, metric)), metric
    document = dense.to_json()
    assert (document["samples"], document["rows"], document["positions"]) == (IMAGES, IMAGES * 28, (HEIGHT, WIDTH))
    assert not {"rows", "positions"} & plain.to_json().keys()


def test_mean_iou_is_the_mean_over_classes_of_intersection_over_union() -> None:
    logits, labels = scenes()
    found = anytime.evaluate(logits, labels, class_dim=2, ignore_index=255, sets=None).rules["product"].mean_iou
    assert found is not None
    answers = anytime.Product()(logits, class_dim=2).labels
    for exit in range(EXITS):
        parts = []
        for kind in range(CLASSES):
            answered, labelled = (answers[exit] == kind) & (labels != 255), labels == kind
            parts.append(float((answered & labelled).sum() / (answered | labelled).sum()))
        assert found[exit] == pytest.approx(sum(parts) / CLASSES)


def test_tokens_have_their_classes_last() -> None:
    logits, labels = scenes()
    tokens = logits.movedim(2, -1).flatten(2, 3)  # (exits, batch, length, classes)
    found = anytime.evaluate(tokens, labels.flatten(1), class_dim=-1, ignore_index=255)
    assert found.rules["product"] == anytime.evaluate(logits, labels, class_dim=2, ignore_index=255).rules["product"]


def test_prediction_sets_are_calibrated_and_tested_on_different_images() -> None:
    logits, labels = scenes()
    rows = open_rows(logits, labels, False, class_dim=2, ignore_index=255)
    assert isinstance(rows, LogitRows)
    chosen, used = rows.for_sets(seed=0)
    images = {rows.locate(int(row))[0] for row in chosen}
    assert len(images) == IMAGES // 5
    tested = set(range(rows.logits.shape[1])) - set(used.tolist())
    assert {rows.locate(int(row))[0] for row in used} == images
    assert {rows.locate(row)[0] for row in tested} == set(range(IMAGES)) - images


def test_examples_name_the_image_and_the_pixel() -> None:
    logits, labels = scenes()
    found = anytime.evaluate(logits, labels, class_dim=2, ignore_index=255, sets=None)
    for example in (*found.examples, *found.worst):
        assert example.position is not None
        assert int(labels[(example.row, *example.position)]) == example.label
    assert found.worst[0].name == f"{found.worst[0].row} ({found.worst[0].position[0]}, {found.worst[0].position[1]})"  # type: ignore[index]


def test_without_labels_every_position_is_measured() -> None:
    logits, _ = scenes()
    found = anytime.evaluate(logits, class_dim=2)
    assert (found.rows, found.rules["product"].mean_iou) == (IMAGES * HEIGHT * WIDTH, None)


def test_the_command_evaluates_a_segmentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logits, labels = scenes()
    np.savez(tmp_path / "scenes.npz", logits=logits.numpy(), labels=labels.numpy().astype(np.uint8))
    out = tmp_path / "report"
    assert run(["evaluate", str(tmp_path / "scenes.npz"), "--class-dim", "2", "--ignore-index", "255", "--out", str(out)]) == 0
    assert "10 inputs (280 positions)" in capsys.readouterr().out
    assert "mean_iou" in (out / "per_exit.csv").read_text().splitlines()[0]
    assert "10 inputs of 5 × 6 positions, 280 positions used" in (out / "report.html").read_text()


def test_a_mapped_file_is_read_block_by_block(tmp_path: Path) -> None:
    """NumPy's largest allocation together is a few blocks of 2 MB, not the logits, 78 MB, in another order."""
    shape = (5, 8, 19, 128, 208)
    array = np.lib.format.open_memmap(tmp_path / "logits.npy", "w+", np.float32, shape)
    noise = np.random.default_rng(0).standard_normal(shape[2:], dtype=np.float32)
    for image in range(shape[1]):
        array[:, image] = 3 * np.roll(noise, image, -1)
    array.flush()
    mapped = np.load(tmp_path / "logits.npy", mmap_mode="r")
    labels = np.zeros((shape[1], *shape[3:]), np.uint8)
    labels[:, :8] = 255
    tracemalloc.start()
    try:
        anytime.evaluate(mapped, labels, rules=["product"], class_dim=2, ignore_index=255)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < mapped.nbytes / 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.int8, torch.uint8])
def test_a_label_to_ignore_is_not_wrapped_into_the_type_of_the_labels(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 120, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.full((3, 4, 4), 100)
    labels[:, 0] = 3
    for ignored in (-156, 356):  # which 8 bits turn into 100
        found = anytime.evaluate(logits, labels.to(dtype), class_dim=2, ignore_index=ignored, sets=None)
        assert found.rows == labels.numel()
        metrics = anytime.metrics.Metrics(class_dim=2, ignore_index=ignored)
        metrics.update(logits, labels.to(dtype))
        assert metrics.rows == labels.numel()
