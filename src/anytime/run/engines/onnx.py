"""The ONNX Runtime engine: one session a stage, on the CPU.

What goes from one stage to the next are NumPy arrays: ONNX Runtime's own values cost more to hand over. The stages are exported
by tracing, in a second or so for an MSDNet, and checked; where that fails, by `torch.export`, which takes fifty times as long
and follows more.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anytime.errors import DtypeError, InputError, MissingExtraError, OptionError, ShapeError
from anytime.models.base import Carry, StagedModel
from anytime.run.engines.folding import apart, folded_copy, on_cpu
from anytime.run.engines.running import Joinable, Running, check_inputs

OPSET = 18
_TYPES = {"float32": "float", "float64": "double"}
Free = dict[int, str]
"""The dimensions of a tensor that are not fixed, by names; equal names are equal sizes."""


class OnnxRuntimeEngine:
    """Runs each stage in a session of ONNX Runtime.

    Args:
        model: A staged torch module; it stays as it is.
        example: Inputs to trace the stages with.
        threads: For one stage; one is best where several workers share a machine.
    """

    name = "onnxruntime"
    joins = True
    TOLERANCE = 1e-4
    """How far its logits may lie from the model's, relative to the largest of an exit."""

    def __init__(self, model: StagedModel, example: Tensor, *, threads: int = 1) -> None:
        self.why = "asked for"
        self.num_exits = model.num_exits
        self._sessions = [make_session(file, threads=threads) for file in stage_files(model, example)]
        self.classes: int = self._sessions[-1].get_outputs()[-1].shape[1]

    def begin(self, x: Tensor) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        return _TensorRun(self._sessions, check_inputs(x))

    def begin_arrays(self, x: Tensor) -> Running[NDArray[Any]]:
        """As `begin`, for inputs that were checked; stages give logits as NumPy has them, to be given to ONNX Runtime again."""
        return _Run(self._sessions, x)


class _Run(Joinable[Any]):
    """Carries arrays of NumPy."""

    def __init__(self, sessions: Sequence[Any], x: Tensor) -> None:
        inputs = on_cpu(x).contiguous()
        super().__init__(len(sessions), len(inputs))
        self._sessions, self._carry = sessions, [inputs.numpy()]

    def _run(self, exit: int) -> Any:
        session = self._sessions[exit]
        given = dict(zip(_carried(len(self._carry)), self._carry, strict=True))
        try:
            *self._carry, logits = session.run(None, given)
        except Exception as error:
            if exit == 0:
                _explain(self._carry[0], session.get_inputs()[0], error)
            raise
        return logits


class _TensorRun(_Run):
    """Gives tensors, as engines do."""

    def _run(self, exit: int) -> Tensor:
        return torch.from_numpy(super()._run(exit))


@cache
def _carried(count: int) -> tuple[str, ...]:
    """What a stage calls the tensors it is given."""
    return tuple(f"carry_{place}" for place in range(count))


def _explain(x: NDArray[Any], wanted: Any, error: Exception) -> None:
    """Inputs that the first stage refused; nothing where it was for something else."""
    if f"tensor({_TYPES.get(x.dtype.name, x.dtype.name)})" != wanted.type:
        kind = wanted.type.removeprefix("tensor(").removesuffix(")")
        raise DtypeError(f"x is {x.dtype}", expected=kind, fix="convert it, as the inputs the model was trained on") from error
    sizes = [size if isinstance(size, int) else None for size in wanted.shape]
    if len(sizes) != x.ndim or any(size not in (None, given) for size, given in zip(sizes, x.shape, strict=True)):
        raise ShapeError(
            f"x has shape {x.shape}",
            expected=f"({', '.join(map(str, wanted.shape))}), as the example that the engine was made with",
            fix="resize the inputs, or make the engine from an example of this shape",
        ) from error
    if x.dtype.kind in "iu":
        raise InputError(
            f"x of shape {x.shape} holds numbers from {x.min()} to {x.max()}",
            expected="numbers of word pieces in the model's vocabulary, at most as many in a row as it has positions",
            fix="cut texts with the model's own tokenizer and length",
        ) from error


class Stage(nn.Module):
    """One stage of a model as a module of its own: tensors in, `(*carry, logits)` out."""

    def __init__(self, model: nn.Module, exit: int) -> None:
        super().__init__()
        self.model, self.exit = model, exit
        self.eval()

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(self.model, StagedModel)
        left, logits = self.model.stage(self.exit, carry)
        return *left, logits


@torch.no_grad()
def stage_files(model: StagedModel, example: Tensor) -> list[bytes]:
    """An ONNX file a stage: `carry_0` … in, `left_0` … and `logits` out, for any number of rows."""
    copy = folded_copy(model, example, merged=True)
    assert isinstance(copy, StagedModel)
    carry: Carry = (two_rows(example),)
    files = []
    for exit in range(copy.num_exits):
        left, _ = copy.stage(exit, carry)
        inputs = _carried(len(carry))
        outputs = [*(f"left_{place}" for place in range(len(left))), "logits"]
        free = dict(zip(inputs, free_sizes(copy, exit), strict=False)) | dict(
            zip(outputs, free_sizes(copy, exit + 1), strict=False)
        )
        files.append(onnx_bytes(Stage(copy, exit), carry, inputs=inputs, outputs=outputs, free=free))
        carry = left
    return files


def free_sizes(model: object, exit: int) -> tuple[Free, ...]:
    """Which dimensions of what a stage is given may differ, as the model says; none after the last stage."""
    say = getattr(model, "free_sizes", None)
    return say(exit) if say is not None and exit < model.num_exits else ()  # type: ignore[attr-defined]


