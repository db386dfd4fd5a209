"""Rules and their metrics on a GPU in one read of the logits, by a Triton kernel.

`FusedRules.follow` is `anytime.metrics.follow` for several rules at once. CUDA builds of torch include Triton. Where it is
missing, and for rules and sizes that the kernel does not know, the callers use the operations of torch.
"""

from __future__ import annotations

from anytime.metrics.fused.plan import NO_FAULT, FusedRules, SetTask, fused_rules

__all__ = ["NO_FAULT", "FusedRules", "SetTask", "fused_rules"]
