"""A policy with settings of the caller's own, as a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from anytime.errors import OptionError
from anytime.policy.stopping import Confidence, DecisionWindow, Entropy, FittedPolicy, Margin, Patience, Policy

_KNOWN: Mapping[str, type[Policy]] = {kind.__name__: kind for kind in (Confidence, DecisionWindow, Entropy, Margin, Patience)}


@dataclass(frozen=True)
class PlainPolicy(FittedPolicy, kind="plain-policy"):
    """A policy of this library whose settings were chosen, not fitted.

    Args:
        exits: The number of exits of its model.
        classes: The number of classes, or None for any.
        name: The class of the policy.
        settings: Its fields.

    Example:
        >>> PlainPolicy.of(Confidence(0.9), exits=3).policy
        Confidence(otherwise='last', threshold=0.9, strict=False, scale='probability')
    """

    name: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy.check_fits(self.exits, self.classes or 1)

    @classmethod
    def of(cls, policy: Policy, *, exits: int, classes: int | None = None) -> Self:
        """Wrap a policy."""
        if _KNOWN.get(type(policy).__name__) is not type(policy):
            raise OptionError(
                f"the policy is a {type(policy).__name__}",
                expected=f"a fitted policy, or one of {', '.join(_KNOWN)}: others cannot be stored",
                fix="pass your own policy to the Runner: Runner.load(folder, policy=MyPolicy())",
            )
        settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        return cls(exits, classes, type(policy).__name__, settings)

    @cached_property
    def policy(self) -> Policy:
        """The policy."""
        kind = _KNOWN.get(self.name)
        if kind is None or set(self.settings) != {field.name for field in dataclasses.fields(kind)}:
            raise OptionError(
                f"a policy {self.name!r} with the settings {', '.join(self.settings)}",
                expected=f"one of {', '.join(_KNOWN)}, with its fields",
                fix="save it again with this version",
            )
        return kind(**self.settings)
