"""The ONNX Runtime engine: one session per stage, on the CPU.

NumPy arrays are passed from stage to stage, which is cheaper than ONNX Runtime's own values. The stages are exported by
tracing, which takes about a second for an MSDNet, and checked; if that fails, by `torch.export`, which takes fifty times as
long and supports more models.
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

from anytime.checks import Inputs, check_inputs, repeat_rows, tensors_of
from anytime.errors import MissingExtraError, OptionError, ShapeError
from anytime.models.attach.traced import where
from anytime.models.base import Carry, StagedModel
from anytime.models.given import check_number, fits, flat_inputs, names_of, no_batch, places, refuse_tokens, wrong_type
from anytime.run.engines.folding import difference, folded_copy, on_cpu
from anytime.run.engines.reads import RefuseReads, ValueReadError
from anytime.run.engines.running import Joinable, Running

OPSET = 18
ONNX_TYPES = {"float32": "float", "float64": "double"}
_TORCH_NAMES = {onnx: name for name, onnx in ONNX_TYPES.items()}
Free = dict[int, str]
"""Names of the dynamic dimensions of a tensor; equal names mean equal sizes."""


class OnnxRuntimeEngine:
    """Runs each stage in a session of ONNX Runtime.

    Args:
        model: A staged torch module; it is unchanged.
        example: Inputs to trace the stages with.
        threads: Threads per stage; one is best if several workers share a machine.
    """

    name = "onnxruntime"
    joins = True
    in_python = reads_modes = False
    merges = False
    """Whether runs that began apart are worth joining: copying the carry of eight rows of the CIFAR MSDNet, and reading it from
    cold caches, takes longer than one batch saves."""
    TOLERANCE = 1e-4
    """How far its logits may differ from the model's, relative to the largest logit of an exit."""

    def __init__(self, model: StagedModel, example: Inputs, *, threads: int = 1) -> None:
        self.why = "requested"
        self.num_exits = model.num_exits
        self.input_names = names_of(model)
        self._sessions = [make_session(file, threads=threads) for file in stage_files(model, example)]
        self.classes: int = self._sessions[-1].get_outputs()[-1].shape[1]

    def begin(self, x: Inputs) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        return _TensorRun(self._sessions, flat_inputs(x, self.input_names), self.input_names)

    def begin_arrays(self, x: Inputs) -> Running[NDArray[Any]]:
        """As `begin`, for inputs that were checked; the logits are NumPy arrays, to be passed to ONNX Runtime again."""
        return _Run(self._sessions, tensors_of(x, self.input_names), self.input_names)


class _Run(Joinable[Any]):
    """Carries and returns NumPy arrays."""

    def __init__(self, sessions: Sequence[Any], given: Carry, names: Sequence[str]) -> None:
        super().__init__(len(sessions), len(given[0]))
        self._sessions, self._carry, self._names = sessions, [on_cpu(x).contiguous().numpy() for x in given], names

    def _run(self, exit: int) -> Any:
        session = self._sessions[exit]
        inputs = dict(zip(_carry_names(len(self._carry)), self._carry, strict=True))
        try:
            *self._carry, logits = session.run(None, inputs)
        except Exception as error:
            if exit == 0:
                _explain(self._carry, session.get_inputs(), places(len(self._carry), self._names), error)
            raise
        return logits


class _TensorRun(_Run):
    """Returns tensors, as engines do."""

    def _run(self, exit: int) -> Tensor:
        return torch.from_numpy(super()._run(exit))


@cache
def _carry_names(count: int) -> tuple[str, ...]:
    return tuple(f"carry_{place}" for place in range(count))


def _explain(given: Sequence[NDArray[Any]], wanted: Sequence[Any], called: Sequence[str], error: Exception) -> None:
    """Raise an error that names what is wrong with inputs that the first stage refused; return if they look right."""
    check_number(given, len(wanted))
    for x, each, name in zip(given, wanted, called, strict=True):
        kind = each.type.removeprefix("tensor(").removesuffix(")")
        if ONNX_TYPES.get(x.dtype.name, x.dtype.name) != kind:
            raise wrong_type(torch.from_numpy(x), name, getattr(torch, _TORCH_NAMES.get(kind, kind))) from error
        if fits((1, *x.shape), each.shape) and not fits(x.shape, each.shape):
            raise no_batch(torch.from_numpy(x), name) from error
        if not fits(x.shape, each.shape):
            raise ShapeError(
                f"{name} has shape {x.shape}",
                expected=f"({', '.join(map(str, each.shape))}), the shape of the engine's example",
                fix="resize the inputs, or build the engine with an example of this shape",
            ) from error
    refuse_tokens(given, called, error)


