"""Rules and their metrics on a GPU in one read of the logits, by a Triton kernel.

`follow_fused` is `anytime.metrics.follow` for several rules at once. CUDA builds of torch include Triton. Where it is missing, or for rules and sizes that the kernel
does not know, the plain operations of torch are used.
"""

from __future__ import annotations

from anytime.metrics.fused.plan import FusedRules, SetTask, fused_rules

__all__ = ["FusedRules", "SetTask", "fused_rules"]
