"""Compile the Triton kernels for an H200, which needs no GPU. Its interpreter accepts what the compiler refuses."""

from __future__ import annotations

from typing import Any

from anytime.combine import encoded
from anytime.metrics.fused import layout

KINDS = encoded.PRODUCT, encoded.PRODUCT, encoded.MIXTURE
ACTIVATIONS = encoded.LOGARITHM, encoded.SOFTPLUS, encoded.EXPONENTIAL
WHOLE = {"whole": "*i32", "marks": "*i8", "faults": "*i64", "picked": "*i64", "labels": "*i64", "fell_back": "*i8"}
NUMBERS = {"lam_reg": "fp32", "draws": "*fp32"} | dict.fromkeys(("exit_stride", "row_stride", "draws_exit", "draws_row"), "i64")
COUNTS = dict.fromkeys(("count", "first_row", "slots", "exits", "classes", "k_reg"), "i32")


def build(kernel: Any, real: str, logits: str, **constants: Any) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = WHOLE | NUMBERS | COUNTS | {"logits": logits} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, real) for name in kernel.arg_names}
    values = {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    compile(ASTSource(kernel, signature, values), GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False, "num_stages": 1})
    print("compiled", kernel.__name__, real, logits, flush=True)


def main() -> None:
    from anytime.combine.fused.kernel import combine_product
    from anytime.metrics.fused.kernel import follow_rows

    for real, logits in (("*fp32", "*fp32"), ("*fp32", "*fp16"), ("*fp64", "*fp64")):
        for task in (layout.NO_SETS, layout.SCORES, layout.SIZES):
            build(
                follow_rows, real, logits, latest=0, caching=1, later_ties=False, kinds=KINDS, activations=ACTIVATIONS,
                experts=3, chosen=task == layout.SCORES, labelled=True, task=task, randomised=True, original=True, empty=False,
                double=real == "*fp64", rows=2, width=64, depth=4,
            )  # fmt: skip
    for real in ("*fp32", "*fp64"):
        for activation in ACTIVATIONS:
            build(combine_product, real, real, activation=activation, rows=2, width=64)


if __name__ == "__main__":
    main()
