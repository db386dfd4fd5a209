"""The battery for models: `check_model(model, example)` checks what the rest of the library relies on.

A model is any `anytime.models.ExitModel`. Laziness, gradients and the training mode are checked for torch modules only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_count, count_rows, map_inputs, tensors_of
from anytime.errors import CheckError, OptionError, ShapeError
from anytime.models.base import Carry, ExitModel, MultiExit, StagedModel, is_staged

Calls = list[list[str]]
"""Names of the submodules that ran, one list per exit."""

_ONE_STAGE = "compute each stage after the yield of the previous exit"


def check_model(model: ExitModel, example_input: Inputs, *, classes: int | None = None, tolerance: float = 1e-4) -> None:
    """Check a model with exits; raise `CheckError` at the first law that does not hold.

    The laws: the model yields `num_exits` finite tensors of one shape `(batch, classes)`; each stage runs only when its exit
    is requested; in eval mode a row gives the same logits again, alone, in a batch and with two inputs interleaved; `forward`
    stacks the exits; gradients reach every trainable parameter; the input and the training mode do not change. If the model
    runs stage by stage (`anytime.models.is_staged`), the stages give the same logits, and what they carry is a tuple of
    tensors with the batch first, from which rows can be dropped.

    Laziness is observed through forward hooks. Member m of a top-level `ModuleList` with one member per exit is taken to
    belong to stage m.

    Args:
        model: The model. Its mode, buffers and the random state are restored.
        example_input: A batch of at least two different rows: a tensor, or a tuple or dict of tensors.
        classes: The number of classes that its logits should have; not checked where None.
        tolerance: How far two results may differ, relative to the largest logit.

    Example:
        >>> from anytime.models import MSDNet, MSDNetConfig
        >>> check_model(MSDNet(MSDNetConfig(classes=5, exits=2)), torch.randn(2, 3, 32, 32), classes=5)
    """
    _check_arguments(model, example_input)
    with left_as_found(model):
        if isinstance(model, nn.Module):
            model.eval()
        with torch.no_grad():
            logits = _check_logits(model, example_input, classes)
            _check_repeatable(model, example_input, logits, tolerance)
            _check_early_stop(model, example_input)
            if isinstance(model, MultiExit):
                _check_forward(model, example_input, logits, tolerance)
            if is_staged(model):
                _check_stages(model, example_input, logits, tolerance)
        if isinstance(model, nn.Module):
            _check_lazy(model, example_input)
            _check_gradients(model, example_input)
            _check_modes(model, example_input)


def _check_arguments(model: ExitModel, x: Inputs) -> None:
    if not isinstance(model, ExitModel):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="an object with num_exits and exits(x)",
            fix="subclass anytime.models.MultiExit, or add both",
        )
    try:
        check_count(model.num_exits, "num_exits")
    except OptionError as error:
        raise CheckError(error.got, expected=error.expected, fix="set num_exits in the constructor") from None
    check_example(x)


def check_example(x: Inputs) -> None:
    """Refuse an example that is not a batch of at least two different rows."""
    tensors = tensors_of(x)
    alone = len(tensors) == 1 and tensors[0].ndim < 2
    if alone or count_rows(x) < 2 or all(torch.equal(each[0], each[-1]) for each in tensors):
        raise ShapeError(
            f"the example has shape {', '.join(str(tuple(each.shape)) for each in tensors)}",
            expected="a batch whose first and last row differ",
            fix="pass at least two rows, e.g. torch.randn(2, 3, 32, 32)",
        )


def _check_logits(model: ExitModel, x: Inputs, classes: int | None) -> Tensor:
    """The stacked logits, after checking their number, shapes, types and values, and that the input is unchanged."""
    before = map_inputs(torch.clone, x)
    logits = list(model.exits(x))
    if not all(map(torch.equal, tensors_of(before), tensors_of(x))):
        raise CheckError(
            "the model changed its input",
            expected="an unchanged input",
            fix="remove in-place operations (x += …, relu_, nn.ReLU(inplace=True)) on the input",
        )
    if len(logits) != model.num_exits:
        raise CheckError(
            f"exits(x) yielded {len(logits)} times",
            expected=f"num_exits = {model.num_exits} times",
            fix="set num_exits to the number of exits that exits(x) yields",
        )
    rows, width = count_rows(x), classes if classes is not None else logits[0].shape[-1]
    for exit, now in enumerate(logits):
        if now.shape != (rows, width) or not now.is_floating_point():
            raise CheckError(
                f"exit {exit + 1} gave {tuple(now.shape)} of {now.dtype}",
                expected=f"logits of shape (batch, classes), here ({rows}, {width}), as floating-point numbers at every exit",
                fix="end every exit in a layer with one output per class, without extra dimensions",
            )
        if not bool(now.isfinite().all()):
            raise CheckError(
                f"exit {exit + 1} gave NaN or infinity",
                expected="finite logits",
                fix="check the initial weights and the scale of the input",
            )
    return torch.stack(logits)


def _check_repeatable(model: ExitModel, x: Inputs, logits: Tensor, tolerance: float) -> None:
    """The same logits again, for a row alone, and with two inputs interleaved."""
    again = torch.stack(list(model.exits(x)))
    fix = "turn off dropout and other noise in eval mode, and keep no state between calls"
    _check_close(again, logits, tolerance, got="the same input gave different logits the second time", fix=fix)
    fix = "do not mix the rows of a batch in eval mode (batch norm must use its running statistics)"
    for row in (0, count_rows(x) - 1):
        alone = torch.stack(list(model.exits(_row(x, row))))
        got = f"row {row} alone gave different logits than in its batch"
        _check_close(alone, logits[:, row : row + 1], tolerance, got=got, fix=fix)
    turns = zip(model.exits(_row(x, 0)), model.exits(_row(x, count_rows(x) - 1)), strict=True)
    both = torch.stack([torch.cat(pair) for pair in turns])
    fix = "keep the state of exits(x) in local variables, not on the model"
    got = "two interleaved inputs gave different logits than one after the other"
    _check_close(both, logits[:, [0, -1]], tolerance, got=got, fix=fix)


def _row(x: Inputs, row: int) -> Inputs:
    return map_inputs(lambda tensor: tensor[row : row + 1], x)


def _check_early_stop(model: ExitModel, x: Inputs) -> None:
    threads = set(threading.enumerate())
    iterator = model.exits(x)
    next(iterator)
    _close(iterator)
    extra = [thread.name for thread in threading.enumerate() if thread not in threads]
    if extra:
        raise CheckError(
            f"after stopping at the first exit these threads still run: {', '.join(extra)}",
            expected="no thread left",
            fix="stop them in a `finally` clause of the generator",
        )


def _check_forward(model: MultiExit, x: Inputs, logits: Tensor, tolerance: float) -> None:
    together, fix = model(x), "do not override MultiExit.forward"
    if not isinstance(together, Tensor):
        raise CheckError(f"forward(x) gave a {type(together).__name__}", expected=f"logits {tuple(logits.shape)}", fix=fix)
    _check_close(together, logits, tolerance, got="forward(x) differs from the exits", fix=fix)


def _check_stages(model: StagedModel, x: Inputs, logits: Tensor, tolerance: float) -> None:
    """Run every stage on the whole batch and on its last row alone, each time from the carry of the whole batch."""
    carry: Carry = tensors_of(x, getattr(model, "input_names", ()))
    for exit in range(model.num_exits):
        before = tuple(tensor.clone() for tensor in carry)
        left, now = model.stage(exit, carry)
        changed = [at for at, (old, new) in enumerate(zip(before, carry, strict=True)) if not _is_same(old, new)]
        if changed:
            raise CheckError(
                f"stage {exit} changed tensor {changed[0]} of its carry",
                expected="an unchanged carry, so that a stage can run again",
                fix="remove in-place operations (x += …, relu_, nn.ReLU(inplace=True)) on carried tensors",
            )
        if not _is_near(now, logits[exit], tolerance):
            raise CheckError(
                f"stage {exit} gave different logits than exits(x)",
                expected="the same logits",
                fix="do not override MultiExit.exits",
            )
        _check_left(model, exit, left, count_rows(x))
        left_alone, alone = model.stage(exit, tuple(tensor[-1:] for tensor in before))
        pairs = zip((alone, *left_alone), (now, *left), strict=False)
        if len(left) != len(left_alone) or not all(_is_near(row, rows[-1:], tolerance) for row, rows in pairs):
            raise CheckError(
                f"stage {exit} gave a different result for one row of its carry than for all rows",
                expected="the same result, so that rows can be dropped before any stage",
                fix="carry everything a row needs, with the batch first, and do not mix rows in eval mode",
            )
        carry = left


def _check_left(model: StagedModel, exit: int, left: Carry, rows: int) -> None:
    """A stage returns tensors with the batch first, `carry_size(exit + 1)` of them, and none after the last stage."""
    if not isinstance(left, tuple) or not all(isinstance(tensor, Tensor) for tensor in left):
        kinds = ", ".join(type(part).__name__ for part in left) if isinstance(left, tuple) else type(left).__name__
        raise CheckError(
            f"stage {exit} returned {kinds}", expected="a tuple of tensors", fix="recompute sizes from the tensors"
        )
    for at, tensor in enumerate(left):
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise CheckError(
                f"stage {exit} returned tensor {at} of shape {tuple(tensor.shape)} for {rows} inputs",
                expected="the batch as the first dimension of every carried tensor",
                fix="move the batch to the front; register what is the same for all inputs as a buffer",
            )
    if exit + 1 == model.num_exits:
        if left:
            raise CheckError(f"the last stage returned {len(left)} tensors", expected="none", fix="return () and the logits")
    elif isinstance(model, MultiExit) and len(left) != model.carry_size(exit + 1):
        raise CheckError(
            f"stage {exit} returned {len(left)} tensors, and carry_size({exit + 1}) is {model.carry_size(exit + 1)}",
            expected="the same number",
            fix="return the number of tensors that stage `exit` receives from carry_size(exit)",
        )


def _is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    one, other = found.double(), expected.double()
    largest = float(other.abs().nan_to_num(posinf=0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)


def _is_same(old: Tensor, new: Tensor) -> bool:
    return bool(((old == new) | (old != old)).all())  # NaN stays NaN


def _check_lazy(model: nn.Module, x: Inputs) -> None:
    """Record which submodules run for which exit, and which parameters each exit depends on."""
    assert isinstance(model, ExitModel)
    needed: set[str] = set()
    with watched(model) as calls, _trainable(model) as parameters:
        iterator = model.exits(x)
        if calls[-1]:
            raise _eager(f"{calls[-1][0]!r} ran before the first exit was requested", "make exits(x) a generator")
        for exit, logits in enumerate(iterator):
            gradients = _gradients(logits, parameters)
            needed |= {name.rpartition(".")[0] for name, value in gradients.items() if value is not None}
            early = _later_stages(model, calls[-1], exit) - needed
            if early:
                raise _eager(f"{min(early)!r} ran for exit {exit + 1}, which does not need it", _ONE_STAGE)
            # A layer used as a function does not trigger its hook.
            if not calls[-1] and needed <= {name for stage in calls for name in stage}:
                raise _eager(f"nothing ran for exit {exit + 1}", _ONE_STAGE)
            calls.append([])
    with watched(model) as stopped, torch.no_grad():
        iterator = model.exits(x)
        next(iterator)
        _close(iterator)
    if stopped[0] != calls[0]:
        more = sorted(set(stopped[0]) - set(calls[0]))
        raise _eager(
            f"stopping at the first exit ran {', '.join(more) or 'other layers'}", "compute nothing in a `finally` clause"
        )


def _check_gradients(model: nn.Module, x: Inputs) -> None:
    assert isinstance(model, ExitModel)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        return
    logits = torch.stack(list(model.exits(x)))
    gradients = _gradients(logits, trainable)
    without = [name for name, value in gradients.items() if value is None or not bool(value.isfinite().all())]
    if without:
        raise CheckError(
            f"no finite gradient reaches {', '.join(without[:5])}" + (f" and {len(without) - 5} more" if without[5:] else ""),
            expected="a gradient from at least one exit for every parameter that requires one",
            fix="remove detach, no_grad, argmax or the unused layer; set requires_grad=False for frozen parameters",
        )


def _check_modes(model: nn.Module, x: Inputs) -> None:
    """Both modes yield all exits, and no submodule changes its mode."""
    assert isinstance(model, ExitModel)
    for mode in (True, False):
        model.train(mode)
        modes = {name: module.training for name, module in model.named_modules()}
        with torch.no_grad():
            count = sum(1 for _ in model.exits(x))
        changed = [name for name, module in model.named_modules() if module.training != modes[name]]
        if changed:
            raise CheckError(
                f"exits(x) changed the training mode of {changed[0] or 'the model'!r}",
                expected="the mode set by the caller",
                fix="do not call train() or eval() in exits(x)",
            )
        if count != model.num_exits:
            raise CheckError(
                f"{'train' if mode else 'eval'} mode gave {count} exits",
                expected=f"num_exits = {model.num_exits} in both modes",
                fix="yield every exit in both modes",
            )


def _check_close(found: Tensor, expected: Tensor, tolerance: float, *, got: str, fix: str) -> None:
    if found.shape != expected.shape:
        raise CheckError(f"{got}: their shape is {tuple(found.shape)}", expected=f"shape {tuple(expected.shape)}", fix=fix)
    apart = (found - expected).abs().amax((1, 2))
    limit = tolerance * max(1.0, float(expected.abs().amax()))
    for exit, difference in enumerate(apart.tolist()):
        if not difference <= limit:
            raise CheckError(
                f"{got}: at exit {exit + 1} they differ by {difference:.3g}", expected=f"at most {limit:.3g}", fix=fix
            )


def _eager(got: str, fix: str) -> CheckError:
    return CheckError(got, expected="that each stage runs only when its exit is requested", fix=fix)


def _close(iterator: Iterator[Tensor]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def _gradients(logits: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    if not logits.requires_grad:
        return dict.fromkeys(parameters)
    # The square keeps a sum over classes from cancelling where the logits are normalised.
    found = torch.autograd.grad(logits.square().sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def _later_stages(model: nn.Module, ran: list[str], exit: int) -> set[str]:
    """The submodules in `ran` that belong to a later member of a `ModuleList` with one member per exit."""
    assert isinstance(model, ExitModel)
    lists = [f"{name}." for name, child in model.named_children() if isinstance(child, nn.ModuleList)]
    lists = [name for name in lists if len(model.get_submodule(name[:-1])._modules) == model.num_exits]
    places = [
        (name, name.removeprefix(prefix).partition(".")[0]) for prefix in lists for name in ran if name.startswith(prefix)
    ]
    return {name for name, place in places if int(place) > exit}


@contextmanager
def watched(model: nn.Module) -> Iterator[Calls]:
    """Record the names of submodules with parameters of their own as they run."""
    calls: Calls = [[]]
    handles = []
    for name, module in model.named_modules():
        if name and next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_forward_pre_hook(lambda _, __, name=name: calls[-1].append(name)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _trainable(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Let every parameter require a gradient, including frozen ones, to see which exits depend on it."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    frozen = [parameter for parameter in parameters.values() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield parameters
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def left_as_found(model: ExitModel) -> Iterator[None]:
    """Restore modes, buffers and the random state."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
