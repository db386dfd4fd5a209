"""Each study runs at a tiny scale, and its numbers agree with plain loops."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from anytime.artifacts import read_bundle, write_bundle
from anytime.combine import Product
from anytime.data.toys import PointData, make_simple_1d, make_spiral
from anytime.errors import ShapeError
from anytime.reproduce import CATALOGUE, ClassMap, Finding, Plot, Study, find
from anytime.reproduce.drawing import _cells, draw_finding
from anytime.reproduce.needs import MSDNET, REPRODUCED
from anytime.reproduce.runs import Run, Runs
from anytime.reproduce.sets import random_sets
from anytime.reproduce.studies import deviations, ensembles

from . import plain

Publish = Callable[..., Path]
Findings = Callable[[str], Finding]
Sample = tuple[NDArray[np.float64], NDArray[np.int64]]


@pytest.mark.parametrize("study", CATALOGUE, ids=lambda study: study.name)
def test_a_study_has_plots_and_claims_or_comparisons(study: Study, smoke_finding: Findings) -> None:
    found = smoke_finding(study.name)
    assert (found.study, found.figure) == (study.name, study.figure)
    assert found.plots
    assert found.rows
    assert found.comparisons or found.claims or study.name == "spiral"  # its statement is a theorem
    assert all(row.within is None for row in found.comparisons)
    json.dumps(found.to_json(), allow_nan=False)
    for row in found.table:
        assert len(row) == len(found.headings)
    for plot in found.plots:
        check(plot)
    draw_finding(found)


@pytest.mark.parametrize("study", CATALOGUE, ids=lambda study: study.name)
def test_no_two_lines_of_a_figure_look_alike(study: Study, smoke_finding: Findings) -> None:
    plots = [plot for plot in smoke_finding(study.name).plots if isinstance(plot, Plot)]
    names = {(line.look, line.marks, line.name) for plot in plots for line in plot.lines if line.name}
    assert len({(look, marks) for look, marks, _ in names}) == len(names)
    for plot in plots:
        single = [line.look for line in plot.lines if not line.name and not line.faint]
        assert len(set(single)) == len(single)


def test_the_cells_of_a_map_leave_no_gap() -> None:
    cells = ClassMap("a map", tuple(tuple(((row + column) % 4, 1.0) for column in range(48)) for row in range(48)))
    drawn = re.findall(r"M([\d.]+),([\d.]+)h([\d.]+)v([\d.]+)", _cells(cells, 256.0))
    squares = np.array(drawn, float).round(1)
    for start, size in ((0, 2), (1, 3)):
        ends = set((squares[:, start] + squares[:, size]).round(1).tolist())
        assert ends == set(squares[:, start].tolist()) - {0.0} | {256.0}


def check(plot: Plot | ClassMap) -> None:
    assert plot.title
    if isinstance(plot, ClassMap):
        assert {len(row) for row in plot.cells} == {len(plot.cells)}
        return
    for line in plot.lines:
        assert len(line.x) == len(line.y)
        assert len(line.spread) in (0, len(line.x))
        assert len(line.paper) in (0, len(line.x))
        assert all(value is None or math.isfinite(value) for value in (*line.x, *line.y, *line.paper))


@pytest.mark.parametrize("name", ["accuracy", "uncertainty", "calibration-gap", "finetune"])
def test_networks_with_other_exits_are_not_compared_with_the_papers(publish: Publish, name: str) -> None:
    publish("a", exits=3)
    found = find(name).run(Runs.open(publish("b", exits=3, objective="joint-then-product")))
    assert not found.comparisons
    assert found.plots
    for plot in found.plots:
        assert isinstance(plot, Plot)
        assert not any(line.paper for line in plot.lines)
        check(plot)


def test_networks_by_the_published_schedule_are_the_reproduction_and_the_others_are_in_a_table(publish: Publish) -> None:
    publish("ten", data="cifar10")
    publish("fewer-seed0")
    folder = publish("most-seed0", seed=1)
    assert [run.name for run in Runs.open(folder).need(REPRODUCED)] == ["ten", "fewer-seed0", "most-seed0"]
    files = read_bundle(folder / "most-seed0")
    config = json.loads(files["config.json"])
    config["recipe"]["schedule"] = "step"
    write_bundle(folder / "most-seed0", {**files, "config.json": json.dumps(config).encode()})
    runs = Runs.open(folder)
    assert [run.name for run in runs.need(REPRODUCED)] == ["ten", "most-seed0"]
    assert [run.name for run in runs.need(MSDNET)] == ["ten", "fewer-seed0"]
    found = find("accuracy").run(runs)
    assert [row[:2] for row in found.table] == [("fewer", rule) for rule in ("latest", "caching", "product")]
    accuracy = runs.find("msdnet-published", "cifar100")[0].accuracy()
    ours = [row.ours.mean for row in found.comparisons if row.what.startswith("MSDNet, CIFAR-100, latest")]
    assert ours == pytest.approx([100 * value for value in accuracy])
    assert {row.tolerance for row in found.comparisons} == {1.0}
    entropy = find("uncertainty").run(runs)
    assert set(entropy.runs) == {"fewer-seed0", "most-seed0"}  # sets need many logits


@pytest.mark.parametrize("unlike", [{"exits": 6}, {"classes": 12}], ids=str)
def test_runs_of_different_sizes_are_not_averaged(publish: Publish, unlike: dict[str, int]) -> None:
    publish("a")
    runs = Runs.open(publish("b", seed=1, **unlike))
    with pytest.raises(ShapeError, match="a has 7 exits, 10 classes, 60 test rows; b has"):
        find("accuracy").run(runs)
    with pytest.raises(ShapeError, match="a has 7 exits, 10 classes; b has"):
        find("sigmoid").run(runs)


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def product(logits: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The paper's product, written out input by input, for inputs that do not collapse."""
    out = np.empty_like(logits)
    for row in range(logits.shape[1]):
        total = np.ones(logits.shape[2])
        for exit in range(len(logits)):
            total = total * np.maximum(logits[exit, row], 0) ** weights[exit]
            out[exit, row] = total / total.sum()
    return out


