"""Ensembles as models with exits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.errors import OptionError, ShapeError
from anytime.models import MLP, AveragedEnsemble, Ensemble, MLPConfig
from anytime.testing import check_model

POINTS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))


def members(count: int, exits: int = 3) -> list[MLP]:
    torch.manual_seed(1)
    return [MLP(MLPConfig(classes=4, width=8, exits=exits)) for _ in range(count)]


def test_each_member_is_an_exit_in_the_order_given() -> None:
    first, second, third = nn.Linear(2, 4), nn.Sequential(nn.Linear(2, 4)), members(1)[0]
    ensemble = Ensemble([first, second, third])
    torch.testing.assert_close(ensemble(POINTS), torch.stack([first(POINTS), second(POINTS), third(POINTS)[-1]]))


def test_a_member_is_run_when_its_exit_is_requested() -> None:
    parts = [nn.Linear(2, 4) for _ in range(3)]
    ran: list[nn.Module] = []
    for part in parts:
        part.register_forward_hook(lambda module, *_: ran.append(module))
    run = Ensemble(parts).exits(POINTS)
    next(run)
    next(run)
    assert ran == parts[:2]


@pytest.mark.parametrize("kind", [Ensemble, AveragedEnsemble])
def test_both_kinds_pass_check_model(kind: Any) -> None:
    check_model(kind([nn.Sequential(nn.Linear(2, 4)) for _ in range(3)] if kind is Ensemble else members(2)), POINTS, classes=4)


def test_averaging_gives_the_logarithm_of_the_mean_softmax() -> None:
    parts = members(3)
    wanted = torch.stack([part(POINTS).softmax(-1) for part in parts]).mean(0)
    ensemble = Ensemble.averaged(parts)
    assert ensemble.num_exits == 3
    assert torch.allclose(ensemble(POINTS).exp(), wanted, atol=1e-6)
    assert torch.allclose(anytime.Latest()(ensemble(POINTS)).probs, wanted, atol=1e-6)


def test_a_stop_of_the_average_stops_all_members() -> None:
    closed = []

    class Watched(MLP):
        def exits(self, x: Tensor) -> Any:
            try:
                yield from super().exits(x)
            finally:
                closed.append(self)

    parts = [Watched(MLPConfig(classes=4)) for _ in range(2)]
    run = AveragedEnsemble(parts).exits(POINTS)
    next(run)
    assert not closed
    run.close()  # type: ignore[attr-defined]
    assert set(closed) == set(parts)


class Sum(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(left + 2 * right)  # type: ignore[no-any-return]


@pytest.mark.parametrize("x", [(POINTS, POINTS + 1), {"right": POINTS + 1, "left": POINTS}], ids=["tuple", "dict"])
def test_members_may_take_several_tensors(x: Any) -> None:
    parts = [Sum() for _ in range(3)]
    ensemble = Ensemble(parts, example=x).eval()
    torch.testing.assert_close(ensemble(x), torch.stack([part(POINTS, POINTS + 1) for part in parts]))
    check_model(ensemble, x, classes=4)
    with anytime.Runner(ensemble) as runner:
        torch.testing.assert_close(runner.predict(x).logits, ensemble(x))
    with pytest.raises(ShapeError, match="2 tensors") as caught:
        Ensemble(parts)(x)
    assert "example=x" in caught.value.fix


def test_members_with_exits_know_their_inputs() -> None:
    x = {"left": POINTS, "right": POINTS + 1}

    class Deep(Sum):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.last(super().forward(left, right).relu())  # type: ignore[no-any-return]

    parts = [anytime.attach_exits(Deep(), at=["layer"], example=x).eval() for _ in range(2)]
    torch.testing.assert_close(Ensemble(parts)(x), torch.stack([part(x)[-1] for part in parts]))
    averaged = AveragedEnsemble(parts).eval()
    assert averaged.staged
    check_model(averaged, x, classes=4)
    other = anytime.attach_exits(Deep(), at=["layer"], example=(POINTS, POINTS))
    with pytest.raises(OptionError, match="unnamed inputs or left, right"):
        AveragedEnsemble([parts[0], other])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ensemble([]),
        lambda: Ensemble(["model"]),  # type: ignore[list-item]
        lambda: Ensemble(None),  # type: ignore[arg-type]
        lambda: AveragedEnsemble([]),
        lambda: AveragedEnsemble([*members(1), *members(1, exits=2)]),
        lambda: AveragedEnsemble([nn.Linear(2, 4)]),  # type: ignore[list-item]
    ],
)
def test_members_that_do_not_fit_are_refused(make: Any) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert caught.value.fix


def test_members_with_other_classes_are_refused_when_they_run() -> None:
    first, second = MLP(MLPConfig(classes=3)), MLP(MLPConfig(classes=4))
    with pytest.raises(ShapeError, match="same classes"):
        AveragedEnsemble([first, second])(POINTS)