def two_rows(example: Tensor) -> Tensor:
    """Two rows of an example: with one alone, its number of rows would be taken for fixed."""
    rows = on_cpu(check_inputs(example))
    return torch.cat((rows, rows))[:2].contiguous()


def onnx_bytes(
    module: nn.Module, given: Carry, *, inputs: Sequence[str], outputs: Sequence[str], free: Mapping[str, Free] | None = None
) -> bytes:
    """A module of tensors as an ONNX file with its weights inside; the first dimension of all of them is free.

    Args:
        module: What to write.
        given: Tensors to try it with.
        inputs: Their names.
        outputs: The names of what it gives.
        free: Further dimensions that may differ, by the name of a tensor.
    """
    reasons = []
    sizes = {name: {0: "batch", **(free or {}).get(name, {})} for name in (*inputs, *outputs)}
    for write in (traced, exported):
        try:
            file = write(module, given, inputs, outputs, sizes)
            _check_file(file, module, given, [sizes[name] for name in inputs])
        except MissingExtraError:
            raise
        except Exception as error:  # whatever an exporter stumbles over, the other may not
            reasons.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
        else:
            return file
    raise OptionError(
        f"a stage cannot be written as ONNX: {reasons[0]}; by torch.export: {reasons[1]}",
        expected="stages of operations that ONNX has, without branches on numbers",
        fix="use engine='eager', or export with format='torch-export'",
    )


def make_session(file: bytes, *, threads: int = 1) -> Any:
    """A session for an ONNX file, on the CPU."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # what goes wrong is raised
    # By itself it takes bytes for a format of its own wherever they look like that.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Its fallback to another provider prints to stdout, and there is no other.
    return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"], enable_fallback=False)


def require(package: str) -> Any:
    """A package of the extra `engines`, or an error that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"{package} is not installed",
            expected=f"the package {package}",
            fix="pip install 'anytime-nn[engines]', or use engine='eager'",
        ) from error


def traced(module: nn.Module, given: Carry, inputs: Sequence[str], outputs: Sequence[str], sizes: Mapping[str, Free]) -> bytes:
    """As `onnx_bytes`, by tracing alone and unchecked."""
    file = io.BytesIO()
    with _quiet():
        torch.onnx.register_custom_op_symbolic("aten::mT", _transpose, OPSET)  # type: ignore[attr-defined]
        torch.onnx.export(
            module,
            given,
            file,  # type: ignore[arg-type]
            dynamo=False,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=sizes,
            opset_version=OPSET,
        )
    return file.getvalue()


def exported(
    module: nn.Module,
    given: Carry,
    inputs: Sequence[str],
    outputs: Sequence[str],
    sizes: Mapping[str, Free] | None = None,
) -> bytes:
    """As `onnx_bytes`, by `torch.export` alone and unchecked."""
    require("onnxscript")
    with _quiet():
        program = torch.onnx.export(
            module,
            given,
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=(dynamic_shapes([(sizes or {}).get(name, {0: "batch"}) for name in inputs]),),
            opset_version=OPSET,
        )
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    return data


def dynamic_shapes(sizes: Sequence[Free]) -> tuple[dict[int, Any], ...]:
    """As `torch.export` takes it: any batch, and any other size that the model admits."""
    batch, other = torch.export.Dim("batch", min=1), torch.export.Dim.DYNAMIC
    return tuple({place: batch if name == "batch" else other for place, name in free.items()} for free in sizes)


def _check_file(file: bytes, module: nn.Module, given: Carry, sizes: Sequence[Free]) -> None:
    """Tracing may take a size for fixed, or a branch for the only one: see with fewer and more rows, and with other sizes."""
    session = make_session(file)
    for rows in (1, 3):
        some = tuple(
            shorter(torch.cat((tensor, tensor))[:rows], free, by=rows - 1) for tensor, free in zip(given, sizes, strict=True)
        )
        names = [each.name for each in session.get_inputs()]
        fed = dict(zip(names, (tensor.numpy() for tensor in some), strict=True))
        found = [torch.from_numpy(array) for array in session.run(None, fed)]
        share = apart(found, module(*some))
        if share > OnnxRuntimeEngine.TOLERANCE:
            raise ValueError(f"{share:.2g} apart with {rows} rows")


def shorter(tensor: Tensor, free: Free, *, by: int) -> Tensor:
    """Less of a tensor along all free dimensions but the batch, where there is enough.

    >>> shorter(torch.zeros(2, 9, 4), {0: "batch", 1: "length"}, by=2).shape
    torch.Size([2, 7, 4])
    """
    for place in free:
        if place and tensor.shape[place] > by:
            tensor = tensor.narrow(place, 0, tensor.shape[place] - by)
    return tensor.contiguous()


def _transpose(graph: Any, x: Any) -> Any:
    """`tensor.mT`, which the tracing exporter does not know."""
    *others, rows, columns = range(x.type().dim())
    return graph.op("Transpose", x, perm_i=[*others, columns, rows])


@contextmanager
def _quiet() -> Iterator[None]:
    """Both exporters say much that is no use to who calls this; what goes wrong is raised."""
    logger = logging.getLogger("torch.onnx")
    level, dump = logger.level, torch._C._jit_onnx_log
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        # By a slip in torch, a failed trace is printed to stdout whether asked for or not.
        torch._C._jit_onnx_log = lambda *_: None
        try:
            yield
        finally:
            logger.setLevel(level)
            torch._C._jit_onnx_log = dump
