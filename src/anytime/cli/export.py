"""`anytime export MODEL_FOLDER`: the stages of a model, with a rule inside, for any runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from anytime.cli.inputs import Opened
    from anytime.combine import Rule


def export(
    model: Path,
    /,
    *,
    out: Path,
    rule: str = "product",
    format: Literal["onnx", "torch-export"] = "onnx",
    example_size: str | None = None,
) -> int:
    """Write the stages of a model, each with the rule's step inside, and a description of how to drive them.

    Args:
        model: A folder that `anytime train` or `anytime.models.save` wrote.
        out: Folder for the files.
        rule: A rule such as `product(softplus)`, or a rule.json that `anytime tune` wrote.
        format: onnx for ONNX Runtime, on any machine, phone or browser; torch-export for `torch.export.load`. Files of the
            latter can run code when they are read, so that whoever loads them has to say `--trust`.
        example_size: Of one input, such as `3,32,32`; by default as the model's config says.
    """
    from anytime.cli.inputs import counts, input_shape, make_example, open_model
    from anytime.cli.rules import rule_files
    from anytime.models import measure_cost
    from anytime.outputs import check_folder
    from anytime.run.export import export as write
    from anytime.run.export.description import KIND

    check_folder(out, kind=KIND, inputs=(model, model / "model", *rule_files(rule)))
    opened = open_model(model)
    network = opened.network
    size = input_shape(network) if example_size is None else counts(example_size, "example-size", example="3,32,32")
    example = make_example(network, size, batch=1)
    about = opened.data
    write(
        network,
        out,
        rule=_rule(rule, opened),
        example=example,
        format=format,
        macs=measure_cost(network, example).macs,
        class_names=None if about is None else about.class_names,
        data=None if about is None or not about.mean else {"name": about.name, "mean": about.mean, "std": about.std},
    )
    # Of an earlier export there may be others in the folder.
    suffix, names = {"onnx": ".onnx", "torch-export": ".pt2"}[format], range(1, network.num_exits + 1)
    total = sum((out / f"stage_{number}{suffix}").stat().st_size for number in names)
    print(out)
    print(f"{network.num_exits} stages, {total / 1e6:.1f} MB; exported.json says how to drive them", file=sys.stderr)
    return 0


def _rule(text: str, opened: Opened) -> Rule[Any]:
    from anytime.calibrate import TunedRule
    from anytime.cli.rules import load_rule
    from anytime.combine import rule

    found = load_rule(Path(text)) if text.endswith(".json") else rule(text)
    if isinstance(found, TunedRule):
        found.check_fits(opened.model.num_exits, opened.classes)
        return found.rule
    return found
