"""Scheduling policies on a simulated clock: their laws under random traffic, and how close they come to the fluid bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anytime
from anytime.run.scheduler import (
    POLICIES,
    AllExits,
    ExpectedGain,
    LeastProgress,
    StageBatch,
    StageTimes,
    _ends,
    _fits_last,
    _in_order,
    retry_after,
)
from anytime.run.simulation import (
    CIFAR_MSDNET,
    LinearTimes,
    Load,
    SimulatedRequest,
    draw_requests,
    fluid_bound,
    run_requests,
    simulate,
)

MSDNET, CAPACITY = CIFAR_MSDNET, CIFAR_MSDNET.capacity


@dataclass(eq=False)
class Waiting:
    deadline: float
    exit: int = 0
    confidence: float = 0.0
    last: int = 7
    arrived: float = 0.0
    group: object = None
    least: int = 1


@dataclass(frozen=True)
class Checked:
    """A policy whose every choice is held against the laws."""

    policy: Any

    def choose(self, now: float, requests: Sequence[Any], times: StageTimes) -> StageBatch[Any] | None:
        chosen: StageBatch[Any] | None = self.policy.choose(now, requests, times)
        if chosen is not None:
            together, waiting = chosen.requests, set(map(id, requests))
            assert 1 <= len(together) <= times.largest_batch
            assert len(set(map(id, together))) == len(together)
            assert all(id(request) in waiting for request in together)
            assert {request.exit + 1 for request in together} == {chosen.stage}
            assert len({request.group for request in together}) == 1
            assert all(chosen.stage + chosen.stages - 1 <= request.last for request in together)
            seconds = sum(times.seconds(chosen.stage + more, len(together)) for more in range(chosen.stages))
            assert all(now + seconds + times.margin <= request.deadline + 1e-9 for request in together)
        return chosen


Workload = tuple[list[SimulatedRequest], LinearTimes, int]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Requests at random times; with mixed ones, some have other deadlines or none, other shapes, or need more exits."""
    exits, mixed = draw(st.integers(1, 5)), draw(st.booleans())
    durations = st.lists(st.floats(1e-4, 5e-3), min_size=exits, max_size=exits).map(tuple)
    times = LinearTimes(draw(durations), draw(durations), draw(st.integers(1, 8)), draw(st.floats(0, 1e-3)))
    rate = draw(st.floats(0.1, 20)) / sum(times.seconds(stage, 1) for stage in range(1, exits + 1))
    load = Load(rate, draw(st.floats(1e-3, 0.1)), draw(st.integers(1, 60)), draw(st.integers(0, 99)))
    requests = draw_requests(load, exits, rows=50)
    if mixed:
        chance = np.random.default_rng(load.seed)
        for request in requests:
            request.deadline = request.arrived + chance.choice(
                [load.deadline, 2 * load.deadline, 0.2 * chance.random(), math.inf]
            )
            request.group, request.least = int(chance.integers(2)), int(chance.integers(1, exits + 1))
    return requests, times, draw(st.integers(1, 3))


def check_laws(name: str, workload: Workload) -> None:
    requests, times, workers = workload
    confidence = np.random.default_rng(0).random((len(times.fixed), 50))
    run_requests(Checked(POLICIES[name]()), requests, times, confidence=confidence, workers=workers)
    assert not any(request.refused and request.answered for request in requests)
    assert all(request.answered in (0, *range(request.least, request.last + 1)) for request in requests)
    if name in ("gain", "least-progress"):  # whoever is admitted gets an answer, without a deadline the best one
        admitted = [request for request in requests if not request.refused]
        assert all(request.answered for request in admitted)
        assert all(request.answered == request.last for request in admitted if request.deadline == math.inf)


@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads())
@settings(max_examples=60)
def test_choices_keep_the_laws_under_random_traffic(name: str, workload: Workload) -> None:
    check_laws(name, workload)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads())
@settings(max_examples=10_000)
def test_choices_keep_the_laws_under_ten_thousand_workloads(name: str, workload: Workload) -> None:
    check_laws(name, workload)


