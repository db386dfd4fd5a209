"""The frontier: what it measures, what it chooses, and what it shows on the reference logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anytime
from anytime.calibrate import Candidate, Frontier, TunedRule, certify, tune
from anytime.calibrate.measure import drop_name, measure
from anytime.errors import IntegrityError, LabelError, OptionError, OverlapError, ScaleError, ShapeError

FEW = (3.0,)
METRICS = ("accuracy", "drop_0.1", "ece", "nll")


def some(rows: int, seed: int = 0, exits: int = 3, classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    noise = 2 * torch.randn(exits, rows, classes, generator=generator)
    return noise + 2.5 * torch.nn.functional.one_hot(labels, classes), labels


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return tune(*some(600), penalties=FEW)


def made(columns: dict[str, tuple[float, ...]]) -> Frontier:
    count = len(columns["accuracy"])
    names = ("latest", *(f"rule {index}" for index in range(1, count)))
    seen = torch.zeros(0, dtype=torch.int64)
    return Frontier(2, 3, names, ("f",) * count, ("latest",) * count, columns, (0.1,), False, 50, 50, 0, seen)


def test_metrics_are_those_of_evaluate(frontier: Frontier) -> None:
    logits, labels = some(300, seed=1)
    rules = {one.name: one for one in frontier.measure(logits, labels)}
    for name in ("latest", "product", "caching at T", "fitted product, λ = 3"):
        whole = anytime.evaluate(logits, labels, rules={name: rules[name].rule}, sets=None).rules[name]
        for metric in ("accuracy", "ece", "nll"):
            assert rules[name].metrics[metric] == pytest.approx(np.mean(getattr(whole, metric)), abs=1e-9)
        for limit in (0.1, 0.05):
            assert 100 * rules[name].metrics[drop_name(limit)] == pytest.approx(whole.label_drop_percent[str(limit)])


def test_fitting_rows_and_choosing_rows_are_apart() -> None:
    logits, labels = some(400)
    found = tune(logits, labels, penalties=FEW, fitting=0.25, seed=3)
    assert (found.fitting_rows, found.choosing_rows) == (100, 300)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(3))
    latest = measure(anytime.Latest(), logits[:, order[100:]], labels[order[100:]], drops=(0.1, 0.05))
    assert found.columns["ece"][0] == pytest.approx(latest["ece"])
    # What the temperatures were fitted on is the other part alone.
    again = torch.cat((order[:100], order[:100]))
    temperatures = anytime.calibrate.fit_temperature(logits[:, again], labels[again]).temperatures
    assert f"{temperatures[0]:.6f}"[:6] in found.texts[found.names.index("latest at T")]


def test_the_same_seed_gives_the_same_frontier_and_another_another() -> None:
    rows = some(200)
    first, again, other = (tune(*rows, penalties=FEW, seed=seed) for seed in (0, 0, 1))
    assert (again.names, again.fitting_rows) == (first.names, first.fitting_rows)
    for name, values in first.columns.items():
        assert again.columns[name] == pytest.approx(values, abs=1e-4)
    assert other.columns["nll"] != pytest.approx(first.columns["nll"], abs=1e-3)


columns = st.integers(1, 12).flatmap(
    lambda count: st.fixed_dictionaries(
        {name: st.tuples(*[st.integers(0, 4).map(lambda value: value / 4)] * count) for name in METRICS}
    )
)


@given(columns)
def test_the_pareto_set_is_what_the_definition_says(columns: dict[str, tuple[float, ...]]) -> None:
    found = made(columns)

    def as_costs(one: Candidate) -> tuple[float, ...]:
        return (-one.metrics["accuracy"], *(one.metrics[name] for name in METRICS[1:]))

    costs = [as_costs(one) for one in found.candidates]
    wanted = {
        cost
        for cost in costs
        if not any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other in costs)
    }
    kept = [as_costs(one) for one in found.pareto]
    assert set(kept) == wanted
    assert len(kept) == len(wanted)


@given(columns, st.floats(0, 1), st.floats(0, 1))
def test_a_choice_keeps_its_bounds_and_nothing_within_them_is_better(
    columns: dict[str, tuple[float, ...]], most: float, least: float
) -> None:
    found = made(columns)
    fitting = [one for one in found.candidates if one.metrics["drop_0.1"] <= most and one.metrics["accuracy"] >= least]
    bounds = {"at_most": {"drop_0.1": most}, "at_least": {"accuracy": least}}
    if fitting:
        chosen = found.choose(**bounds)  # type: ignore[arg-type]
        assert chosen.metrics["ece"] == min(one.metrics["ece"] for one in fitting)
        assert chosen.name in {one.name for one in fitting}
    else:
        with pytest.raises(OptionError, match="nearest is"):
            found.choose(**bounds)  # type: ignore[arg-type]


@given(columns)
def test_a_chain_trades_drops_for_the_metric_step_by_step(columns: dict[str, tuple[float, ...]]) -> None:
    found = made(columns)
    chain = found.chain(at_least={})
    drops, eces = ([one.metrics[name] for one in chain] for name in ("drop_0.1", "ece"))
    assert drops == sorted(drops)
    assert all(a > b for a, b in pairwise(eces))
    assert drops[0] == min(columns["drop_0.1"])
    assert eces[-1] == min(columns["ece"])


def test_nothing_that_fits_names_the_nearest() -> None:
    found = made({"accuracy": (0.9, 0.8), "drop_0.1": (0.4, 0.02), "ece": (0.1, 0.2), "nll": (1.0, 1.0)})
    with pytest.raises(OptionError) as error:
        found.choose(at_most={"drop_0.1": 0.01}, at_least={})
    assert "none of 2 rules satisfies: least ece with drop_0.1 at most 0.01" in error.value.got
    assert "the nearest is rule 1 with" in error.value.expected


def test_an_objective_without_a_floor_keeps_the_networks_accuracy() -> None:
    found = made({"accuracy": (0.9, 0.1, 0.895), "drop_0.1": (0.4, 0.0, 0.1), "ece": (0.3, 0.0, 0.1), "nll": (1.0, 1.0, 1.0)})
    assert found.choose().name == "rule 2"
    assert found.choose(at_least={}).name == "rule 1"
    assert found.choose().objective == "least ece with accuracy at least 0.89"
    assert found.choose(least="error").name == "latest"


def test_wrong_calls_are_refused(frontier: Frontier) -> None:
    logits, labels = some(200)
    for wrong in ({"drops": ()}, {"drops": 0.0}, {"drops": (0.1, 0.1)}, {"fitting": 1.0}):
        with pytest.raises(OptionError):
            tune(logits, labels, **wrong)  # type: ignore[arg-type]
    with pytest.raises(LabelError, match="at least 100"):
        tune(logits[:, :99], labels[:99])
    with pytest.raises(ScaleError):
        tune(logits.softmax(-1), labels)
    for wrong in ({"least": "accuracy"}, {"least": "drop_0.2"}, {"at_most": {"speed": 1.0}}):
        with pytest.raises(OptionError, match="there is no metric"):
            frontier.choose(**wrong)  # type: ignore[arg-type]


def shapes() -> Iterator[tuple[int, int, int, float, float]]:
    for exits, rows, classes in ((1, 100, 2), (2, 100, 2), (5, 150, 3), (3, 100, 300)):
        for scale, shift in ((1.0, 0.0), (1e-3, 0.0), (30.0, -500.0), (1e4, 0.0)):
            yield exits, rows, classes, scale, shift


@pytest.mark.parametrize(("exits", "rows", "classes", "scale", "shift"), list(shapes()))
def test_any_number_of_exits_and_classes_and_any_scale(exits: int, rows: int, classes: int, scale: float, shift: float) -> None:
    logits, labels = some(rows, exits=exits, classes=classes)
    found = tune(logits * scale + shift, labels, penalties=FEW)
    assert len(found.names) == len(set(found.names)) > 50
    assert all(np.isfinite(values).all() for values in found.columns.values())
    for one in found.pareto:
        assert one.rule(logits).log_probs.shape == logits.shape
    if exits == 1:
        assert set(found.columns["drop_0.1"]) == {0.0}
    assert found.choose().metrics["accuracy"] >= found.floor["accuracy"]


def test_every_candidate_can_be_written_down_and_read_back(frontier: Frontier) -> None:
    assert [repr(one.rule) for one in frontier.candidates] == list(frontier.texts)


def test_the_frontier_and_its_rule_go_through_their_files(frontier: Frontier, tmp_path: Path) -> None:
    read = Frontier.load(frontier.save(tmp_path / "frontier.json"))
    assert read.document() == frontier.document()
    assert read.records() == frontier.records()
    chosen = read.choose(at_most={"drop_0.1": 0.2})
    path = chosen.save(tmp_path / "rule.json")
    again = TunedRule.load(path)
    logits, labels = some(50, seed=2)
    torch.testing.assert_close(again(logits).log_probs, chosen.rule(logits).log_probs)
    with pytest.raises(ShapeError):
        again(logits[:2])
    with pytest.raises(ShapeError):
        frontier.measure(logits[:, :, :5], labels.clamp(max=4))
    document = json.loads(path.read_text())
    document["fields"]["text"] = "latest"
    path.write_text(json.dumps(document))
    with pytest.raises(IntegrityError):
        TunedRule.load(path)


def test_rows_that_were_seen_are_refused(frontier: Frontier) -> None:
    logits, labels = some(600)
    chosen = frontier.choose()
    for refuse in (
        lambda: certify(logits, labels, chosen),
        lambda: frontier.measure(logits[:, 599:], labels[599:]),
        lambda: frontier.choose_certified(logits[:, :300], labels[:300]),
    ):
        with pytest.raises(OverlapError):
            refuse()


def test_a_certified_choice_tests_the_chain_on_other_rows_and_remembers_them(frontier: Frontier) -> None:
    logits, labels = some(1000, seed=5)
    chain = frontier.chain(least="error")
    at_most = chain[1].metrics["drop_0.1"] + 0.001
    # Twice what the tuning rows show for the second rule: neither it nor the first should fail here.
    chosen, found = frontier.choose_certified(logits, labels, least="error", at_most=2 * at_most)
    tested = [one for one in chain if one.metrics["drop_0.1"] <= 2 * at_most]
    assert found.rules == tuple(one.text for one in tested)
    assert found.rows == 1000
    assert len(found.certified) > 1
    assert chosen is not None
    assert chosen.text == found.chosen == found.certified[-1]
    assert certify(logits, labels, found.chosen).drop_bound <= 2 * at_most
    with pytest.raises(OverlapError):
        certify(logits, labels, chosen)
    none, empty = frontier.choose_certified(logits[:, :20], labels[:20], at_most=0.01)
    assert none is None
    assert empty.certified == ()
    with pytest.raises(OptionError, match="there is no metric"):
        frontier.choose_certified(logits, labels, drop=0.3)


@pytest.mark.parametrize(("classes", "tried"), [(10, True), (11, False)])
def test_held_answers_are_tried_with_few_classes(classes: int, tried: bool) -> None:
    logits, labels = some(200, classes=classes)
    names = {one.name for one in tune(logits, labels, penalties=(1.0,)).candidates}
    assert ("holding product, λ = 1" in names) == tried


def reference(shared: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(shared / "reference" / f"msdnet-{name}-val.npz") as file:
        return torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"].astype(np.int64))


def beats(one: Candidate, other: Candidate) -> bool:
    better = [one.metrics[name] < other.metrics[name] for name in METRICS[1:]]
    return all(better) and one.metrics["accuracy"] > other.metrics["accuracy"]


def test_rules_of_the_frontier_beat_caching_in_everything_on_unseen_rows(shared: Path) -> None:
    logits, labels = reference(shared, "cifar100")
    found = tune(logits[:, :3000], labels[:3000], penalties=FEW)
    assert "fitted product, λ = 3" in {one.name for one in found.pareto}
    rules = {one.name: one for one in found.candidates}
    unseen = {
        name: replace(rules[name], metrics=measure(rules[name].rule, logits[:, 3000:], labels[3000:], drops=(0.1,)))
        for name in ("caching", "caching at T", "fitted product, λ = 3")
    }
    for rival in ("caching", "caching at T"):
        assert beats(unseen["fitted product, λ = 3"], unseen[rival]), rival


@pytest.mark.long
def test_they_also_do_over_random_splits_of_the_rows(shared: Path) -> None:
    logits, labels = reference(shared, "cifar100")
    kept, claimed = {"caching": 0, "caching at T": 0}, {"caching": 0, "caching at T": 0}
    for seed in range(4):
        tuning, testing = torch.randperm(5000, generator=torch.Generator().manual_seed(seed)).split([3000, 2000])
        found = tune(logits[:, tuning], labels[tuning], seed=seed)
        unseen = {one.name: one for one in found.measure(logits[:, testing], labels[testing])}
        best, rivals = {one.name: one for one in found.pareto}, {one.name: one for one in found.candidates}
        for rival in kept:
            assert any(name.startswith("fitted product") and beats(unseen[name], unseen[rival]) for name in best), rival
            winners = [name for name, one in best.items() if beats(one, rivals[rival])]
            claimed[rival] += len(winners)
            kept[rival] += sum(beats(unseen[name], unseen[rival]) for name in winners)
        chosen = unseen[found.choose(at_most={"drop_0.1": 0.01}).name]
        assert chosen.metrics["drop_0.1"] < 0.02
        assert chosen.metrics["ece"] < 0.1 < unseen["product"].metrics["ece"]
    # Most rules that beat a rival on the choosing rows also beat it on the others. One split alone has few such rules.
    for rival, count in claimed.items():
        assert kept[rival] >= count / 2, rival
