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
        format: For ONNX Runtime, on any machine, phone or browser, or for `torch.export.load`.
        example_size: Of one input, such as `3,32,32`; by default as the model's config says.
    """
    from anytime.cli.inputs import counts, input_shape, make_example, open_model
    from anytime.cli.rules import rule_files
    from anytime.models import measure_cost
    from anytime.outputs import check_folder
    from anytime.run.export import export as write
    from anytime.run.exported import KIND

    check_folder(out, kind=KIND, inputs=(model, model / "model", *rule_files(rule)))
    opened = open_model(model)
    network = opened.model
    size = input_shape(network) if example_size is None else counts(example_size, "example-size", example="3,32,32")
    example = make_example(network, size, batch=1)
    write(network, out, rule=_rule(rule, opened), example=example, format=format, costs=measure_cost(network, example).macs)
    # Of an earlier export there may be others in the folder.
    files = [path for path in out.iterdir() if path.stem in {f"stage_{exit}" for exit in range(network.num_exits)}]
    total = sum(path.stat().st_size for path in files)
    print(out)
    print(f"{len(files)} stages, {total / 1e6:.1f} MB; exported.json says how to drive them", file=sys.stderr)
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
