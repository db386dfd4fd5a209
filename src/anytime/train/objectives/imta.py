"""IMTA's two stages of training (Li et al. 2019), as objectives; the networks are in `anytime.models.imta`."""

from __future__ import annotations

import torch
from torch import Tensor

from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.models.imta import IMTA, balanced_exits
from anytime.models.msdnet import MSDNet
from anytime.train.objectives.losses import Objective, distillation, joint_cross_entropy


def equilibrium(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
    """Stage 1, gradient equilibrium: every exit's cross-entropy, `(exits,)`, with balanced gradients in the network."""
    if not isinstance(network, MSDNet):
        raise OptionError(
            f"gradient equilibrium came with a {type(network).__name__}",
            expected="an MSDNet, where it is known which maps an exit and the next stage share",
            fix="train with the objective joint",
        )
    return joint_cross_entropy(torch.stack(tuple(balanced_exits(network, images))), labels)


def one_for_all(*, share: float = 0.1, temperature: float = 1.0) -> Objective:
    """Stage 2, one-for-all distillation: all exits but the last learn from the last exit of stage 1 as well."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        if not isinstance(network, IMTA):
            raise OptionError(
                f"one-for-all distillation came with a {type(network).__name__}",
                expected="an IMTA network, which has the teacher within",
                fix="build one over a trained MSDNet with IMTA.on, or use the objective distillation",
            )
        logits, teacher = network.with_teacher(images)
        return distillation(logits, labels, teacher, share=share, temperature=temperature)

    return objective
