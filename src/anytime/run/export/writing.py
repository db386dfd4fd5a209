"""Exporting a model and its rule: one file per stage, with the rule's step inside, for any runtime.

A stage takes what the one before returned, the network's feature maps and the rule's running state, and returns the
distribution and the inputs of the next stage. A driver needs neither Python nor the method:

```
values = the inputs: those of the first stage, in order
for each stage:
    probs, log_probs, fell_back, labels, *values = the outputs of the stage, given `values` as its inputs, in order
    stop here, or continue
```

The files and their description (`exported.json`) are one bundle with checksums; `load_exported` runs it.

ONNX is the default and the format to distribute: it contains no code. A `.pt2` file of `torch.export` can run any code when it
is read, so `load_exported` reads it only with `trusted=True`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from anytime.artifacts import json_text, write_bundle
from anytime.checks import Inputs, check_choice, check_costs, check_scale
from anytime.combine.base import Rule
from anytime.combine.named import parse_rule
from anytime.errors import CheckError, OptionError
from anytime.models.base import Carry, ExitModel, StagedModel, is_staged
from anytime.models.given import names_of, not_staged
from anytime.run.engines import onnx as onnx_export
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.folding import eval_copy
from anytime.run.engines.onnx import OPSET, Free, require
from anytime.run.export.description import FORMAT, KIND, NAME, VERSION, Format, check_description
from anytime.run.export.loading import LARGEST_STAGE
from anytime.run.export.onnx_safety import strip_metadata
from anytime.run.export.rule_step import OUTPUTS, RuleStep, flat, typical_states

TOLERANCE = 1e-4
"""How far logits may differ from the model's, relative to the largest logit of an exit, and a step from the rule's own."""
_IR_VERSION = 8
"""The version of the opset, so that runtimes from 2022 on can read the files."""
_SUFFIX = {"onnx": "onnx", "torch-export": "pt2"}
_HOW = (
    "values = the inputs, in the order of the first stage's inputs",
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
    example: Inputs,
    format: Format = "onnx",
    macs: Sequence[float] | None = None,
    class_names: Sequence[str] | None = None,
    data: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the stages of a model, each with the rule's step inside, and their description.

    Args:
        model: A staged torch module (`anytime.models.is_staged`); it is unchanged.
        folder: Where to write; it is created if necessary.
        rule: The rule, or the text that names it.
        example: Typical inputs, a tensor or a tuple or dict of tensors, batch first. The batch size stays dynamic. The names of
            a dict, or else the model's `input_names`, become those of the first stage's inputs; one tensor is named `x`.
        format: `onnx` for ONNX Runtime on any machine, phone or browser; `torch-export` for `torch.export.load`, which can run
            code hidden in a file: load it only from folders that you trust.
        macs: The cumulative MACs per input up to each exit (`anytime.models.measure_cost`), for the description.
        class_names: The names of the classes, for the description.
        data: The normalisation of images, for the description: `{"name": "cifar10", "mean": [...], "std": [...]}`, per channel.
        progress: Called with the number of stages done, from 0 on, and the number of stages.

    Returns:
        The folder.

    Example:
        >>> import tempfile
        >>> from anytime.models import MLP, MLPConfig
        >>> folder = tempfile.mkdtemp()
        >>> _ = export(MLP(MLPConfig(classes=4, exits=2)), folder, rule="product", example=torch.zeros(1, 2))
        >>> sorted(path.name for path in Path(folder).iterdir())
        ['exported.json', 'manifest.json', 'stage_1.onnx', 'stage_2.onnx']
    """
    check_choice(format, "format", get_args(Format))
    if not callable(progress or print):
        raise OptionError(
            f"progress is {progress!r}", expected="a function of the stages done and their number", fix="pass progress=print"
        )
    if not is_staged(model):
        raise not_staged(model)
    known = parse_rule(rule) if isinstance(rule, str) else rule
    copy = eval_copy(model)
    assert isinstance(copy, StagedModel)
    EagerEngine(copy).begin(example).advance()  # explains what is wrong with an example
    given = onnx_export.two_rows(example, names_of(copy))
    names = _input_names(example, names_of(copy), len(given))
    plans = _plans(copy, known, given, names)
    classes = plans[0].logits.shape[1]
    normalisation = {name: value if isinstance(value, str) else list(value) for name, value in (data or {}).items()}
    description: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": format,
        "made_with": f"torch {torch.__version__}" + (f", ONNX opset {OPSET}" if format == "onnx" else ""),
        "exits": copy.num_exits,
        "classes": classes,
        "class_names": _check_class_names(class_names, classes),
        "macs": None if macs is None else check_costs(macs, exits=copy.num_exits).tolist(),
        "data": None if data is None else normalisation,
        "rule": repr(known),
        "tolerance": TOLERANCE,
        "stages": [plan.described(f"stage_{number}.{_SUFFIX[format]}") for number, plan in enumerate(plans, 1)],
        "example": [list(tensor.shape[1:]) for tensor in given],
        "how_to_drive": _HOW,
    }
    try:
        check_description(description)
    except ValueError as error:
        raise OptionError(
            f"the description of these stages {error}",
            expected="values that load_exported can read",
            fix="pass such macs, class_names and data; convert a model in bfloat16 with model.float()",
        ) from error
    write, report, files = _onnx_file if format == "onnx" else _torch_file, progress or (lambda done, total: None), {}
    report(0, len(plans))
    for done, (stage, plan) in enumerate(zip(description["stages"], plans, strict=True), 1):
        files[stage["file"]] = _check_size(stage["file"], write(plan))
        report(done, len(plans))
    write_bundle(folder, {NAME: json_text(description).encode(), **files}, kind=KIND)
    return Path(folder)


