"""The learned ensembles against their formulas, computed the plain way in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anytime
from anytime.combine.learned import Arithmetic, Geometric
from anytime.combine.named import name_of
from anytime.errors import CheckError, OptionError, ShapeError
from anytime.testing import check_rule

RANDOM = torch.Generator().manual_seed(7)
LOGITS = 3 * torch.randn(3, 20, 4, generator=RANDOM, dtype=torch.float64)
V = ((0.3,), (-0.5, 0.2), (1.0, 0.0, -2.0))
B = torch.randn(3, 4, generator=RANDOM, dtype=torch.float64)
BIASES = tuple(map(tuple, B.tolist()))
KINDS = pytest.mark.parametrize("kind", [Geometric, Arithmetic])


def test_the_geometric_ensemble_is_the_formula() -> None:
    probs = LOGITS.softmax(-1)
    given = Geometric(V, BIASES)(LOGITS)
    for m in range(3):
        weights = torch.tensor(V[m], dtype=torch.float64).exp() / (m + 1)
        product = (probs[: m + 1] ** weights[:, None, None]).prod(0) * B[m].exp()
        assert torch.allclose(given.probs[m], product / product.sum(-1, keepdim=True))
    assert not given.fell_back.any()


def test_the_arithmetic_ensemble_is_the_formula() -> None:
    probs = LOGITS.softmax(-1)
    given = Arithmetic(V, BIASES)(LOGITS)
    for m in range(3):
        weights = torch.tensor(V[m], dtype=torch.float64).exp()
        total = (probs[: m + 1] * weights[:, None, None]).sum(0) + B[m].exp()
        assert torch.allclose(given.probs[m], total / total.sum(-1, keepdim=True))


def test_plain_ensembles_are_the_plain_means() -> None:
    log_probs = LOGITS.log_softmax(-1)
    geometric = torch.stack([log_probs[: m + 1].mean(0).softmax(-1) for m in range(3)])
    assert torch.allclose(Geometric.plain(3)(LOGITS).probs, geometric)
    arithmetic = torch.stack([log_probs[: m + 1].exp().mean(0) for m in range(3)])
    assert torch.allclose(Arithmetic.plain(3)(LOGITS).probs, arithmetic)


@KINDS
@pytest.mark.parametrize("exits", [1, 2, 8])
def test_it_passes_the_battery_for_its_number_of_exits(kind: Any, exits: int) -> None:
    check_rule(kind.plain(exits), exits=[exits])


@KINDS
def test_it_passes_the_battery_for_its_classes(kind: Any) -> None:
    check_rule(kind(V, BIASES), exits=[3], classes=4)
    check_rule(kind(((0.0,),), ((1.0,),)), exits=[1], classes=1)


@KINDS
def test_other_numbers_of_exits_and_classes_are_refused(kind: Any) -> None:
    rule = kind(V, BIASES)
    with pytest.raises(OptionError, match="fitted for 3 exits and got 2"):
        rule(LOGITS[:2])
    with pytest.raises(OptionError, match="got 4"):
        rule.start(4)
    with pytest.raises(ShapeError, match="fitted for 4 classes and got 3"):
        rule(LOGITS[..., :3])
    with pytest.raises(CheckError, match="fitted for 3 exits"):
        check_rule(rule)


@KINDS
def test_it_survives_being_written_down(kind: Any) -> None:
    for rule in (kind(V, BIASES), kind.plain(2), kind(((1e-7,),), ((-3e-5, 2.0),))):
        assert anytime.parse_rule(repr(rule)) == rule
        assert anytime.parse_rule(name_of(rule)) == rule
        assert hash(rule) == hash(anytime.parse_rule(repr(rule)))


@KINDS
def test_tensors_and_lists_become_tuples(kind: Any) -> None:
    rule = kind([list(row) for row in V], B)
    assert rule == kind(V, BIASES)
    assert rule.exits == 3


@KINDS
@pytest.mark.parametrize(
    ("v", "b"),
    [
        ((), ()),
        (3, ()),
        ("ab", ()),
        (((0.0, 1.0),), ()),
        (((0.0,), (0.0,)), ()),
        (((float("nan"),),), ()),
        (((float("inf"),),), ()),
        (((1e4,),), ()),
        ((("a",),), ()),
        (((True,),), ()),
        (V, BIASES[:2]),
        (V, (*BIASES[:2], (1.0,))),
        (V, ((), (), ())),
    ],
)
def test_numbers_that_make_no_sense_are_refused(kind: Any, v: Any, b: Any) -> None:
    with pytest.raises(OptionError) as caught:
        kind(v, b)
    assert caught.value.fix


def test_a_name_alone_is_not_enough() -> None:
    with pytest.raises(OptionError, match="geometric does not take these arguments"):
        anytime.parse_rule("geometric")


def test_exits_that_contradict_each_other_with_huge_logits_rule_no_class_out() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[[largest, -largest]], [[-largest, largest]]])
    for weight in (0.0, 2.0, 80.0):
        given = Geometric(((0.0,), (weight, weight)))(logits)
        assert not given.fell_back.any()
        assert given.probs[1].tolist() == [[0.5, 0.5]]


def test_wrong_sizes_for_the_battery_are_refused() -> None:
    for options in ({"exits": []}, {"exits": [0]}, {"classes": 0}):
        with pytest.raises(OptionError):
            check_rule(anytime.Product(), **options)  # type: ignore[arg-type]
