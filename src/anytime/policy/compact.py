"""Running a batch that shrinks: the model runs stage by stage, and inputs that stop leave the batch.

The carried tensors, the rule's state and the policy's state drop the same rows. The answers are those of
`policy.answer(rule(logits))`, up to the rounding of layers that compute a smaller batch in another order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_number, tensors_of
from anytime.combine import Prediction, Rule, State
from anytime.errors import OptionError
from anytime.models import Carry, StagedModel, is_staged
from anytime.policy.stopping import Decisions, FittedPolicy, Policy, Stopped

S = TypeVar("S", bound=State)

BREAK_EVEN = 0.85
"""Dropping the other rows is faster if at most this fraction goes on: after every exit of the CIFAR MSDNet, in batches of 64 on
a CPU, measured by `python benchmarks/compaction.py`."""


class RunningBatch:
    """The inputs of a batch while they stop one by one, and the answer of each so far.

    Args:
        policy: When an input stops.
        batch: The number of inputs.
        exits: The number of exits.
        device: Where predictions are.
        compact_when: Drop stopped rows when at most this fraction of the running batch goes on.
    """

    def __init__(
        self, policy: Policy, batch: int, exits: int, device: torch.device | None = None, *, compact_when: float = BREAK_EVEN
    ) -> None:
        self._decisions = Decisions(policy, batch, exits, device)
        self._compact_when = compact_when
        self._answers: Prediction | None = None

    def take(self, prediction: Prediction) -> tuple[Tensor | None, bool]:
        """Take the running batch's predictions at the next exit.

        Returns:
            The rows to go on with, or None if none are dropped, and whether any input goes on.
        """
        rows, taken = self._decisions.rows, self._decisions.take(prediction)
        if self._answers is None:
            self._answers = prediction.clone()
        else:
            self._answers.write(rows[taken], prediction.at(taken))
        goes_on = bool(self._decisions.running.any())
        return self._decisions.drop_stopped(self._compact_when), goes_on

    def stopped(self) -> Stopped:
        """A copy of the answers so far; inputs that still run have that of the latest exit, or of their most confident one."""
        assert self._answers is not None  # at least one exit was taken
        return Stopped(self._decisions.exit.clone(), self._decisions.source.clone(), self._answers.clone())


@torch.no_grad()
def run_batch(
    model: StagedModel, x: Inputs, rule: Rule[S], policy: Policy | FittedPolicy, *, compact_when: float = BREAK_EVEN
) -> Stopped:
    """Answer a batch, each input at the exit where the policy stops it; no later stage is computed.

    Args:
        model: A model that runs stage by stage (`anytime.models.is_staged`), in eval mode.
        x: A tensor, or a tuple or dict of tensors, with the batch first.
        rule: Combines the exits.
        policy: When to stop.
        compact_when: Drop stopped rows when at most this fraction of the running batch goes on: 0 never drops any, 1 drops each
            at once. Copying the carried tensors takes time, so dropping few rows does not pay.

    Example:
        >>> from anytime import Product
        >>> from anytime.models import MLP, MLPConfig
        >>> from anytime.policy import Patience
        >>> model = MLP(MLPConfig(classes=4, inputs=8, exits=5)).eval()
        >>> run_batch(model, torch.randn(16, 8), Product(), Patience(2)).log_probs.shape
        torch.Size([16, 4])
    """
    _check(model, compact_when)
    exits, state = model.num_exits, rule.start(model.num_exits)
    carry: Carry = tensors_of(x, getattr(model, "input_names", ()))
    decide = policy.policy if isinstance(policy, FittedPolicy) else policy
    batch = RunningBatch(decide, len(carry[0]), exits, carry[0].device, compact_when=compact_when)
    for exit in range(exits):
        carry, logits = model.stage(exit, carry)
        state, prediction = rule.step(state, logits)
        if exit == 0:
            policy.check_fits(exits, logits.shape[1])
        keep, goes_on = batch.take(prediction)
        if not goes_on:
            break
        if keep is not None:
            carry, state = tuple(part[keep] for part in carry), state.select(keep)
    return batch.stopped()


def _check(model: Any, compact_when: float) -> None:
    if not is_staged(model):
        raise OptionError(
            f"the model is a {type(model).__name__}, which does not run stage by stage",
            expected="a model with stage(exit, carry) whose `staged` is true",
            fix="add a stage method to its class; policy.answer(rule(logits)) simulates stopping without one",
        )
    if isinstance(model, nn.Module) and model.training:
        raise OptionError(
            "the model is in training mode, in which inputs of a batch may change each other's answers",
            expected="a model in eval mode",
            fix="call model.eval() first",
        )
    check_number(compact_when, "compact_when", low=0, most=1)