@dataclass(frozen=True)
class _Plan:
    """A stage to export: the modules, example inputs, and all names in order.

    `logits` and `state` have rows of all kinds for the step; `inputs` and `outputs` fit together.
    """

    stage: onnx_export.Stage
    step: RuleStep
    logits: Tensor
    state: dict[str, Tensor]
    carried: list[str]
    left: list[str]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    free: dict[str, Free]

    def sizes(self, name: str) -> Free:
        """The dynamic dimensions of an input or output."""
        return {0: "batch", **self.free.get(name, {})}

    def described(self, file: str) -> dict[str, Any]:
        """The entry of `exported.json`."""

        def listed(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
            return [
                {
                    "name": name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": [self.sizes(name).get(place, size) for place, size in enumerate(tensor.shape)],
                }
                for name, tensor in tensors.items()
            ]

        return {"file": file, "inputs": listed(self.inputs), "outputs": listed(self.outputs)}


def _input_names(example: Inputs, names: Sequence[str], count: int) -> list[str]:
    """The names of the first stage's inputs."""
    found = list(names or (example if isinstance(example, Mapping) else ()))
    found = found or (["x"] if count == 1 else [f"x_{place}" for place in range(count)])
    for name in found:
        own = name in (*OUTPUTS, "logits", "step_logits") or name.startswith(("next_", "carry_", "state_"))
        if own or not name.isidentifier():
            raise OptionError(
                f"an input is named {name!r}",
                expected="letters, digits and underscores, and no name that the stages use themselves",
                fix="rename it in the example and in the model's input_names, e.g. 'input_ids'",
            )
    return found


def _plans(model: StagedModel, rule: Rule[Any], carry: Carry, names: list[str]) -> list[_Plan]:
    assert isinstance(model, nn.Module)
    rows = len(carry[0])
    first = model.stage(0, carry)[1]
    check_scale(first[None], log_probs=not rule.reads_scale)
    plans = []
    for exit, (logits, state) in enumerate(typical_states(rule, exits=model.num_exits, classes=first.shape[1])):
        last = exit + 1 == model.num_exits
        stage, step = onnx_export.Stage(model, exit), RuleStep(rule, state, last=last)
        left, _ = model.stage(exit, carry)
        carried = [f"carry_{place}" for place in range(len(carry))] if exit else names
        next_carried = [f"next_carry_{place}" for place in range(len(left))]
        next_state = [] if last else [f"next_{name}" for name in flat(rule._update(state, logits)[0])]
        inputs = dict(zip(carried, carry, strict=True)) | flat(state.select(torch.arange(rows)))
        results = _StageAndStep(stage, step, len(carry))(*inputs.values())
        outputs = dict(zip((*OUTPUTS, *next_carried, *next_state), results, strict=True))
        free = onnx_export.stage_free_sizes(model, exit, carried, next_carried)
        plans.append(_Plan(stage, step, logits, flat(state), carried, next_carried, inputs, outputs, free))
        carry = left
    return plans


class _StageAndStep(nn.Module):
    """A stage and the rule's step after it as one function of tensors."""

    def __init__(self, stage: onnx_export.Stage, step: RuleStep, carried: int) -> None:
        super().__init__()
        self.stage, self.step, self.carried = stage, step, carried
        self.eval()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        *left, logits = self.stage(*values[: self.carried])
        results = self.step(logits, *values[self.carried :])
        return *results[: len(OUTPUTS)], *left, *results[len(OUTPUTS) :]


def _onnx_file(plan: _Plan) -> bytes:
    """The stage and the step, each by the exporter that suits it, joined at the logits."""
    onnx, compose = require("onnx"), require("onnx.compose")
    carry = tuple(plan.inputs[name] for name in plan.carried)
    stage = onnx_export.onnx_bytes(plan.stage, carry, inputs=plan.carried, outputs=[*plan.left, "logits"], free=plan.free)
    step = _step_file(plan)
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
    del joined.opset_import[:]  # merging repeats it
    joined.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    strip_metadata(joined)
    joined.producer_name = "anytime"
    onnx.checker.check_model(joined, full_check=True)
    data: bytes = joined.SerializeToString()
    return data


def _step_file(plan: _Plan) -> bytes:
    """The step by tracing, which is ten times faster, or else by `torch.export`, which supports every rule."""
    inputs, outputs = ["step_logits", *plan.state], [name for name in plan.outputs if name not in plan.left]
    values = (plan.logits, *plan.state.values())
    sizes = {name: {0: "batch"} for name in (*inputs, *outputs)}
    for write in (onnx_export.traced, onnx_export.exported):
        with suppress(Exception) if write is onnx_export.traced else nullcontext():
            file = write(plan.step, values, inputs, outputs, sizes)
            if _returns_same(plan.step, values, onnx_export.make_session(file)):
                return file
    raise CheckError(
        f"the step of {plan.step.rule} returns other values in ONNX",
        expected=f"the rule's own within {TOLERANCE:g}",
        fix="use format='torch-export', or another rule",
    )


def _returns_same(step: RuleStep, values: Sequence[Tensor], session: Any) -> bool:
    """Whether a step in ONNX returns what the rule returns, for one row and for rows of all kinds."""
    names = [each.name for each in session.get_inputs()]
    for rows in (1, len(values[0])):
        some = [value[:rows] for value in values]
        found = session.run(None, dict(zip(names, (value.numpy() for value in some), strict=True)))
        for one, other in zip(map(torch.from_numpy, found), step(*some), strict=True):
            if not torch.allclose(one.double(), other.double(), rtol=TOLERANCE, atol=TOLERANCE):
                return False
    return True


def _torch_file(plan: _Plan) -> bytes:
    module = _StageAndStep(plan.stage, plan.step, len(plan.carried))
    sizes = (onnx_export.dynamic_shapes([plan.sizes(name) for name in plan.inputs]),)
    try:
        with onnx_export.quiet_export():
            program = torch.export.export(module, tuple(plan.inputs.values()), dynamic_shapes=sizes, strict=False)
    except Exception as error:
        raise OptionError(
            f"stage {plan.stage.exit + 1} cannot be exported: {str(error).strip().splitlines()[0]}",
            expected="stages and a rule without branches that depend on values",
            fix="use format='onnx', which traces, or replace a branch on values by torch.where, which runs both sides",
        ) from error
    _remove_unused_weights(program)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it contains paths of this machine
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _remove_unused_weights(program: torch.export.ExportedProgram) -> None:
    """An export keeps the weights of the whole model; remove those that this stage does not use."""
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


def _check_size(name: str, data: bytes) -> bytes:
    if len(data) > LARGEST_STAGE:
        raise OptionError(
            f"{name} would have {len(data):,} bytes",
            expected=f"at most {LARGEST_STAGE:,}, the limit of ONNX files",
            fix="export a smaller model, or one with more exits: the weights are split among the stages",
        )
    return data


def _check_class_names(names: Sequence[str] | None, classes: int) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or len(names) != classes or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"class_names are {len(names)} {type(names).__name__} entries",
            expected=f"{classes} names, one per class",
            fix="pass them in the order of the logits, or omit them",
        )
    return list(names)
