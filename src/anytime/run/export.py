"""A model and its rule as files that any runtime can drive: one a stage, with the rule's step inside.

A stage is given what the one before left, the network's maps and the rule's running evidence alike, and gives the distribution
and what the next one needs. Who drives them need not know the method, and needs no Python:

```
values = [x]
for each stage:
    probs, log_probs, fell_back, labels, *values = the outputs of the stage, given `values` as its inputs, in order
    stop here, or go on
```

The files and their description (`exported.json`) are one bundle with checksums; `load_exported` runs it.

ONNX is the default and the format to give to others: it holds no code. A `.pt2` file of `torch.export` can run any code when it
is read, so `load_exported` reads it only for a caller who says `trusted=True`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from anytime.artifacts import json_text, write_bundle
from anytime.checks import check_choice, check_costs, check_scale
from anytime.combine.base import Rule
from anytime.combine.named import parse_rule
from anytime.errors import CheckError, OptionError
from anytime.models.base import Carry, ExitModel, StagedModel, is_staged
from anytime.run.description import FORMAT, KIND, NAME, VERSION, Format, check_description
from anytime.run.engines.folding import copied
from anytime.run.engines.onnx import (
    OPSET,
    Free,
    Stage,
    dynamic_shapes,
    exported,
    free_sizes,
    make_session,
    onnx_bytes,
    require,
    two_rows,
)
from anytime.run.exported import LARGEST_STAGE, ExportedModel, load_exported
from anytime.run.onnx_safety import strip_metadata
from anytime.run.rule_step import GIVES, RuleStep, flat, typical_states

__all__ = ["TOLERANCE", "ExportedModel", "export", "load_exported"]

TOLERANCE = 1e-4
"""How far a stage's logits may lie from the model's, relative to the largest of an exit, and a step from the rule's."""
_IR_VERSION = 8
"""That of the opset, so that runtimes from 2022 on read the files."""
_SUFFIX = {"onnx": "onnx", "torch-export": "pt2"}
_HOW = (
    "values = [x]",
    "for stage in stages:",
    "    inputs = the names in stage.inputs with the values, in order",
    "    probs, log_probs, fell_back, labels, *values = run stage.file with these inputs",
    "    answer with labels and probs; stop when time is up, or go on",
)


