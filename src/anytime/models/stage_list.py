"""A model with exits from a list of stages of the user's own, such as the blocks and classifiers of an MSDNet port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anytime.checks import Inputs, tensors_of
from anytime.errors import OptionError, ShapeError
from anytime.models.attach.probe import call, evaluating, logits_of
from anytime.models.base import Carry, MultiExit

Stage = nn.Module | tuple[nn.Module, nn.Module]
"""A module `features -> (features, logits)`, or a body `features -> features` and a head `features -> logits`."""
_FORMS = "a module that returns (features, logits), or a pair (body, head)"


class StageList(MultiExit):
    """Runs a list of stages; `from_outputs` makes it.

    Args:
        stages: One per exit. The last may be a module that returns the logits alone.
        exits: The number of stages, if it is to be checked.
        example: A batch of inputs. It is needed where the features between stages are several tensors, or the inputs a dict.
    """

    stops_early = True

    def __init__(
        self, stages: Sequence[Stage] | nn.ModuleList, *, exits: int | None = None, example: Inputs | None = None
    ) -> None:
        super().__init__()
        pairs = [_parts(stage, exit) for exit, stage in enumerate(stages, 1)]
        if not pairs or exits not in (None, len(pairs)):
            raise OptionError(
                f"a list of {len(pairs)} stages" + (f" with exits={exits}" if exits else ""),
                expected="one stage per exit, at least one",
                fix="pass a stage per exit, and omit exits",
            )
        self.bodies = nn.ModuleList(body for body, _ in pairs)
        self.heads = nn.ModuleList(head or nn.Identity() for _, head in pairs)
        self._paired = [head is not None for _, head in pairs]
        self.num_exits = len(pairs)
        self.training = any(body.training for body in self.bodies)
        # The structure of the features that each stage reads, with the place in the carry for each tensor; one tensor is 0.
        self._layouts: list[Any] = [0] * self.num_exits
        self._sizes = [1] * self.num_exits
        if example is not None:
            self.input_names = tuple(example) if isinstance(example, dict) else ()
            self._learn_layouts(example)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run one stage on the tensors of its features, flattened."""
        self._check_carry(exit, carry)
        given = self._inputs(carry) if exit == 0 else pytree.tree_map(carry.__getitem__, self._layouts[exit])
        features, logits = self._run(exit, given)
        if exit + 1 == self.num_exits:
            return (), logits
        leaves, structure = pytree.tree_flatten(features)
        if structure != pytree.tree_structure(self._layouts[exit + 1]):
            raise ShapeError(
                f"stage {exit + 1} returns features that are a {type(features).__name__} of {len(leaves)} tensors",
                expected="one tensor" if not self._seen else f"the structure in the example, {self._sizes[exit + 1]} tensors",
                fix="pass an example, with which every input must agree: from_outputs(stages, example=x)",
            )
        return tuple(leaves), logits

    def carry_size(self, exit: int) -> int:
        """The number of tensors in the inputs, or in the features before a stage."""
        return self._sizes[exit]

    _seen = False

    @torch.no_grad()
    def _learn_layouts(self, example: Inputs) -> None:
        given: Any = example
        self._sizes[0] = len(tensors_of(example, self.input_names))
        with evaluating(self):
            for exit in range(self.num_exits - 1):
                given, _ = self._run(exit, given)
                leaves, structure = pytree.tree_flatten(given)
                self._layouts[exit + 1] = pytree.tree_unflatten(range(len(leaves)), structure)
                self._sizes[exit + 1] = len(leaves)
                _check_features(exit, leaves, len(tensors_of(example)[0]))
            self._run(self.num_exits - 1, given)
        self._seen = True

    def _run(self, exit: int, given: Any) -> tuple[Any, Tensor]:
        """The features and the logits of a stage, whose first takes inputs of any structure."""
        output = call(self.bodies[exit], given) if exit == 0 else self.bodies[exit](given)
        if self._paired[exit]:
            return output, self._logits(exit, self.heads[exit](output))
        if isinstance(output, list | tuple) and len(output) == 2:
            return output[0], self._logits(exit, output[1])
        if exit + 1 == self.num_exits:
            return None, self._logits(exit, output)
        got = f"{len(output)} values" if isinstance(output, list | tuple) else f"a {type(output).__name__}"
        raise ShapeError(
            f"stage {exit + 1} returns {got}",
            expected="(features, logits)",
            fix="pass the stage as a pair (body, head), or wrap it in a module that returns (features, logits)",
        )

    def _logits(self, exit: int, output: Any) -> Tensor:
        logits = logits_of(output)
        if logits.ndim != 2:
            raise ShapeError(
                f"stage {exit + 1} returns logits of shape {tuple(logits.shape)}",
                expected="(batch, classes)",
                fix="return (features, logits) in this order, and flatten the features in the head",
            )
        return logits


def _parts(stage: Any, exit: int) -> tuple[nn.Module, nn.Module | None]:
    if isinstance(stage, nn.Module):
        return stage, None
    if isinstance(stage, list | tuple) and len(stage) == 2 and all(isinstance(part, nn.Module) for part in stage):
        return stage[0], stage[1]
    raise OptionError(
        f"stage {exit} is a {type(stage).__name__}",
        expected=_FORMS,
        fix="wrap functions in a torch.nn.Module; zip(net.blocks, net.heads) makes pairs",
    )


def _check_features(exit: int, leaves: Sequence[Any], rows: int) -> None:
    wrong = next((leaf for leaf in leaves if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows), None)
    if wrong is not None or not leaves:
        shown = tuple(wrong.shape) if isinstance(wrong, Tensor) else type(wrong).__name__
        raise ShapeError(
            f"the features of stage {exit + 1} contain {shown} for {rows} inputs",
            expected="tensors with the batch first, which rows can be dropped from",
            fix="keep anything else as an attribute of the stages, and put the batch first",
        )
