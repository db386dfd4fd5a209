"""When to stop early, from a model and held-out data in one call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from anytime.checks import check_fraction
from anytime.combine import Rule, parse_rule
from anytime.combine.advice import default_rule
from anytime.combine.named import as_rule
from anytime.data.loaders import as_batches, labelled_batch
from anytime.errors import FewRowsWarning, OptionError
from anytime.evaluation.collect import collect_logits
from anytime.fitted import Fitted
from anytime.policy import RiskControl, fit_risk_control
from anytime.policy.risk import Method

# Networks are very sure of most inputs: from 0.99 to 0.999999 the steps are a quarter of a power of ten.
_GRID: Sequence[float] = (*(step / 100 for step in range(101)), *(1 - 10 ** (-step / 4) for step in range(9, 25)))
_BATCH = 256


def fit_stopping(
    model: Any,
    data: Any,
    *,
    loss: float = 0.01,
    rule: Rule[Any] | Fitted | str | None = None,
    method: Method = "crc",
    delta: float = 0.1,
) -> RiskControl:
    """Choose the confidence at which an input stops, so that stopping early costs at most so much accuracy.

    The policy belongs to one rule, which a `Runner` with this policy uses. If no input can stop early with the guarantee, every
    input runs to the last exit, and there is a `FewRowsWarning`.

    Args:
        model: A model with exits.
        data: Held-out rows with labels, in any form that `anytime.fit` takes; not those that the model was trained on.
        loss: The accuracy to lose against the last exit, as a fraction: 0.01 is one point.
        rule: A rule, its text or a fitted rule; by default that of a `Runner`: the product, or caching with fewer than five
            classes.
        method: What is guaranteed. `crc`: the expected loss is at most `loss`, on average over samples of held-out rows. `ucb`
            and `ltt`: it is, with probability `1 - delta` over the sample; they need more rows. See
            `anytime.policy.fit_risk_control`.
        delta: The probability that the guarantee of `ucb` or `ltt` fails.

    Example:
        >>> import torch
        >>> from anytime.models import MLP, MLPConfig
        >>> x = torch.randn(300, 2)
        >>> policy = fit_stopping(MLP(MLPConfig(classes=5)), [(x, torch.arange(300) % 5)], loss=0.5)
        >>> policy.rows, policy.rule
        (300, Product(activation=ReLU(), weights='linear', shift=0.0))
    """
    check_fraction(loss, "loss", fix="pass the part of the accuracy that stopping early may cost, such as loss=0.01")
    collected = collect_logits(model, map(labelled_batch, as_batches(data, batch=_BATCH)))
    exits, _, classes = collected.logits.shape
    chosen = default_rule(classes) if rule is None else as_rule(rule, exits=exits, classes=classes)
    policy = fit_risk_control(
        chosen(collected.logits),
        collected.labels,
        loss="gap",
        epsilon=loss,
        delta=delta,
        method=method,
        grid=_GRID,
        # Stopping earlier can lose less: later answers may be worse. Then CRC alone exceeds its bound.
        envelope=method == "crc",
    )
    if policy.threshold == 1:
        warnings.warn(
            f"No input stops early: {policy.rows} rows do not show that this costs at most {loss:g} of the accuracy. Pass more "
            "held-out rows, or a larger loss.",
            FewRowsWarning,
            stacklevel=2,
        )
    return replace(policy, text=_text_of(chosen))


def _text_of(rule: Rule[Any]) -> str | None:
    """The rule as text, or None for a rule of the caller's own, which has none."""
    text = repr(rule)
    with suppress(OptionError):
        return text if parse_rule(text) == rule else None
    return None
