"""Rules against the paper's formulas, computed the plain way in float64."""

from __future__ import annotations

import math

import pytest
import torch

import anytime
from anytime.errors import OptionError, StateError

LOGITS = torch.randn(5, 40, 12, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 3 + 1


def plain_product(evidence: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    out = []
    for m in range(len(evidence)):
        product = (evidence[: m + 1] ** weights[: m + 1, None, None]).prod(0)
        total = product.sum(-1, keepdim=True)
        out.append(torch.where(total > 0, product / total, logits[m].softmax(-1)))
    return torch.stack(out)


LINEAR = torch.arange(1, 6, dtype=torch.float64) / 5
ONES = torch.ones(5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("relu", lambda f: f.clamp(min=0)),
        ("heaviside(0.5)", lambda f: (f > 0.5).double()),
        ("clipped(2)", lambda f: f.clamp(0, 2)),
        ("softplus", lambda f: torch.log1p(f.exp())),
        ("sigmoid", torch.sigmoid),
        ("exponential", torch.exp),
        ("threshold(1.5)", lambda f: f * (f > 1.5)),
        ("threshold(1.5, mode=clamp)", lambda f: f.clamp(min=1.5)),
        ("relu(), shift=0.25", lambda f: (f + 0.25).clamp(min=0)),
        ("relu(), shift='1/K'", lambda f: (f + 1 / 12).clamp(min=0)),
    ],
)
@pytest.mark.parametrize(("weights", "values"), [("linear", LINEAR), ("ones", ONES)])
def test_product_is_the_papers_formula(text, evidence, weights, values) -> None:
    given = anytime.parse_rule(f"product({text}, weights={weights})")(LOGITS)
    assert torch.allclose(given.probs, plain_product(evidence(LOGITS), values, LOGITS), atol=1e-9)


def test_adaptive_threshold_follows_the_top_logits() -> None:
    activation = anytime.combine.AdaptiveReLU(scale=2.0, coefficients=(0.5, -0.2, 0.1), intercept=-0.3)
    top = LOGITS.sort(-1, descending=True).values[..., :3]
    tau = 2 * torch.sigmoid(0.5 * top[..., 0] - 0.2 * top[..., 1] + 0.1 * top[..., 2] - 0.3)[..., None]
    given = anytime.Product(activation)(LOGITS)
    assert torch.allclose(given.probs, plain_product(LOGITS * (tau < LOGITS) * (LOGITS > 0), LINEAR, LOGITS), atol=1e-9)


def test_caching_keeps_the_most_confident_softmax() -> None:
    softmax = LOGITS.softmax(-1)
    best = softmax[0]
    for m, given in enumerate(anytime.Caching()(LOGITS).probs):
        newer = softmax[m].amax(-1) > best.amax(-1)
        best = torch.where(newer[:, None], softmax[m], best)
        assert torch.allclose(given, best)


def test_caching_tells_confidences_apart_that_round_to_one() -> None:
    # In float32 both softmaxes have a confidence of exactly 1.
    logits = torch.tensor([[[0.0, 30.0, 0.0]], [[0.0, 0.0, 40.0]], [[35.0, 0.0, 0.0]]])
    assert (logits.softmax(-1).amax(-1) == 1).all()
    assert anytime.Caching()(logits).labels[:, 0].tolist() == [1, 2, 2]


def test_caching_ties_keep_the_earlier_answer_unless_told_otherwise() -> None:
    logits = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    assert anytime.Caching()(logits).labels[:, 0].tolist() == [0, 0]
    assert anytime.Caching(ties="later")(logits).labels[:, 0].tolist() == [0, 1]


def test_caching_of_rising_confidence_is_the_latest() -> None:
    logits = LOGITS[:1] * torch.arange(1, 6)[:, None, None]
    torch.testing.assert_close(anytime.Caching()(logits).log_probs, anytime.Latest()(logits).log_probs)


def test_mixture_is_the_mean_of_normalised_evidence() -> None:
    evidence = torch.nn.functional.softplus(LOGITS)
    shares = evidence / evidence.sum(-1, keepdim=True)
    wanted = shares.cumsum(0) / torch.arange(1, 6)[:, None, None]
    assert torch.allclose(anytime.parse_rule("mixture(softplus)")(LOGITS).probs, wanted)
    weights = (1.0, 2.0, 0.0, 4.0, 0.5)
    weighted = (shares * torch.tensor(weights)[:, None, None]).cumsum(0) / torch.tensor(weights).cumsum(0)[:, None, None]
    assert torch.allclose(anytime.Mixture(anytime.combine.Softplus(), weights=weights)(LOGITS).probs, weighted)


def test_collapse_falls_back_and_says_so_from_then_on() -> None:
    logits = torch.tensor([[[1.0, -1.0]], [[-1.0, 2.0]], [[3.0, 1.0]]])
    given = anytime.Product()(logits)
    assert given.fell_back[:, 0].tolist() == [False, True, True]
    assert torch.allclose(given.probs[1:], logits[1:].softmax(-1))


def test_mixture_expert_without_evidence_takes_part_with_its_softmax() -> None:
    logits = torch.tensor([[[1.0, 0.0]], [[-1.0, -2.0]]])
    given = anytime.Mixture()(logits)
    assert given.fell_back[:, 0].tolist() == [False, True]
    assert torch.allclose(given.probs[1, 0], (torch.tensor([1.0, 0.0]) + logits[1, 0].softmax(-1)) / 2)


def test_denormal_logits_are_evidence() -> None:
    logits = torch.tensor([[[1e-40, 2e-40, -1.0]]])
    assert torch.allclose(anytime.Product(weights="ones")(logits).probs, torch.tensor([1 / 3, 2 / 3, 0.0]), atol=1e-4)


def test_clip_constant_cancels() -> None:
    # C_b = max(1, 1/b) of the paper multiplies every class alike.
    given = anytime.parse_rule("product(clipped(0.25))")(LOGITS).probs
    assert torch.allclose(given, plain_product(4 * LOGITS.clamp(0, 0.25), LINEAR, LOGITS), atol=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: anytime.Product(weights="square"),
        lambda: anytime.Product(weights=(1.0, -1.0)),
        lambda: anytime.Product(weights=(1.0, math.nan)),
        lambda: anytime.Product(weights=()),
        lambda: anytime.Product(weights=3),
        lambda: anytime.Product(activation="relu"),
        lambda: anytime.Product(activation=anytime.ReLU),
        lambda: anytime.Product(shift="K"),
        lambda: anytime.Product(shift=math.inf),
        lambda: anytime.Product(weights=(1.0, 2.0)).start(3),
        lambda: anytime.Mixture(weights=(0.0, 1.0)),
        lambda: anytime.Caching(ties="newest"),
        lambda: anytime.combine.ClippedReLU(limit=0),
        lambda: anytime.combine.ClippedReLU(limit=math.nan),
        lambda: anytime.combine.Heaviside(math.nan),
        lambda: anytime.combine.ThresholdReLU(-1.0),
        lambda: anytime.combine.ThresholdReLU(1.0, mode="soft"),
        lambda: anytime.combine.AdaptiveReLU(1.0, (), 0.0),
        lambda: anytime.Latest().start(0),
        lambda: anytime.Latest().start(True),
        lambda: anytime.Latest().start(2.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.expected
    assert caught.value.fix


def test_a_state_of_another_rule_is_refused() -> None:
    with pytest.raises(StateError, match="CachingState"):
        anytime.Caching().step(anytime.Product().start(2), torch.zeros(1, 2))


@pytest.mark.parametrize(
    "text", ["latest", "caching", "product", "product(softplus, weights=ones)", "product(weights=(0, 2, 0, 1))", "mixture"]
)
@pytest.mark.parametrize("seen", [1, 2, 4])
def test_the_answer_after_some_exits_is_what_stepping_gives(text: str, seen: int) -> None:
    rule = anytime.parse_rule(text)
    logits = torch.randn(4, 50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = rule.start(4)
    for now in logits[:seen]:
        state, wanted = rule.step(state, now)
    found = rule.after(logits[:seen], 4)
    torch.testing.assert_close(found.log_probs, wanted.log_probs)
    assert torch.equal(found.fell_back, wanted.fell_back)