@pytest.fixture(scope="module")
def answers() -> dict[str, np.ndarray]:
    """Whether each exit is right and how confident it is, for the CIFAR-100 sample under the product."""
    import torch

    source = anytime.samples.cifar100_msdnet()
    predictions = anytime.Product()(torch.as_tensor(source.logits[...]).float())
    confidence, labels = predictions.probs.max(-1)
    return {"correct": (labels == torch.as_tensor(source.labels[...])).numpy(), "confidence": confidence.numpy()}


@pytest.mark.parametrize("percent", [30, 70, 100, 150, 300])
def test_expected_gain_is_within_three_percent_of_the_fluid_bound(answers: dict[str, np.ndarray], percent: int) -> None:
    rate = CAPACITY * percent / 100
    load = Load(rate, 0.02, 4000)
    found = simulate(ExpectedGain(), load, MSDNET, **answers)
    rows = np.random.default_rng(0)  # the rows that the simulation picks
    rows.exponential(1 / rate, 4000)
    picked = rows.integers(answers["correct"].shape[1], size=4000)
    bound = fluid_bound(load, MSDNET, answers["correct"][:, picked].mean(1).tolist())
    assert found.late == 0
    assert found.correct >= 0.97 * bound


@pytest.mark.parametrize("policy", [ExpectedGain(), LeastProgress()], ids=["gain", "least-progress"])
def test_goodput_stays_when_not_even_all_first_exits_fit(answers: dict[str, np.ndarray], policy: Any) -> None:
    """Past the capacity of first exits the rest is refused, and as many are answered as at the peak."""
    rates = [found.in_time * percent for percent in (600, 1000, 3000) for found in [_at(policy, percent, answers)]]
    assert min(rates[1:]) >= 0.9 * max(rates)


def _at(policy: Any, percent: float, answers: dict[str, np.ndarray]) -> Any:
    return simulate(policy, Load(CAPACITY * percent / 100, 0.02, 3000), MSDNET, **answers)


def test_graceful_policies_beat_an_ordinary_server_under_load(answers: dict[str, np.ndarray]) -> None:
    for percent in (150, 300, 600):
        assert _at(ExpectedGain(), percent, answers).correct > 1.1 * _at(AllExits(), percent, answers).correct


def test_first_stages_wait_until_they_must_run_or_enough_wait_while_others_gain() -> None:
    times, policy = replace(MSDNET, largest_batch=4), ExpectedGain()
    improving, fresh = Waiting(deadline=1.0, exit=3, confidence=0.2), Waiting(deadline=1.0)
    assert policy.choose(0.0, [improving, fresh], times) == StageBatch(4, [improving])
    assert ExpectedGain(reserve=math.inf).choose(0.0, [improving, fresh], times) == StageBatch(1, [fresh])
    enough = [Waiting(deadline=1.0) for _ in range(4)]
    assert policy.choose(0.0, [improving, *enough], times) == StageBatch(1, enough)
    fresh.deadline = times.seconds(1, 1) + 1e-6
    assert policy.choose(0.0, [improving, fresh], times) == StageBatch(1, [fresh])


def test_a_request_without_a_deadline_that_has_an_answer_lets_others_gain_until_its_patience_ends() -> None:
    improving, endless = Waiting(deadline=2.0, exit=1, confidence=0.2), Waiting(deadline=math.inf, exit=3, confidence=0.9)
    assert ExpectedGain().choose(0.0, [improving, endless], MSDNET) == StageBatch(2, [improving])
    assert ExpectedGain().choose(1.0, [improving, endless], MSDNET) == StageBatch(4, [endless])


def test_the_least_confident_requests_gain_most() -> None:
    confident, uncertain = Waiting(1.0, exit=2, confidence=0.95), Waiting(1.0, exit=2, confidence=0.1)
    chosen = ExpectedGain().choose(0.0, [confident, uncertain], replace(MSDNET, largest_batch=1))
    assert chosen == StageBatch(3, [uncertain])


