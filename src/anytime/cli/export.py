"""`anytime export MODEL_FOLDER`: the stages of a model, with a rule inside, for any runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anytime.errors import OptionError

if TYPE_CHECKING:
    from anytime.combine import Rule
    from anytime.models import MultiExit


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
    import torch

    from anytime.models import load, measure_cost
    from anytime.run.export import export as write

    network = load(model)
    size = _input_size(network) if example_size is None else _read_size(example_size)
    example = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    write(network, out, rule=_rule(rule, network), example=example, format=format, costs=measure_cost(network, example).macs)
    files = sorted(path for path in out.iterdir() if path.name.startswith("stage_"))
    total = sum(path.stat().st_size for path in files)
    print(out)
    print(f"{len(files)} stages, {total / 1e6:.1f} MB; exported.json says how to drive them", file=sys.stderr)
    return 0


def _rule(text: str, network: MultiExit) -> Rule[Any]:
    from anytime.calibrate import TunedRule
    from anytime.cli.rules import load_rule
    from anytime.combine import rule

    found = load_rule(Path(text)) if text.endswith(".json") else rule(text)
    if isinstance(found, TunedRule):
        config: Any = network.config
        found.check_fits(network.num_exits, config.classes)
        return found.rule
    return found


def _input_size(network: MultiExit) -> tuple[int, ...]:
    from anytime.models import MLP, ResNet

    config: Any = network.config
    if isinstance(network, MLP):
        return (config.inputs,)
    channels = config.channels if isinstance(network, ResNet) else 3
    return channels, config.image_size, config.image_size


def _read_size(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(
            f"--example-size is {text!r}", expected="whole numbers of at least 1 with commas", fix="3,32,32, for one"
        )
    return tuple(int(part) for part in parts)