def largest_drop(curve: NDArray[np.float64]) -> float:
    return max((curve[i] - curve[j] for i in range(len(curve)) for j in range(i + 1, len(curve))), default=0.0)


@pytest.fixture(scope="session")
def sample(smoke: Runs) -> Sample:
    logits, labels = smoke.every[0].logits()
    return logits.double().numpy(), labels.numpy()


def test_correctness_is_that_of_a_plain_loop(smoke_finding: Findings, sample: Sample) -> None:
    logits, labels = sample
    rows = {row.what: row.ours.mean for row in smoke_finding("correctness").comparisons}
    answers = {"latest": logits.argmax(-1), "product": product(logits, np.arange(1, 8) / 7).argmax(-1)}
    for rule, given in answers.items():
        right = given == labels
        kept = [all(right[j, n] for i in range(7) if right[i, n] for j in range(i, 7)) for n in range(len(labels))]
        assert rows[f"CIFAR-100, {rule}, monotone"] == pytest.approx(100 * np.mean(kept), abs=0.2)
        assert rows[f"CIFAR-100, {rule}, never correct"] == pytest.approx(100 * np.mean(~right.any(0)), abs=0.2)


def test_every_number_is_compared_once(smoke_finding: Findings) -> None:
    named = [(study.name, row.what) for study in CATALOGUE for row in smoke_finding(study.name).comparisons]
    assert len(set(named)) == len(named)
    first = [what for _, what in named if what.startswith("MSDNet, CIFAR-100, ") and what.endswith("exit 1")]
    assert first == ["MSDNet, CIFAR-100, latest, exit 1"]  # there all rules give the same answers


def test_sets_over_random_splits_are_those_of_a_plain_implementation(sample: Sample) -> None:
    logits, labels = sample[0][:, :200], sample[1][:200]
    ours = random_sets(Product()(torch.from_numpy(logits).float()).log_probs, torch.from_numpy(labels), splits=3)
    plainly = plain.random_splits(plain.product(logits).probs, labels, splits=3)
    for split, found in enumerate(ours):
        assert found.size == pytest.approx(plainly["size"][split], abs=0.03)
        assert found.coverage == pytest.approx(plainly["coverage"][split], abs=0.03)
        assert list(found.rises.values()) == pytest.approx(plainly["rises"][split], abs=3)