def test_requests_of_other_shapes_are_not_batched_together() -> None:
    requests = [Waiting(1.0, group=shape) for shape in ("a", "b", "a")]
    chosen = LeastProgress().choose(0.0, requests, MSDNET)
    assert chosen == StageBatch(1, [requests[0], requests[2]])


def test_retry_after_counts_the_others_as_full_batches_with_a_reserve() -> None:
    times = LinearTimes(fixed=(0.0,), per_row=(1.0,), largest_batch=2, margin=0.5)
    waiting = [Waiting(12.0), Waiting(12.0)]
    assert retry_after(6.0, Waiting(12.0), [], times) is None  # nobody waits: it can run alone
    assert retry_after(7.8, Waiting(12.0), waiting, times) is None  # after the first two, in 1.2 · (2 + 1) + 0.5 s
    assert retry_after(9.0, Waiting(12.0), waiting, times) == pytest.approx(1.1)
    assert retry_after(9.0, Waiting(12.0), waiting, times, free=[9.0, 9.0]) is None
    assert retry_after(9.0, Waiting(12.0), waiting, times, free=[9.0, 11.0]) == 1.0  # 0.7 are missing; at least a stage
    waiting[0].exit = 1  # it has an answer: its next stage is optional
    assert retry_after(9.0, Waiting(12.0), waiting, times) is None


def test_requests_that_are_too_late_already_keep_nobody_out() -> None:
    times = LinearTimes(fixed=(0.0,), per_row=(1.0,), largest_batch=1)
    assert retry_after(0.0, Waiting(1.5), [Waiting(0.5)] * 9, times) is None


def test_stages_up_to_the_least_exit_are_mandatory() -> None:
    times = replace(MSDNET, largest_batch=4)
    improving, fresh = Waiting(deadline=1.0, exit=3, confidence=0.2), Waiting(deadline=1.0, exit=1, least=3)
    needed = times.seconds(2, 1) + times.seconds(3, 1)
    for policy in (ExpectedGain(), LeastProgress()):
        fresh.deadline = needed + 1e-6
        assert policy.choose(0.0, [improving, fresh], times) == StageBatch(2, [fresh], 2)
        fresh.deadline = needed - 1e-6  # an answer is out of reach: its stages would be of no use
        assert policy.choose(0.0, [improving, fresh], times) == StageBatch(4, [improving])
    assert retry_after(0.0, Waiting(times.seconds(1, 1), least=1), [], times) is None
    assert retry_after(0.0, Waiting(times.seconds(1, 1), least=2), [], times) is not None


@pytest.mark.parametrize("policy", [ExpectedGain(), LeastProgress()], ids=["gain", "least-progress"])
def test_a_request_without_a_deadline_ends_although_others_never_stop(policy: Any) -> None:
    times = LinearTimes(fixed=(1e-3,) * 3, per_row=(1e-3,) * 3, largest_batch=4)
    endless, now = Waiting(math.inf, last=3), 0.0
    while endless.exit < 3:
        others = [Waiting(now + 0.02, last=3, exit=exit, confidence=0.1) for exit in (0, 0, 0, 1, 1, 2, 2)]
        chosen = policy.choose(now, [endless, *others], times)
        now += times.seconds(chosen.stage, len(chosen.requests))
        endless.exit += endless in chosen.requests
        assert now < 1.5


@given(
    st.lists(st.floats(0.001, 0.1), max_size=12),
    st.integers(1, 5),
    st.lists(st.floats(0.0, 0.02), min_size=1, max_size=3),
)
def test_a_request_that_is_admitted_behind_others_of_its_kind_makes_none_of_them_late(
    deadlines: list[float], size: int, free: list[float]
) -> None:
    times = replace(MSDNET, largest_batch=size)
    waiting = [Waiting(deadline) for deadline in sorted(deadlines)]
    last = Waiting(0.1)
    if _fits_last(last, waiting, times, sorted(free)):
        ends = list(_ends(_in_order({(0, 1, False, None): [*waiting, last]}, times), times, free))
        assert ends[-1] <= min(one.deadline for one in [*waiting, last][-((len(waiting) % size) + 1) :])
