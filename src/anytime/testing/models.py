"""The battery for anything with exits: `check_model` holds a model against the laws that the rest of the library relies on.

A model may be any `ExitModel`. What can only be seen from inside (laziness, gradients, training mode) is checked where it is
a torch module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anytime.errors import CheckError, OptionError, ShapeError
from anytime.models.base import Carry, ExitModel, MultiExit, StagedModel, is_staged

Calls = list[list[str]]
"""Names of the submodules that ran, one list an exit."""

_ONE_STAGE = "compute each stage after the yield before it"


def check_model(model: ExitModel, example_input: Tensor, *, classes: int | None = None, tolerance: float = 1e-4) -> None:
    """Hold `model` against the laws of a model with exits, and raise `CheckError` at the first that it breaks.

    The laws: it yields as many logits as it has exits, all finite and of one shape `(batch, classes)`; nothing runs before
    it is asked for, and nothing runs on after the last question; in eval mode it gives the same answer twice, the same
    to a row alone as in a batch, and the same when two inputs are worked on in turns; `forward` is the exits stacked;
    gradients reach every trainable parameter; the input and the training mode stay as they were. Where it can be run stage
    by stage (`anytime.models.is_staged`), the stages give what the exits give, in eval mode; what goes from one to the next
    is tensors with the batch first, is not changed, is nothing after the last, and may be cut down to some of its rows.

    Laziness is seen by which submodules run when. Where a top-level `ModuleList` has one member an exit, its member m is
    taken to belong to stage m.

    Args:
        model: The model. It is left as it was found, in train or eval mode.
        example_input: A batch of at least two different rows.
        classes: How many classes its logits should have; not checked where None.
        tolerance: How far two results that should be the same may differ, relative to the largest logit.

    Example:
        >>> from anytime.models import MSDNet, MSDNetConfig
        >>> check_model(MSDNet(MSDNetConfig(classes=5, exits=2)), torch.randn(2, 3, 32, 32), classes=5)
    """
    _check_arguments(model, example_input)
    with _left_as_found(model):
        if isinstance(model, nn.Module):
            model.eval()
        with torch.no_grad():
            logits = _check_logits(model, example_input, classes)
            _check_same_twice(model, example_input, logits, tolerance)
            _check_rows(model, example_input, logits, tolerance)
            _check_turns(model, example_input, logits, tolerance)
            _check_early_stop(model, example_input)
            if isinstance(model, MultiExit):
                _check_forward(model, example_input, logits, tolerance)
            if is_staged(model):
                _check_stages(model, example_input, logits, tolerance)
        if isinstance(model, nn.Module):
            _check_lazy(model, example_input)
            _check_gradients(model, example_input)
            _check_modes(model, example_input)


def _check_arguments(model: ExitModel, x: Tensor) -> None:
    if not isinstance(model, ExitModel):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="an object with num_exits and exits(x)",
            fix="give it both; see anytime.models.ExitModel",
        )
    if isinstance(model.num_exits, bool) or not isinstance(model.num_exits, int) or model.num_exits < 1:
        raise CheckError(
            f"num_exits is {model.num_exits!r}", expected="a whole number, at least 1", fix="set it in the constructor"
        )
    if x.ndim < 2 or x.shape[0] < 2 or torch.equal(x[0], x[-1]):
        raise ShapeError(
            f"the example has shape {tuple(x.shape)}",
            expected="a batch whose first and last row differ",
            fix="pass at least two rows, e.g. torch.randn(2, 3, 32, 32)",
        )


def _check_logits(model: ExitModel, x: Tensor, classes: int | None) -> Tensor:
    """The stacked logits, once their number, shapes, types and values are in order and the input is unchanged."""
    before = x.clone()
    logits = list(model.exits(x))
    if not torch.equal(before, x):
        raise CheckError(
            "the model changed its input",
            expected="an input that is the same afterwards",
            fix="look for in-place operations (x += …, relu_, nn.ReLU(inplace=True)) on the input itself",
        )
    if len(logits) != model.num_exits:
        raise CheckError(
            f"exits(x) yielded {len(logits)} times", expected=f"num_exits = {model.num_exits} times", fix="correct either"
        )
    rows, width = x.shape[0], classes if classes is not None else logits[0].shape[-1]
    for exit, now in enumerate(logits):
        if now.shape != (rows, width) or not now.is_floating_point():
            raise CheckError(
                f"exit {exit + 1} gave {tuple(now.shape)} of {now.dtype}",
                expected=f"logits of shape (batch, classes), here ({rows}, {width}), as floating-point numbers at every exit",
                fix="let every exit end in a layer with one output a class, without extra dimensions",
            )
        if not bool(now.isfinite().all()):
            raise CheckError(
                f"exit {exit + 1} gave NaN or infinity",
                expected="finite logits",
                fix="look at the initial weights and at the scale of the input",
            )
    return torch.stack(logits)


def _check_same_twice(model: ExitModel, x: Tensor, logits: Tensor, tolerance: float) -> None:
    again = torch.stack(list(model.exits(x)))
    _check_close(
        again,
        logits,
        tolerance,
        got="the same input gave other logits the second time",
        fix="turn off dropout and other noise in eval mode, and keep no state between calls",
    )


def _check_rows(model: ExitModel, x: Tensor, logits: Tensor, tolerance: float) -> None:
    for row in (0, x.shape[0] - 1):
        alone = torch.stack(list(model.exits(x[row : row + 1])))
        _check_close(
            alone,
            logits[:, row : row + 1],
            tolerance,
            got=f"row {row} alone gave other logits than in its batch",
            fix="let no layer mix the rows of a batch in eval mode (a batch norm must use its running statistics)",
        )


def _check_turns(model: ExitModel, x: Tensor, logits: Tensor, tolerance: float) -> None:
    first, last = x[:1], x[-1:]
    turns = zip(model.exits(first), model.exits(last), strict=True)
    both = torch.stack([torch.cat(pair) for pair in turns])
    _check_close(
        both,
        logits[:, [0, -1]],
        tolerance,
        got="two inputs worked on in turns gave other logits than one after the other",
        fix="keep what exits(x) needs between exits in local variables, not on the model",
    )


def _check_early_stop(model: ExitModel, x: Tensor) -> None:
    threads = set(threading.enumerate())
    iterator = model.exits(x)
    next(iterator)
    _close(iterator)
    extra = [thread.name for thread in threading.enumerate() if thread not in threads]
    if extra:
        raise CheckError(
            f"after a stop at the first exit these threads are still there: {', '.join(extra)}",
            expected="nothing that goes on running",
            fix="end them in a `finally` of the generator",
        )


def _check_forward(model: MultiExit, x: Tensor, logits: Tensor, tolerance: float) -> None:
    together = model(x)
    if not isinstance(together, Tensor) or together.shape != logits.shape:
        shape = tuple(together.shape) if isinstance(together, Tensor) else type(together).__name__
        raise CheckError(
            f"forward(x) gave {shape}",
            expected=f"the stacked logits, {tuple(logits.shape)}",
            fix="leave forward to MultiExit",
        )
    _check_close(together, logits, tolerance, got="forward(x) differs from the exits", fix="leave forward to MultiExit")


def _check_stages(model: StagedModel, x: Tensor, logits: Tensor, tolerance: float) -> None:
    """Run every stage on the whole batch and on its last row alone, from what the stage before left of the whole batch."""
    carry: Carry = (x,)
    for exit in range(model.num_exits):
        before = tuple(tensor.clone() for tensor in carry)
        left, now = model.stage(exit, carry)
        changed = [at for at, (old, new) in enumerate(zip(before, carry, strict=True)) if not _is_same(old, new)]
        if changed:
            raise CheckError(
                f"stage {exit} changed tensor {changed[0]} of what it was given",
                expected="a carry that is the same afterwards, so that a stage can be run again",
                fix="look for in-place operations (x += …, relu_, nn.ReLU(inplace=True)) on a carried tensor itself",
            )
        if not _is_near(now, logits[exit], tolerance):
            raise CheckError(
                f"stage {exit} gave other logits than exits(x)",
                expected="the same, stage by stage",
                fix="leave exits(x) to MultiExit",
            )
        _check_left(model, exit, left, x.shape[0])
        left_alone, alone = model.stage(exit, tuple(tensor[-1:] for tensor in before))
        pairs = zip((alone, *left_alone), (now, *left), strict=False)
        if len(left) != len(left_alone) or not all(_is_near(row, rows[-1:], tolerance) for row, rows in pairs):
            raise CheckError(
                f"stage {exit} gave something else for one row of what it was given than for all rows",
                expected="that rows which are done can be dropped before any stage",
                fix="carry all that a row needs, with the batch first, and let no layer mix rows in eval mode",
            )
        carry = left


def _check_left(model: StagedModel, exit: int, left: Carry, rows: int) -> None:
    """What a stage leaves: tensors with the batch first, as many as the next one is given; nothing after the last."""
    if not isinstance(left, tuple) or not all(isinstance(tensor, Tensor) for tensor in left):
        kinds = ", ".join(type(part).__name__ for part in left) if isinstance(left, tuple) else type(left).__name__
        raise CheckError(f"stage {exit} left {kinds}", expected="a tuple of tensors", fix="work sizes and the like out anew")
    for at, tensor in enumerate(left):
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise CheckError(
                f"stage {exit} left a tensor {at} of shape {tuple(tensor.shape)} for {rows} inputs",
                expected="the batch as the first dimension of all that is carried",
                fix="move the batch to the front; what is the same for all inputs belongs into a buffer",
            )
    if exit + 1 == model.num_exits:
        if left:
            raise CheckError(f"the last stage left {len(left)} tensors", expected="none, ()", fix="return () and the logits")
    elif isinstance(model, MultiExit) and len(left) != model.carry_size(exit + 1):
        raise CheckError(
            f"stage {exit} left {len(left)} tensors, and carry_size({exit + 1}) is {model.carry_size(exit + 1)}",
            expected="the same number",
            fix="let carry_size(exit) say how many tensors stage `exit` is given",
        )


def _is_near(came_out: Tensor, expected: Tensor, tolerance: float) -> bool:
    if came_out.shape != expected.shape or came_out.dtype != expected.dtype:
        return False
    one, other = came_out.double(), expected.double()
    largest = float(other.abs().nan_to_num(posinf=0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)


def _is_same(old: Tensor, new: Tensor) -> bool:
    return bool(((old == new) | (old != old)).all())  # NaN stays NaN


def _check_lazy(model: nn.Module, x: Tensor) -> None:
    """Watch which submodules run for which exit, and which parameters each exit depends on."""
    assert isinstance(model, ExitModel)
    needed: set[str] = set()
    with _watched(model) as calls, _trainable(model) as parameters:
        iterator = model.exits(x)
        if calls[-1]:
            raise _eager(f"{calls[-1][0]!r} ran before the first exit was asked for", "make exits(x) a generator")
        for exit, logits in enumerate(iterator):
            shares = _gradients(logits, parameters)
            needed |= {name.rpartition(".")[0] for name, share in shares.items() if share is not None}
            early = _later_stages(model, calls[-1], exit) - needed
            if early:
                raise _eager(f"{min(early)!r} ran for exit {exit + 1}, which does not need it", _ONE_STAGE)
            # A layer used as a function is never seen to run, and proves nothing.
            if not calls[-1] and needed <= {name for stage in calls for name in stage}:
                raise _eager(f"nothing ran for exit {exit + 1}", _ONE_STAGE)
            calls.append([])
    with _watched(model) as stopped, torch.no_grad():
        iterator = model.exits(x)
        next(iterator)
        _close(iterator)
    if stopped[0] != calls[0]:
        more = sorted(set(stopped[0]) - set(calls[0]))
        raise _eager(f"a stop at the first exit ran {', '.join(more) or 'other layers'}", "compute nothing in a `finally`")


def _check_gradients(model: nn.Module, x: Tensor) -> None:
    assert isinstance(model, ExitModel)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        return
    logits = torch.stack(list(model.exits(x)))
    shares = _gradients(logits, trainable)
    without = [name for name, share in shares.items() if share is None or not bool(share.isfinite().all())]
    if without:
        raise CheckError(
            f"no finite gradient reaches {', '.join(without[:5])}" + (f" and {len(without) - 5} more" if without[5:] else ""),
            expected="a gradient from some exit for every parameter that requires one",
            fix="look for detach, no_grad, argmax or an unused layer; set requires_grad to False where it is meant",
        )


def _check_modes(model: nn.Module, x: Tensor) -> None:
    """In either mode: as many exits as in the other, and no submodule changes its mode on the way."""
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
                expected="the mode that the caller set",
                fix="do not call train() or eval() inside of exits(x)",
            )
        if count != model.num_exits:
            raise CheckError(
                f"{'train' if mode else 'eval'} mode gave {count} exits",
                expected=f"num_exits = {model.num_exits} in both modes",
                fix="yield every exit in both modes",
            )


def _check_close(came_out: Tensor, expected: Tensor, tolerance: float, *, got: str, fix: str) -> None:
    if came_out.shape != expected.shape:
        raise CheckError(f"{got}: their shape is {tuple(came_out.shape)}", expected=f"shape {tuple(expected.shape)}", fix=fix)
    apart = (came_out - expected).abs().amax((1, 2))
    limit = tolerance * max(1.0, float(expected.abs().amax()))
    for exit, difference in enumerate(apart.tolist()):
        if not difference <= limit:
            raise CheckError(
                f"{got}: at exit {exit + 1} they are {difference:.3g} apart", expected=f"at most {limit:.3g}", fix=fix
            )


def _eager(got: str, fix: str) -> CheckError:
    return CheckError(got, expected="that no stage runs before its exit is asked for", fix=fix)


def _close(iterator: Iterator[Tensor]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def _gradients(logits: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    if not logits.requires_grad:
        return dict.fromkeys(parameters)
    # The square keeps a sum over classes from cancelling where the logits are normalised.
    shares = torch.autograd.grad(logits.square().sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    return dict(zip(parameters, shares, strict=True))


def _later_stages(model: nn.Module, ran: list[str], exit: int) -> set[str]:
    """Those of the submodules `ran` that stand in a later member of a list with one member an exit."""
    assert isinstance(model, ExitModel)
    lists = [f"{name}." for name, child in model.named_children() if isinstance(child, nn.ModuleList)]
    lists = [name for name in lists if len(model.get_submodule(name[:-1])._modules) == model.num_exits]
    places = [
        (name, name.removeprefix(prefix).partition(".")[0]) for prefix in lists for name in ran if name.startswith(prefix)
    ]
    return {name for name, place in places if int(place) > exit}


@contextmanager
def _watched(model: nn.Module) -> Iterator[Calls]:
    """Record the names of the submodules with parameters of their own as they run."""
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
    """Let every parameter ask for a gradient, also the frozen ones, so that dependence can be seen."""
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
def _left_as_found(model: ExitModel) -> Iterator[None]:
    """Put modes, buffers and the random state back, whatever happens."""
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