@torch.no_grad()
def export(
    model: ExitModel,
    folder: str | Path,
    *,
    rule: Rule[Any] | str,
    example: Tensor,
    format: Format = "onnx",
    macs: Sequence[float] | None = None,
    class_names: Sequence[str] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Write the stages of a model, each with the rule's step inside, and their description.

    Args:
        model: A staged torch module (`anytime.models.is_staged`); it stays as it is.
        folder: Where; it is made if there is none.
        rule: The rule, or the text that names it.
        example: Inputs like those to come, batch first. The number of rows stays free.
        format: `onnx` for ONNX Runtime on any machine, phone or browser; `torch-export` for `torch.export.load`, which can run
            code that is hidden in a file: who loads it has to trust the folder.
        macs: The cumulative MACs for one input up to each exit (`anytime.models.measure_cost`), to be written down.
        class_names: The names of the classes, to be written down.
        data: How images were normalised, to be written down: `{"name": "cifar10", "mean": [...], "std": [...]}`, per channel.

    Returns:
        The folder.
    """
    check_choice(format, "format", get_args(Format))
    if not is_staged(model):
        raise OptionError(
            f"a {type(model).__name__} cannot be run stage by stage",
            expected="a model with stage(exit, carry), see anytime.models.is_staged",
            fix="attach the exits with method='trace', which says what is in the way",
        )
    known = parse_rule(rule) if isinstance(rule, str) else rule
    copy = copied(model)
    assert isinstance(copy, StagedModel)
    plans = _plans(copy, known, two_rows(example))
    classes = plans[0].logits.shape[1]
    description: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": format,
        "made_with": f"torch {torch.__version__}" + (f", ONNX opset {OPSET}" if format == "onnx" else ""),
        "exits": copy.num_exits,
        "classes": classes,
        "class_names": _check_class_names(class_names, classes),
        "macs": None if macs is None else check_costs(macs, exits=copy.num_exits).tolist(),
        "data": None
        if data is None
        else {key: value if isinstance(value, str) else list(value) for key, value in data.items()},
        "rule": repr(known),
        "tolerance": TOLERANCE,
        "stages": [_described(plan, f"stage_{number}.{_SUFFIX[format]}") for number, plan in enumerate(plans, 1)],
        "how_to_drive": _HOW,
    }
    _check_readable(description)
    write = _onnx_file if format == "onnx" else _torch_file
    names = [stage["file"] for stage in description["stages"]]
    files = {name: _check_size(name, write(plan)) for name, plan in zip(names, plans, strict=True)}
    write_bundle(folder, {NAME: json_text(description).encode(), **files}, kind=KIND)
    return Path(folder)


@dataclass(frozen=True)
class _Plan:
    """A stage to be written: the modules, examples of what they are given, and all names in order.

    `logits` and `state` have rows of all kinds for the step; `inputs` and `outputs` fit together.
    """

    stage: Stage
    step: RuleStep
    logits: Tensor
    state: dict[str, Tensor]
    carried: list[str]
    left: list[str]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    free: dict[str, Free]

    def sizes(self, name: str) -> Free:
        """The dimensions of an input or output that are not fixed."""
        return {0: "batch", **self.free.get(name, {})}


def _plans(model: StagedModel, rule: Rule[Any], x: Tensor) -> list[_Plan]:
    assert isinstance(model, nn.Module)
    carry: Carry = (x,)
    first = model.stage(0, carry)[1]
    check_scale(first[None], log_probs=not rule.reads_scale)
    classes = first.shape[1]
    plans = []
    for exit, (logits, state) in enumerate(typical_states(rule, exits=model.num_exits, classes=classes)):
        last = exit + 1 == model.num_exits
        stage, step = Stage(model, exit), RuleStep(rule, state, last=last)
        left, _ = model.stage(exit, carry)
        carried = [f"carry_{place}" for place in range(len(carry))] if exit else ["x"]
        inputs = dict(zip(carried, carry, strict=True)) | flat(state.select(torch.arange(len(x))))
        gave = _StageAndStep(stage, step, len(carry))(*inputs.values())
        after = [] if last else flat(rule._update(state, logits)[0])
        next_names = [*(f"next_carry_{place}" for place in range(len(left))), *(f"next_{name}" for name in after)]
        outputs = dict(zip((*GIVES, *next_names), gave, strict=True))
        free = dict(zip(carried, free_sizes(model, exit), strict=False))
        free |= dict(zip(next_names[: len(left)], free_sizes(model, exit + 1), strict=False))
        plans.append(_Plan(stage, step, logits, flat(state), carried, next_names[: len(left)], inputs, outputs, free))
        carry = left
    return plans


class _StageAndStep(nn.Module):
    """A stage and the rule's step after it as one function of tensors."""

    def __init__(self, stage: Stage, step: RuleStep, given: int) -> None:
        super().__init__()
        self.stage, self.step, self.given = stage, step, given
        self.eval()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        *left, logits = self.stage(*values[: self.given])
        gave = self.step(logits, *values[self.given :])
        return *gave[: len(GIVES)], *left, *gave[len(GIVES) :]


def _onnx_file(plan: _Plan) -> bytes:
    """The stage and the step, each by the exporter that suits it, joined at the logits."""
    onnx, compose = require("onnx"), require("onnx.compose")
    state, gives = list(plan.state), [name for name in plan.outputs if name not in plan.left]
    carry = tuple(plan.inputs[name] for name in plan.carried)
    stage = onnx_bytes(plan.stage, carry, inputs=plan.carried, outputs=[*plan.left, "logits"], free=plan.free)
    step = exported(plan.step, (plan.logits, *plan.state.values()), inputs=["step_logits", *state], outputs=gives)
    _check_step(plan, make_session(step))
    parts = []
    for prefix, file in (("stage/", stage), ("step/", step)):
        part = onnx.load_from_string(file)
        part.ir_version = _IR_VERSION
        parts.append(compose.add_prefix(part, prefix, rename_inputs=False, rename_outputs=False))
    joined = compose.merge_models(*parts, io_map=[("logits", "step_logits")])
    for listed, names in ((joined.graph.input, plan.inputs), (joined.graph.output, plan.outputs)):
        by_name = {value.name: value for value in listed}
        del listed[:]
        listed.extend(by_name[name] for name in names)
    return _finished(onnx, joined)


def _finished(onnx: Any, model: Any) -> bytes:
    """The file as other tools take it: one import of the operators, which merging repeats, no metadata, checked in full."""
    del model.opset_import[:]
    model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    strip_metadata(model)
    model.producer_name = "anytime"
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def _check_step(plan: _Plan, session: Any) -> None:
    """A step in ONNX gives what the rule gives, whatever the rows are like."""
    values = (plan.logits, *plan.state.values())
    wanted = plan.step(*values)
    names = [each.name for each in session.get_inputs()]
    found = session.run(None, dict(zip(names, (value.numpy() for value in values), strict=True)))
    for one, other in zip(map(torch.from_numpy, found), wanted, strict=True):
        if not torch.allclose(one.double(), other.double(), rtol=TOLERANCE, atol=TOLERANCE):
            raise CheckError(
                f"the step of {plan.step.rule} gives other numbers as ONNX",
                expected=f"the rule's own to {TOLERANCE:g}",
                fix="use format='torch-export', or another rule",
            )


def _torch_file(plan: _Plan) -> bytes:
    module = _StageAndStep(plan.stage, plan.step, len(plan.carried))
    sizes = (dynamic_shapes([plan.sizes(name) for name in plan.inputs]),)
    try:
        program = torch.export.export(module, tuple(plan.inputs.values()), dynamic_shapes=sizes, strict=False)
    except Exception as error:
        raise OptionError(
            f"stage {plan.stage.exit + 1} cannot be exported: {str(error).strip().splitlines()[0]}",
            expected="stages and a rule without branches on numbers",
            fix="see the error above; format='onnx' may do, as it traces",
        ) from error
    _forget_unused(program)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the paths of this machine
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _forget_unused(program: torch.export.ExportedProgram) -> None:
    """Take out weights that this stage does not use: an export keeps those of the whole model."""
    specs = program.graph_signature.input_specs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in list(specs):
        node = nodes.get(spec.arg.name)
        if spec.target is not None and node is not None and not node.users:
            program.graph.erase_node(node)
            specs.remove(spec)
            program.state_dict.pop(spec.target, None)
            program.constants.pop(spec.target, None)
    program.graph_module.recompile()


def _described(plan: _Plan, file: str) -> dict[str, Any]:
    def listed(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [plan.sizes(name).get(place, size) for place, size in enumerate(tensor.shape)],
            }
            for name, tensor in tensors.items()
        ]

    return {"file": file, "inputs": listed(plan.inputs), "outputs": listed(plan.outputs)}


def _check_readable(description: Mapping[str, Any]) -> None:
    try:
        check_description(description)
    except ValueError as error:
        raise OptionError(
            f"the description of these stages {error}",
            expected="values that load_exported can read",
            fix="correct macs, class_names or data; convert a model in bfloat16 with model.float()",
        ) from error


def _check_size(name: str, data: bytes) -> bytes:
    if len(data) > LARGEST_STAGE:
        raise OptionError(
            f"{name} would have {len(data):,} bytes",
            expected=f"at most {LARGEST_STAGE:,}, as ONNX files are limited to",
            fix="export a smaller model, or one with more exits: the weights are shared out among the stages",
        )
    return data


def _check_class_names(names: Sequence[str] | None, classes: int) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or len(names) != classes or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"class_names are {len(names)} {type(names).__name__} entries",
            expected=f"{classes} names, one per class",
            fix="give them in the order of the logits, or leave them out",
        )
    return list(names)