class Stage(nn.Module):
    """One stage of a model as a module: tensors in, `(*carry, logits)` out."""

    def __init__(self, model: nn.Module, exit: int) -> None:
        super().__init__()
        self.model, self.exit = model, exit
        self.eval()

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(self.model, StagedModel)
        left, logits = self.model.stage(self.exit, carry)
        return *left, logits


@torch.no_grad()
def stage_files(model: StagedModel, example: Inputs) -> list[bytes]:
    """One ONNX file per stage: `carry_0` ... in, `left_0` ... and `logits` out, for any number of rows."""
    copy = folded_copy(model, example)
    assert isinstance(copy, StagedModel)
    carry = two_rows(example, names_of(model))
    files = []
    for exit in range(copy.num_exits):
        left, _ = copy.stage(exit, carry)
        inputs, outputs = _carry_names(len(carry)), tuple(f"left_{place}" for place in range(len(left)))
        free = stage_free_sizes(copy, exit, inputs, outputs)
        files.append(onnx_bytes(Stage(copy, exit), carry, inputs=inputs, outputs=(*outputs, "logits"), free=free))
        carry = left
    return files


def stage_free_sizes(model: Any, exit: int, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Free]:
    """The dynamic dimensions besides the batch of a stage's carry and of the next one's, as the model declares them."""
    free: dict[str, Free] = {}
    for number, names in ((exit, inputs), (exit + 1, outputs)):
        if hasattr(model, "free_sizes") and number < model.num_exits:
            free |= dict(zip(names, model.free_sizes(number), strict=False))
    return free


def two_rows(example: Inputs, names: Sequence[str] = ()) -> Carry:
    """Two rows of an example as the carry of the first stage: the exporters take a batch size of one for a constant."""
    return tuple(on_cpu(tensor).contiguous() for tensor in tensors_of(repeat_rows(check_inputs(example), 2), names))


def onnx_bytes(
    module: nn.Module, args: Carry, *, inputs: Sequence[str], outputs: Sequence[str], free: Mapping[str, Free] | None = None
) -> bytes:
    """Export a module of tensors as an ONNX file with its weights inside and a dynamic batch size.

    Args:
        module: The module.
        args: Example inputs.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        free: Further dynamic dimensions, by tensor name.
    """
    reasons = []
    sizes = {name: {0: "batch", **(free or {}).get(name, {})} for name in (*inputs, *outputs)}
    for write in (traced, exported):
        try:
            with RefuseReads(len(args)):
                file = write(module, args, inputs, outputs, sizes)
            file = _with_all_inputs(file, args, inputs, sizes)
            _check_file(file, module, args, [sizes[name] for name in inputs])
        except MissingExtraError:
            raise
        except ValueReadError as error:  # torch.export allows none of these, and prints all that it traced
            reasons.append(f"{where(error)}{error}")
            break
        except Exception as error:  # one exporter may support what the other does not
            reasons.append(_reason(error))
        else:
            return file
    raise OptionError(
        f"a stage cannot be exported to ONNX: {'; by torch.export: '.join(reasons)}",
        expected="stages made of ONNX operations, without branches that depend on values",
        fix="use engine='eager'; to export it, replace a branch by torch.where, which runs both sides"
        if len(reasons) == 1
        else "use engine='eager', or export with format='torch-export'",
    )


def _reason(error: Exception) -> str:
    """The first line of an exporter's error, without advice and colours."""
    if type(error).__module__.startswith("torch.onnx") and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = (str(error).strip().splitlines() or [""])[0].partition("\x1b")[0].strip()
    return f"{type(error).__name__}: {text}"


def make_session(file: bytes, *, threads: int = 1) -> Any:
    """An ONNX Runtime session on the CPU."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # errors are raised
    # Without this it reads bytes that look like its own format as such.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # The fallback to another provider prints to stdout, and there is no other.
    return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"], enable_fallback=False)


def require(package: str) -> Any:
    """Import a package of the extra `engines`, or raise an error that says how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"{package} is not installed",
            expected=f"the package {package}",
            fix="pip install 'anytime-nn[engines]', or use engine='eager'",
        ) from error


