"""Policies against plain loops, and the laws they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anytime
from anytime.errors import DtypeError, OptionError, ScaleError, ShapeError
from anytime.policy import Confidence, DecisionWindow, Entropy, Margin, Patience, Policy
from anytime.testing import check_policy

RULES = [anytime.parse_rule(text) for text in ("latest", "caching", "product", "mixture")]
TINY = 1e-12


@pytest.mark.parametrize(
    "policy",
    [
        Confidence(0.7),
        Confidence((0.9, 0.8, 0.7, 0.0), otherwise="most_confident"),
        Margin(0.4, strict=True),
        Entropy(0.5),
        Patience(2),
        DecisionWindow(0.3, 0.8),
    ],
    ids=repr,
)
def test_every_policy_passes_the_battery(policy: Policy) -> None:
    check_policy(policy)


def plain_passes(policy: Policy, probs: np.ndarray, exit: int, answers: list[int]) -> bool:
    def at(numbers: object) -> float:
        return numbers[exit] if isinstance(numbers, tuple) else numbers  # type: ignore[return-value]

    ordered = np.sort(probs)[::-1]
    match policy:
        case Confidence():
            return ordered[0] > at(policy.threshold) if policy.strict else ordered[0] >= at(policy.threshold)
        case Margin():
            gap = ordered[0] - ordered[1]
            return gap > at(policy.threshold) if policy.strict else gap >= at(policy.threshold)
        case Entropy():
            entropy = -sum(p * np.log(p) for p in probs if p > 0)
            return entropy < at(policy.threshold) if policy.strict else entropy <= at(policy.threshold)
        case Patience():
            run = 1
            while run < len(answers) and answers[-run - 1] == answers[-1]:
                run += 1
            return run > policy.count if policy.strict else run >= policy.count
        case DecisionWindow():
            return not at(policy.lower) <= ordered[0] <= at(policy.upper)
    raise AssertionError


def plain_answer(policy: Policy, log_probs: torch.Tensor, log_odds: torch.Tensor) -> tuple[list[int], list[int]]:
    """The exit each row stops at, and the one its answer is from."""
    exits, rows, _ = log_probs.shape
    every = log_probs.exp().numpy()  # not NumPy's exp, which may round a probability to the other side of a threshold
    stopped, sources = [], []
    for row in range(rows):
        probs = every[:, row]
        answers: list[int] = []
        for exit in range(exits):
            answers.append(int(log_probs[exit, row].argmax()))
            passed = exit < exits - 1 and plain_passes(policy, probs[exit], exit, answers)
            if passed or exit == exits - 1:
                stopped.append(exit + 1)
                sources.append(exit + 1 if passed or policy.otherwise == "last" else 1 + int(log_odds[:, row].argmax()))
                break
    return stopped, sources


def either_side(policy: Policy, log_probs: torch.Tensor) -> list[Policy]:
    """The policy, also with lower and higher thresholds if a value equals one up to rounding, such as 1/3 and exp(log(1/3))."""
    probs = log_probs.exp()
    top = probs.topk(2, -1).values
    values = torch.stack((top[..., 0], top[..., 0] - top[..., 1], torch.special.entr(probs).sum(-1)))

    def moved(number: float, by: float) -> float:
        near = 0 < number < 1 and bool(((values - number).abs() < TINY).any())
        return number + by if near else number

    def changed(by: float) -> Policy:
        given = {name: getattr(policy, name) for name in policy.per_exit}
        numbers = {
            name: tuple(moved(one, by) for one in each) if isinstance(each, tuple) else moved(each, by)
            for name, each in given.items()
        }
        return replace(policy, **numbers)

    return [changed(by) for by in (0.0, -TINY, TINY)]


@st.composite
def policies(draw: st.DrawFn, exits: int) -> Policy:
    otherwise = draw(st.sampled_from(["last", "most_confident"]))
    strict = draw(st.booleans())
    number = st.floats(0, 1)
    numbers = st.one_of(number, st.tuples(*[number] * exits))
    kind = draw(st.sampled_from(["confidence", "margin", "entropy", "patience", "window"]))
    if kind == "patience":
        return Patience(draw(st.integers(1, exits + 1)), strict, otherwise=otherwise)
    if kind == "window":
        return DecisionWindow(draw(numbers), draw(numbers), otherwise=otherwise)
    made = {"confidence": Confidence, "margin": Margin, "entropy": Entropy}[kind]
    return made(draw(numbers), strict, otherwise=otherwise)


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 10_000), ties=st.booleans())
def test_policies_are_the_plain_loops(data: st.DataObject, seed: int, ties: bool) -> None:
    policy = data.draw(policies(4))
    logits = 2 * torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    prediction = data.draw(st.sampled_from(RULES))(logits.round() if ties else logits)
    log_probs, log_odds = prediction.log_probs, prediction.log_odds
    plain = [list(zip(*plain_answer(each, log_probs, log_odds), strict=True)) for each in either_side(policy, log_probs)]
    answer = policy.answer(prediction)
    assert policy.apply(log_probs).tolist() == answer.exit.tolist()
    for found, *allowed in zip(zip(answer.exit.tolist(), answer.source.tolist(), strict=True), *plain, strict=True):
        assert found in allowed  # all the same but where rounding decides
    rows = torch.arange(12)
    assert torch.equal(answer.log_probs, prediction.log_probs[answer.source - 1, rows])
    assert torch.equal(answer.fell_back, prediction.fell_back[answer.source - 1, rows])
    assert torch.equal(answer.labels, prediction.labels[answer.source - 1, rows])


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), first=st.floats(0, 1.5), second=st.floats(0, 1.5), ties=st.booleans(), strict=st.booleans())
@pytest.mark.parametrize("kind", [Confidence, Margin, Entropy, Patience])
def test_a_higher_threshold_never_stops_earlier(
    kind: type[Policy], some: Callable, seed: int, first: float, second: float, ties: bool, strict: bool
) -> None:
    log_probs, _ = some(20, seed, ties=ties)
    low, high = sorted((first, second))
    if kind is Entropy:
        low, high = high, low
    if kind is Patience:
        low, high = 1 + int(4 * low), 1 + int(4 * high)
    assert bool((kind(low, strict).apply(log_probs) <= kind(high, strict).apply(log_probs)).all())


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), ties=st.booleans(), threshold=st.sampled_from([0.0, 1 / 6, 0.5, 1.0]))
def test_strict_never_stops_earlier_and_differs_only_on_ties(some: Callable, seed: int, ties: bool, threshold: float) -> None:
    log_probs, _ = some(20, seed, ties=ties)
    loose, strict = Confidence(threshold).apply(log_probs), Confidence(threshold, strict=True).apply(log_probs)
    assert bool((loose <= strict).all())
    confidence = log_probs.amax(-1).exp()
    differs = loose != strict
    assert bool(torch.isclose(confidence[loose - 1, torch.arange(20)], torch.tensor(threshold).double())[differs].all())


def test_equal_confidences_stop_together_and_the_first_of_equally_confident_exits_wins() -> None:
    log_probs = torch.tensor([[[0.5, 0.5]], [[0.75, 0.25]], [[0.25, 0.75]], [[0.5, 0.5]]]).log()
    assert Confidence(0.5).apply(log_probs).tolist() == [1]
    assert Confidence(0.5, strict=True).apply(log_probs).tolist() == [2]
    prediction = anytime.Prediction(log_probs, torch.zeros(4, 1, dtype=torch.bool))
    answer = Confidence(0.9, otherwise="most_confident").answer(prediction)
    assert (answer.exit.tolist(), answer.source.tolist(), answer.labels.tolist()) == ([4], [2], [0])


def test_the_most_confident_answer_is_that_of_caching_at_the_end() -> None:
    logits = 2 * torch.randn(5, 50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    answer = Confidence(2.0, otherwise="most_confident").answer(anytime.Latest()(logits))
    torch.testing.assert_close(answer.log_probs, anytime.Caching()(logits).log_probs[-1])
    assert bool((answer.exit == 5).all())


def test_one_exit_and_no_rows_are_fine() -> None:
    assert Confidence(0.9).apply(torch.zeros(1, 3, 1)).tolist() == [1, 1, 1]
    assert Margin(0.9).apply(torch.zeros(2, 3, 1)).tolist() == [1, 1, 1]
    assert Patience(2).apply(torch.zeros(3, 0, 1)).tolist() == []


def test_half_precision_is_read() -> None:
    log_probs = torch.tensor([[[0.75, 0.25]], [[0.5, 0.5]]]).log()
    assert Confidence(0.7).apply(log_probs.half()).tolist() == [1]
    assert Confidence(0.7).apply(log_probs.numpy()).tolist() == [1]


def test_log_probs_of_no_distribution_are_refused() -> None:
    policy = Confidence(0.5)
    with pytest.raises(ShapeError, match="shape"):
        policy.apply(torch.zeros(3, 1))
    with pytest.raises(DtypeError):
        policy.apply(torch.zeros(3, 2, 1, dtype=torch.long))
    with pytest.raises(ScaleError, match="exit 2, row 2"):
        policy.apply(torch.where(torch.arange(6).view(2, 3, 1) == 5, 1.0, 0.0))
    with pytest.raises(ScaleError):
        policy.apply(torch.full((2, 3, 1), torch.nan))


def test_settings_out_of_range_are_refused() -> None:
    log_probs = torch.zeros(3, 2, 1)
    for policy in (
        Confidence((0.5, 0.5)),
        Margin((0.5,) * 4),
        Entropy((1.0,)),
        DecisionWindow((0.1, 0.2), 0.5),
        DecisionWindow(0.1, (0.5,)),
    ):
        with pytest.raises(OptionError, match="3 exits"):
            policy.apply(log_probs)
    for bad in (float("nan"), "0.5", (), (0.5, float("nan")), None, True):
        with pytest.raises(OptionError):
            Confidence(bad)
        with pytest.raises(OptionError):
            DecisionWindow(0.0, bad)
    for count in (0, -1, 1.5, True):
        with pytest.raises(OptionError):
            Patience(count)
    with pytest.raises(OptionError, match="otherwise"):
        Confidence(0.5, otherwise="best")
    assert Confidence(torch.tensor([0.5, 0.25])).threshold == (0.5, 0.25)
    with pytest.raises(OptionError, match="scale"):
        Confidence(0.5, scale="percent")  # type: ignore[arg-type]


def test_patience_reads_the_labels_that_the_rule_names() -> None:
    """In float32 the sigmoid product has equal probabilities for classes whose evidence differs."""
    logits = torch.tensor([[[20.0, 30.0, -5.0]], [[21.0, 29.0, -5.0]], [[30.0, 20.0, -5.0]]])
    prediction = anytime.Product(anytime.combine.Sigmoid())(logits)
    assert prediction.labels[:2, 0].tolist() == [1, 1]
    assert Patience(2).answer(prediction).labels.tolist() == [1]


def test_only_a_class_that_is_alone_reaches_a_threshold_of_one_and_nobody_one_above() -> None:
    certain = torch.tensor([[[0.0, -torch.inf, -torch.inf], [0.0, -200.0, -300.0]]] * 2)
    assert Confidence(1.0).apply(certain).tolist() == [1, 2]
    assert Confidence(1.0, strict=True).apply(certain).tolist() == [2, 2]
    for threshold, scale in ((1.1, "probability"), (float("inf"), "probability"), (float("inf"), "log-odds")):
        assert Confidence(threshold, scale=scale).apply(certain).tolist() == [2, 2]  # type: ignore[arg-type]
    assert Confidence(199.0, scale="log-odds").apply(certain).tolist() == [1, 1]
    assert Confidence(201.0, scale="log-odds").apply(certain).tolist() == [1, 2]
