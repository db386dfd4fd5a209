"""The batteries find faults: each engine and policy below violates one law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from anytime.combine import Prediction
from anytime.errors import CheckError, OptionError, ShapeError
from anytime.models import MLP, MLPConfig
from anytime.policy import Confidence, Policy
from anytime.policy.stopping import PolicyState
from anytime.run.engines.eager import EagerEngine
from anytime.testing import check_engine, check_policy, check_rule

X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


class Faulty:
    """The eager engine, with one of its runs' methods replaced."""

    def __init__(self, model: MLP, fault: str) -> None:
        self.engine, self.fault, self.name, self.num_exits = EagerEngine(model), fault, "faulty", model.num_exits
        self.joins = fault == "mixed rows"

    def begin(self, x: Tensor) -> Any:
        run: Any = self.engine.begin(x)
        advance, keep, close = run.advance, run.keep, run.close
        match self.fault:
            case "wrong logits":
                run.advance = lambda: advance() + 0.01
            case "float64":
                run.advance = lambda: advance().double()
            case "shared memory":
                shared: list[Tensor] = []

                def reuse() -> Tensor:
                    shared.append(advance())
                    return shared[0].resize_(shared[-1].shape).copy_(shared[-1]) if len(shared) > 1 else shared[0]

                run.advance = reuse
            case "sorted rows":
                run.keep = lambda rows: keep(rows if rows.dtype == torch.bool else rows.sort().values)
            case "mixed rows":
                join = run.join
                run.join = lambda others: join(others[::-1])
            case "eager start":
                self.engine.begin(x).advance()
            case "open after close":
                run.close = lambda: None
            case "close once":
                run.close = lambda: (close(), setattr(run, "close", None))
        return run


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("wrong logits", "gives_the_logits_of_the_model"),
        ("float64", "gives_the_logits_of_the_model"),
        ("shared memory", "gives_the_logits|runs_do_not_disturb"),
        ("sorted rows", "keeps_rows_in_the_order_given"),
        ("mixed rows", "joins_and_splits_runs"),
        ("eager start", "computes_only_what_is_requested"),
        ("open after close", "ends_once"),
        ("close once", "ends_once"),
    ],
)
def test_a_faulty_engine_is_found(fault: str, law: str) -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(classes=4, exits=3)).eval()
    check_engine(Faulty(model, "none"), model, X)
    with pytest.raises(CheckError, match=law):
        check_engine(Faulty(model, fault), model, X)


def test_an_example_of_one_row_is_refused() -> None:
    model = MLP(MLPConfig(classes=4, exits=3)).eval()
    with pytest.raises(ShapeError, match="first and last row differ"):
        check_engine(EagerEngine(model), model, X[:1])


@dataclass(frozen=True)
class Odd(Policy):
    """Stops by its fault."""

    fault: str

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        return (torch.zeros(batch, device=device),)

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        confidence = prediction.confidence
        match self.fault:
            case "not a mask":
                return state, (confidence > 0.5).float()
            case "batch mean":
                return state, confidence > confidence.mean()
            case "in place":
                return state, state[0].add_(1) > 2
        return state, confidence > 0.5

    def apply(self, prediction: Any) -> Tensor:
        return super().apply(prediction) - int(self.fault == "from 0")


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("not a mask", "decides_per_row"),
        ("batch mean", "treats_rows_independently"),
        ("in place", "steps_are_pure"),
        ("from 0", "steps_as_it_applies"),
    ],
)
def test_a_faulty_policy_is_found(fault: str, law: str) -> None:
    check_policy(Odd("none"))
    with pytest.raises(CheckError, match=law):
        check_policy(Odd(fault))


def test_a_policy_for_another_number_of_exits_is_found() -> None:
    with pytest.raises(CheckError, match="one per exit"):
        check_policy(Confidence((0.5, 0.5)), exits=3)


def test_sizes_that_are_not_counts_are_refused() -> None:
    with pytest.raises(OptionError, match="exits"):
        check_rule(Confidence(0.5), exits=[])
