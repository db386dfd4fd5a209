"""`anytime export MODEL_FOLDER`: the stages of a model, with a rule inside, for any runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from anytime.safe_text import print_safely as print


def export(
    model: Path,
    /,
    *,
    out: Path,
    rule: str | None = None,
    format: Literal["onnx", "torch-export"] = "onnx",
    example_size: str | None = None,
    build: str | None = None,
) -> int:
    """Write the stages of a model, each with the rule's step inside, and a description of how to run them.

    Args:
        model: A folder that `anytime.save` or `anytime train` wrote.
        out: Folder for the files.
        rule: A rule such as `product(softplus)`, or a rule.json that `anytime tune` wrote; by default the saved one, calibrated
            if temperatures were saved, or else product, with fewer than five classes caching.
        format: onnx for ONNX Runtime, on any machine, phone or browser; torch-export for `torch.export.load`, whose files can
            run code when they are loaded and therefore need `--trust`.
        example_size: Shape of one input, such as `3,32,32`; by default from the model's config.
        build: For a model of your own, package.module:function: makes it with any weights. The module is imported from the
            current folder, or is installed; code is never read from the model's folder.
    """
    from anytime.calibrate import as_rule
    from anytime.cli.console import progress_bar
    from anytime.cli.options import counts
    from anytime.cli.rules import read_rule, rule_files
    from anytime.loading.models import import_function, input_specs, open_model, saved_rule
    from anytime.models import measure_cost
    from anytime.models.input_spec import make_inputs
    from anytime.outputs import check_folder
    from anytime.run.export import export as write
    from anytime.run.export.description import KIND

    check_folder(out, kind=KIND, inputs=(model, model / "model", *rule_files(rule or "")))
    opened = open_model(model, build=import_function(build))
    network = opened.model
    size = None if example_size is None else counts(example_size, "example-size", example="3,32,32")
    example, about = make_inputs(input_specs(network, size), 1), opened.data
    chosen = saved_rule(opened) if rule is None else as_rule(read_rule(rule), exits=network.num_exits, classes=opened.classes)
    with progress_bar("exporting", "stages") as progress:
        write(
            network,
            out,
            rule=chosen,
            example=example,
            format=format,
            macs=measure_cost(network, example).macs,
            class_names=None if about is None else about.class_names,
            data=None if about is None or not about.mean else {"name": about.name, "mean": about.mean, "std": about.std},
            progress=progress,
        )
    # The folder may have stages of an earlier export as well.
    suffix, names = {"onnx": ".onnx", "torch-export": ".pt2"}[format], range(1, network.num_exits + 1)
    total = sum((out / f"stage_{number}{suffix}").stat().st_size for number in names)
    print(out)
    print(f"{network.num_exits} stages, {total / 1e6:.1f} MB; exported.json describes how to run them", file=sys.stderr)
    return 0