def traced(module: nn.Module, args: Carry, inputs: Sequence[str], outputs: Sequence[str], sizes: Mapping[str, Free]) -> bytes:
    """Export by tracing, unchecked."""
    file: Any = io.BytesIO()
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs), "opset_version": OPSET}
    with quiet():
        torch.onnx.register_custom_op_symbolic("aten::mT", _transpose, OPSET)  # type: ignore[attr-defined]
        torch.onnx.export(module, args, file, dynamo=False, verbose=False, dynamic_axes=sizes, **names)
    data: bytes = file.getvalue()
    return data


def exported(
    module: nn.Module, args: Carry, inputs: Sequence[str], outputs: Sequence[str], sizes: Mapping[str, Free] | None = None
) -> bytes:
    """Export by `torch.export`, unchecked."""
    require("onnxscript")
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs), "opset_version": OPSET}
    shapes = (dynamic_shapes([(sizes or {}).get(name, {0: "batch"}) for name in inputs]),)
    with quiet_export():
        program = torch.onnx.export(module, args, dynamo=True, verbose=False, dynamic_shapes=shapes, **names)
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    return data


def dynamic_shapes(sizes: Sequence[Free]) -> tuple[dict[int, Any], ...]:
    """Dynamic dimensions as `torch.export` expects them: any batch size, and any other size that the model supports."""
    batch, other = torch.export.Dim("batch", min=1), torch.export.Dim.DYNAMIC
    return tuple({place: batch if name == "batch" else other for place, name in free.items()} for free in sizes)


def _with_all_inputs(file: bytes, args: Carry, inputs: Sequence[str], sizes: Mapping[str, Free]) -> bytes:
    """The file with the inputs that it does not read as well, which exporters leave out: later stages may need them."""
    onnx = require("onnx")
    model = onnx.load_from_string(file)
    known = {each.name: each for each in model.graph.input}
    if len(known) == len(inputs):
        return file
    for name, tensor in zip(inputs, args, strict=True):
        if name not in known:
            kind = onnx.helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype)
            shape = [sizes[name].get(place, size) for place, size in enumerate(tensor.shape)]
            known[name] = onnx.helper.make_tensor_value_info(name, kind, shape)
    del model.graph.input[:]
    model.graph.input.extend(known[name] for name in inputs)
    data: bytes = model.SerializeToString()
    return data


def _check_file(file: bytes, module: nn.Module, args: Carry, sizes: Sequence[Free]) -> None:
    """Tracing may fix a size or a branch: compare with fewer and more rows, and with other sizes."""
    session = make_session(file)
    names = [each.name for each in session.get_inputs()]
    for rows in (1, 3):
        some = tuple(
            shorter(torch.cat((tensor, tensor))[:rows], free, by=rows - 1) for tensor, free in zip(args, sizes, strict=True)
        )
        arrays = session.run(None, dict(zip(names, (tensor.numpy() for tensor in some), strict=True)))
        ratio = difference([torch.from_numpy(array) for array in arrays], module(*some))
        if ratio > OnnxRuntimeEngine.TOLERANCE:
            raise ValueError(f"outputs differ by {ratio:.2g} with {rows} rows")


def shorter(tensor: Tensor, free: Free, *, by: int) -> Tensor:
    """Shorten a tensor along all dynamic dimensions but the batch, where it is long enough.

    >>> shorter(torch.zeros(2, 9, 4), {0: "batch", 1: "length"}, by=2).shape
    torch.Size([2, 7, 4])
    """
    for place in free:
        if place and tensor.shape[place] > by:
            tensor = tensor.narrow(place, 0, tensor.shape[place] - by)
    return tensor.contiguous()


def _transpose(graph: Any, x: Any) -> Any:
    """`tensor.mT`, which the tracing exporter lacks."""
    *others, rows, columns = range(x.type().dim())
    return graph.op("Transpose", x, perm_i=[*others, columns, rows])


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporters' warnings and messages; errors are raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx.experimental.symbolic_shapes")]
    levels, dump = [logger.level for logger in loggers], torch._C._jit_onnx_log
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # A bug in torch prints a failed trace to stdout even without verbose.
        torch._C._jit_onnx_log = lambda *_: None
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            torch._C._jit_onnx_log = dump


@contextmanager
def quiet_export() -> Iterator[None]:
    """As `quiet`, for `torch.export`, which also prints what it traced before an error; importing it takes two seconds."""
    module: Any = import_module("torch.export._trace")
    module.print = lambda *_, **__: None
    try:
        with quiet():
            yield
    finally:
        del module.print
