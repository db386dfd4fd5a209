"""Really stopping: a model runs stage by stage, and inputs that are done leave the running batch.

What is carried to the next stage, the rule's state and the policy's lose the same rows. The answers are those that
`policy.answer(rule(logits))` gives on the logits of all exits, up to the rounding of layers that compute a smaller batch in
another order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anytime.checks import check_number
from anytime.combine import Prediction, Rule, State
from anytime.errors import OptionError
from anytime.models import Carry, StagedModel, is_staged
from anytime.policy.stopping import FittedPolicy, Policy, Stopped

S = TypeVar("S", bound=State)

BREAK_EVEN = 0.85
"""The fraction of rows left at which dropping the others pays after every exit of the CIFAR MSDNet, in batches of 64 on a CPU,
as measured by `python benchmarks/compaction.py`."""


@torch.no_grad()
def run_batch(
    model: StagedModel, x: Tensor, rule: Rule[S], policy: Policy | FittedPolicy, *, compact_when: float = BREAK_EVEN
) -> Stopped:
    """Answer a batch, each input at the exit where the policy lets it stop; nothing after the last of these is computed.

    Args:
        model: A model that runs stage by stage (`anytime.models.is_staged`), in eval mode.
        x: Inputs with the batch first.
        rule: What to answer.
        policy: When to stop.
        compact_when: Drop the rows that are done as soon as at most this fraction of the running batch still goes on; 0 never
            drops any, 1 drops each at once. Copying what is carried takes time, so a few rows are not worth it.

    Example:
        >>> from anytime import Product
        >>> from anytime.models import MLP, MLPConfig
        >>> from anytime.policy import Patience
        >>> model = MLP(MLPConfig(classes=4, inputs=8, exits=5)).eval()
        >>> run_batch(model, torch.randn(16, 8), Product(), Patience(2)).log_probs.shape
        torch.Size([16, 4])
    """
    _check(model, compact_when)
    exits, batch, device = model.num_exits, len(x), x.device
    stops = policy.policy if isinstance(policy, FittedPolicy) else policy
    surest = stops.otherwise == "surest"
    carry: Carry = (x,)
    state, memory = rule.start(exits), stops.start(batch, device)
    rows = torch.arange(batch, device=device)  # which input each row of the running batch is
    going = torch.ones(batch, dtype=torch.bool, device=device)
    last, source = torch.zeros_like(rows), torch.zeros_like(rows)
    best = torch.full((batch,), -torch.inf, dtype=torch.float64, device=device)
    answers: Prediction | None = None
    for exit in range(exits):
        carry, logits = model.stage(exit, carry)
        state, now = rule.step(state, logits)
        if answers is None:
            policy.check_fits(exits, logits.shape[1])
            answers = now.clone()
        memory, passed = stops.stop(memory, exit, now)
        if exit + 1 == exits:  # nobody goes on from here, and who has not passed before takes what there is for such
            passed = torch.full_like(going, not surest)
        taken = going & passed
        if surest:
            sure = now.log_odds.double()
            taken |= going & (sure > best[rows])
            best[rows] = torch.maximum(sure, best[rows])
        place = rows[taken]
        answers.write(place, now.at(taken))
        source[place] = exit + 1
        last[rows[going]] = exit + 1
        going = going & ~passed
        left = int(going.sum())
        if left == 0:
            break
        if left < len(going) and left <= compact_when * len(going):
            keep = going.nonzero()[:, 0]
            carry, memory = tuple(part[keep] for part in carry), tuple(part[keep] for part in memory)
            state, rows, going = state.select(keep), rows[keep], going[keep]
    assert answers is not None  # there is at least one exit
    return Stopped(last, source, answers)


def _check(model: Any, compact_when: float) -> None:
    if not is_staged(model):
        raise OptionError(
            f"the model is a {type(model).__name__}, which does not run stage by stage",
            expected="a model with stage(exit, carry), whose `staged` is true",
            fix="give the class a method stage; policy.answer(rule(logits)) tells what stopping would give",
        )
    if isinstance(model, nn.Module) and model.training:
        raise OptionError(
            "the model is in training mode, where inputs of a batch may change one another's answers",
            expected="a model in eval mode",
            fix="call model.eval() first",
        )
    check_number(compact_when, "compact_when", low=0, most=1)