def test_label_drops_are_those_of_a_plain_loop(smoke_finding: Findings, sample: Sample) -> None:
    logits, labels = sample
    rows = {row.what: row.ours.mean for row in smoke_finding("label-drops").comparisons}
    answers = {"latest": softmax(logits), "product": product(logits, np.arange(1, 8) / 7)}
    for rule, given in answers.items():
        drops = np.array([largest_drop(given[:, n, label]) for n, label in enumerate(labels)])
        for limit in (0.01, 0.1, 0.5):
            found = rows[f"MSDNet, CIFAR-100, {rule}, ≥ {limit}"]
            assert found == pytest.approx(100 * np.mean(drops >= limit), abs=0.2)


def test_weights_of_one_are_measured_as_a_plain_loop_does(smoke_finding: Findings, sample: Sample) -> None:
    logits, labels = sample
    numbers = smoke_finding("deviations").numbers["weights (1): product drops by .01"]
    for name, weights in (("text", np.arange(1, 8) / 7), ("code", np.ones(7))):
        given = product(logits, weights)
        drops = np.array([largest_drop(given[:, n, label]) for n, label in enumerate(labels)])
        assert numbers[name] == pytest.approx(100 * np.mean(drops >= 0.01), abs=0.2)


def run_of(logits: torch.Tensor, labels: torch.Tensor) -> Run:
    return Run("made", "msdnet", "cifar100", 0, stored={"test": (logits, labels), "val": (logits, labels)})


def test_without_the_fallback_a_collapsed_row_is_class_zero_and_a_drop() -> None:
    # Input 0 collapses at the second exit: no class is positive at both. Input 1 is class 0, collapses too, and is so right.
    logits = torch.tensor([[[-1.0, 5.0], [5.0, -1.0], [-1.0, 5.0]], [[-1.0, -2.0], [-2.0, -1.0], [-1.0, 5.0]]])
    run = run_of(logits, torch.tensor([1, 0, 1]))
    drops, accuracy = deviations._without_fallback(run).values()
    assert drops.code == pytest.approx(100 * 2 / 3)
    assert accuracy.text == pytest.approx(100 / 3)  # falling back, inputs 0 and 1 answer 0 and 1, both wrong
    assert accuracy.code == pytest.approx(200 / 3)


def test_ties_are_counted_on_rounded_confidences() -> None:
    logits = torch.tensor([[[50.0, 0.0], [1.0, 0.0]], [[0.0, 60.0], [0.0, 3.0]]])
    run = run_of(logits, torch.tensor([0, 1]))
    ties, accuracy, _ = deviations._ties(run).values()
    assert ties.code == 50.0  # both softmaxes of input 0 round to one
    # By the text a confidence is larger only if it truly is: 60 beats 50 there too.
    assert accuracy.text == accuracy.code == 50.0


def test_scaling_a_clipped_relu_changes_nothing(smoke: Runs) -> None:
    (pair,) = deviations._clip(smoke.every[0]).values()
    assert pair.code < 1e-5


def test_dropping_inputs_of_confidence_one_keeps_the_other_bins(smoke: Runs) -> None:
    logits = torch.zeros(2, 4, 2)
    logits[:, :2, 0] = 200.0
    run = run_of(logits, torch.tensor([1, 1, 0, 1]))
    _, pair = deviations._bins(run).values()
    assert pair.text == pytest.approx(0.5)  # two certain and wrong, two at one half and half right
    assert pair.code == pytest.approx(0.0)


def interval_member(data: PointData, *, seed: int, steps: int) -> Any:
    return ensembles.interval_members(data, seed + 1, steps)[seed]


@pytest.mark.parametrize(
    ("member", "data"), [(interval_member, make_simple_1d()[0]), (ensembles.spiral_member, make_spiral(60))]
)
def test_a_rounding_difference_does_not_change_a_trained_member(member: Any, data: PointData) -> None:
    begun = torch.cat([values.flatten() for values in member(data, seed=0, steps=0).parameters()])
    assert bool((begun != begun.float()).any())  # initialised in float64: float32 samples differ by a bit
    # The last bit of every input is what another processor may change at any step.
    inputs = data.inputs.double()
    nudged = replace(data, inputs=torch.nextafter(inputs, torch.tensor(torch.inf, dtype=torch.float64)))
    one, other = (member(each, seed=0, steps=150) for each in (data, nudged))
    with torch.no_grad():
        torch.testing.assert_close(other(inputs), one(inputs), rtol=0, atol=1e-7)
