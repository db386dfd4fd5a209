"""Exits on any module: `attach_exits` puts heads on chosen places of a network that gives logits.

The result is a model like any other of this library: a generator that runs the network up to the next place, and no further.
For that the network is cut into stages by tracing or, where it cannot be traced, run in a thread that waits at each place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anytime.checks import check_choice
from anytime.errors import OptionError, ShapeError, StateError
from anytime.models.attach.heads import PooledHead
from anytime.models.attach.paused import make_pausable, run_paused
from anytime.models.attach.probe import Probe, Visit, evaluating, logits_of, probe
from anytime.models.attach.traced import Cuts, Trace, UntraceableError, traced_through
from anytime.models.base import Carry, MultiExit
from anytime.models.modes import without_autocast

Location = str | float
"""The name of a submodule, or a fraction of the MACs above 0 and below 1."""
Head = Callable[[tuple[int, ...]], nn.Module]
"""Makes a head from the shape of one input's features."""
Method = Literal["auto", "trace", "thread"]
Statistics = Literal["fixed", "moving"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_ROWS = 2
_THREAD = "it is run in a thread"


def attach_exits(
    module: nn.Module,
    at: Sequence[Location],
    head: Head | None = None,
    *,
    example: Tensor,
    classes: int,
    frozen: bool = False,
    statistics: Statistics = "fixed",
    method: Method = "auto",
) -> AttachedExits:
    """Put exits on a module; its own output is the last exit.

    Args:
        module: Any module that gives logits, `(batch, classes)`, from one tensor. It is used, not copied.
        at: Where: names as in `module.named_modules()`, or fractions of the MACs, which choose the block that ends nearest.
        head: Makes the head for a place from the shape of one input's features; `PooledHead` by default.
        example: A batch of which at most two rows are used.
        classes: How many classes there are.
        frozen: Whether the module stays as it is and only the heads learn.
        statistics: Of a frozen module's batch norms: `fixed`, in eval mode for good (ZTW), or `moving` in train mode, as in
            SDN's released code.
        method: `trace` cuts the module into stages, `thread` runs it in a thread that waits at each exit, `auto` traces
            where that gives what the module gives. Use `thread` for a module that draws lots in Python on its way.

    Example:
        >>> body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> model = attach_exits(body, at=["1", 0.8], example=torch.randn(2, 8), classes=3)
        >>> model.exit_names, model(torch.randn(5, 8)).shape
        (('1', '3'), torch.Size([3, 5, 3]))
    """
    return AttachedExits(
        module, at, head, example=example, classes=classes, frozen=frozen, statistics=statistics, method=method
    )


class AttachedExits(MultiExit):
    """A module with exits; made by `attach_exits`, whose arguments it takes.

    A head that has an attribute `reads_previous` which is true is given the logits of the exit before as a second argument.

    Attributes:
        backbone: The module.
        heads: One a place; the last exit has none, as it is the module's own.
        exit_names: The places, in the order in which they are passed.
        exit_shares: Which fraction of the module's MACs is spent at each place.
        method: `trace` or `thread`.
    """

    @without_autocast()  # heads take the module's own type, whatever types features have where it is made
    def __init__(
        self,
        module: nn.Module,
        at: Sequence[Location],
        head: Head | None = None,
        *,
        example: Tensor,
        classes: int,
        frozen: bool = False,
        statistics: Statistics = "fixed",
        method: Method = "auto",
    ) -> None:
        super().__init__()
        check_choice(method, "method", get_args(Method))
        check_choice(statistics, "statistics", get_args(Statistics))
        rows = _rows(example, module)
        self.backbone = module
        seen, visits = _visit(module, at, rows)
        names = {id(part): name for name, part in reversed(list(module.named_modules(remove_duplicate=False)))}
        self.exit_names = tuple(_given_name(module, at, visit) or names[id(visit.module)] for visit in visits)
        self.exit_shares = tuple(visit.flops / max(1, seen.flops) for visit in visits)
        self.num_exits = len(visits) + 1
        self._overwritten = tuple(visit.overwritten for visit in visits)
        self._frozen, self._fixed = frozen, frozen and statistics == "fixed"
        self._check_output(seen.output, rows, classes)
        make = head or (lambda shape: PooledHead(shape, classes))
        self.heads = nn.ModuleList(_make_head(make, visit) for visit in visits)
        self._check_heads(visits, classes)
        self._through = tuple(names[id(part)] for part in traced_through(module, [visit.module for visit in visits]))
        self._traces: dict[tuple[bool, ...], Trace] = {}
        self._cuts: dict[Trace, Cuts] = {}
        self._uncut = _THREAD
        self.method = self._choose(method, rows, seen, visits)
        # The module keeps the modes it came in.
        self.training = module.training
        self.heads.train(module.training)
        self._hold_statistics()
        if frozen:  # last of all: a module that was refused stays as it came
            module.requires_grad_(False)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; the module is run up to the place of that exit only."""
        features = self._features(x)
        logits: Tensor | None = None
        try:
            for exit, overwritten in enumerate(self._overwritten):
                now = next(features)
                # A later layer of the module writes over these features: what the head keeps for its gradient must stay.
                now = now.clone() if overwritten else now
                logits = self._answer(exit, now, logits)
                del now
                yield logits
            yield logits_of(next(features))
        finally:
            features.close()  # type: ignore[attr-defined]

    @property
    def staged(self) -> bool:
        """Whether the module was cut into stages by tracing, in the modes that its parts are in now."""
        try:
            self._cut()
        except StateError:
            return False
        return super().staged

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage on the values of the module that cross the cut, and the logits of the exit before if its head reads them.

        Which values these are may differ between train and eval mode.
        """
        cuts = self._cut()
        self._check_carry(exit, carry)
        values, previous = (carry[:-1], carry[-1]) if self._reads_previous(exit) else (carry, None)
        left, found = cuts.run(self.backbone, exit, values)
        if exit == len(self.heads):
            return (), logits_of(found)
        logits = self._answer(exit, found, previous)
        return (*left, logits) if self._reads_previous(exit + 1) else left, logits

    def carry_size(self, exit: int) -> int:
        """The values that cross the cut, and the logits of the exit before where the head reads them."""
        return len(self._cut().stages[exit].given) + self._reads_previous(exit)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the batch norms of a frozen module stay in eval mode unless its statistics may move."""
        super().train(mode)
        self._hold_statistics()
        return self

    def _hold_statistics(self) -> None:
        if self._fixed:
            for part in self.backbone.modules():
                if isinstance(part, _NormBase):
                    part.eval()

    def _answer(self, exit: int, features: Tensor, previous: Tensor | None) -> Tensor:
        head = self.heads[exit]
        logits: Tensor = head(features, previous) if getattr(head, "reads_previous", False) else head(features)
        return logits

    def _reads_previous(self, exit: int) -> bool:
        return 0 < exit < len(self.heads) and bool(getattr(self.heads[exit], "reads_previous", False))

    def _features(self, x: Tensor) -> Iterator[Any]:
        if self.method == "trace":
            try:
                return self._trace().run(self.backbone, x)
            except UntraceableError:  # a combination of modes that was not there before
                make_pausable(self._places())
        return run_paused(self.backbone, self._places(), x)

    def _places(self) -> list[nn.Module]:
        return [self.backbone.get_submodule(name) for name in self.exit_names]

    def _trace(self) -> Trace:
        """The trace for the modes of the traced modules and their children: what their forward may look at."""
        through = map(self.backbone.get_submodule, self._through)
        modes = tuple(part.training for outer in through for part in (outer, *outer.children()))
        if modes not in self._traces:
            self._traces[modes] = Trace(self.backbone, self._places())
        return self._traces[modes]

    def _cut(self) -> Cuts:
        """The stages of the trace for the modes of now."""
        try:
            if not self._cuts:
                raise UntraceableError(self._uncut)
            trace = self._trace()
            if trace not in self._cuts:
                self._cuts[trace] = next(iter(self._cuts.values())).of(trace)
        except UntraceableError as error:
            raise StateError(
                f"the module cannot be run by stages: {error}",
                expected="a module that tracing can cut, in the modes that it is in now",
                fix="use exits(x)" + (", or method='trace', which says what is in the way" if self.method == "thread" else ""),
            ) from error
        return self._cuts[trace]

    def _choose(self, method: Method, rows: Tensor, seen: Probe, visits: list[Visit]) -> Literal["trace", "thread"]:
        """Trace in both modes and compare; where that fails, turn to the thread."""
        if method != "thread":
            try:
                with evaluating(self):
                    trace = self._trace()
                    if not rows.is_meta:
                        self._compare(rows, [*(visit.kept for visit in visits), seen.output])
                    self._try_to_cut(trace, rows)
                    self.train()
                    self._trace()
                return "trace"
            except UntraceableError as error:
                if method == "trace":
                    raise OptionError(
                        f"the module cannot be traced: {error}",
                        expected="a forward that does the same for every input",
                        fix="leave method out, or use method='thread'",
                    ) from error
        self._cuts, self._uncut = {}, _THREAD
        make_pausable(self._places())
        return "thread"

    def _try_to_cut(self, trace: Trace, rows: Tensor) -> None:
        try:
            self._cuts[trace] = Cuts.found(trace, self.backbone, rows)
        except Exception as error:  # without stages the module has its exits all the same
            self._uncut = str(error)

    @torch.no_grad()
    def _compare(self, rows: Tensor, expected: list[Any]) -> None:
        try:
            for given, wanted in zip(self._trace().run(self.backbone, rows), expected, strict=True):
                tensor = given if isinstance(given, Tensor) else logits_of(given)
                if tensor.shape != wanted.shape or not torch.allclose(tensor, wanted, rtol=1e-3, atol=1e-5, equal_nan=True):
                    raise UntraceableError("the trace gives something else than the module")
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error

    @torch.no_grad()
    def _check_heads(self, visits: list[Visit], classes: int) -> None:
        logits: Tensor | None = None
        with evaluating(self.heads):
            for exit, (name, visit) in enumerate(zip(self.exit_names, visits, strict=True)):
                assert visit.kept is not None
                logits = self._answer(exit, visit.kept, logits)
                _check_logits(f"the head at {name!r} gives", logits, visit.output.shape[0], classes)

    @staticmethod
    def _check_output(output: Tensor, rows: Tensor, classes: int) -> None:
        _check_logits("the module gives", output, rows.shape[0], classes)


def _rows(example: Tensor, module: nn.Module) -> Tensor:
    for name, value, kind in (("the module", module, nn.Module), ("the example", example, Tensor)):
        if not isinstance(value, kind):
            raise OptionError(f"{name} is a {type(value).__name__}", expected=f"a torch {kind.__name__}", fix="give one")
    if example.ndim < 2 or example.shape[0] == 0:
        raise ShapeError(
            f"the example has shape {tuple(example.shape)}",
            expected="a batch with at least one row",
            fix="add a batch dimension, e.g. example[None]",
        )
    tensor = next(module.parameters(), None)
    return example[:_ROWS].to(example.device if tensor is None else tensor.device)


def _visit(module: nn.Module, at: Sequence[Location], rows: Tensor) -> tuple[Probe, list[Visit]]:
    """A run of the module, and the visits of the places in the order of their ends."""
    if not isinstance(at, Sequence) or isinstance(at, str):
        raise OptionError(f"at is {at!r}", expected="a list of names or shares", fix=f"write at=[{at!r}]")
    first = None if all(isinstance(place, str) for place in at) else probe(module, rows)
    places = [_by_name(module, place) if isinstance(place, str) else _by_share(module, first, place) for place in at]
    seen = probe(module, rows, keep=tuple(places))
    visits = [_only_visit(seen, part, place, rows) for part, place in zip(places, at, strict=True)]
    for index, part in enumerate(places):
        if any(part is other for other in places[:index]):
            raise OptionError(
                f"two exits fall on the same place, the second by {at[index]!r}",
                expected="each exit at a place of its own",
                fix="leave one out, or name the places",
            )
    return seen, [visit for visit in seen.visits if any(visit is wanted for wanted in visits)]


def _by_name(module: nn.Module, name: str) -> nn.Module:
    known: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if name and name in known:
        return known[name]
    names = [other for other in known if other]
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    raise OptionError(
        f"no submodule is called {name!r}",
        expected=f"one of {', '.join(names[:8])}{' …' if len(names) > 8 else ''}",
        fix=f"did you mean {' or '.join(map(repr, close))}?" if close else "see module.named_modules()",
    )


def _by_share(module: nn.Module, seen: Probe | None, share: Any) -> nn.Module:
    """The block that ends nearest to a fraction of the MACs; the last of those that end at the same."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise OptionError(
            f"an exit is at {share!r}",
            expected="the name of a submodule, or a fraction of the MACs above 0 and below 1",
            fix="the module's own output is the last exit by itself and needs no share",
        )
    assert seen is not None
    blocks = _blocks(module)
    rows = seen.output.shape[0]
    ends = [
        visit
        for visit in seen.visits
        if any(visit.module is block for block in blocks)
        and len(seen.of(visit.module)) == 1
        and visit.shape is not None
        and len(visit.shape) >= 2
        and visit.shape[0] == rows
        and 0 < visit.flops < seen.flops
    ]
    if not ends:
        raise OptionError(
            f"no block of the module ends between its beginning and its end, for the share {share}",
            expected="layers whose multiplications torch can count, in more than one block",
            fix="name the places instead of giving shares",
        )
    nearest = min(abs(visit.flops / seen.flops - share) for visit in ends)
    return [visit.module for visit in ends if abs(visit.flops / seen.flops - share) == nearest][-1]


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of lists and sequences, from outside in, and single layers: where features are whole, not half a residual sum."""
    found: list[nn.Module] = []
    for child in module.children():
        is_member = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        has_members = any(isinstance(inner, nn.ModuleList) for inner in child.children())
        if next(child.children(), None) is None or (is_member and not has_members):
            found.append(child)
        else:
            found += _blocks(child)
    return found


def _only_visit(seen: Probe, part: nn.Module, place: Location, rows: Tensor) -> Visit:
    visits = seen.of(part)
    if len(visits) != 1:
        raise OptionError(
            f"the submodule {place!r} runs {len(visits)} times" if visits else f"the submodule {place!r} never runs",
            expected="a submodule that runs once for every input",
            fix="name one inside or around it" if visits else "lists are not called themselves: name a member, e.g. 'blocks.3'",
        )
    if visits[0].shape is None:
        raise ShapeError(
            f"the submodule {place!r} gives a {type(visits[0].output).__name__}",
            expected="a tensor",
            fix="name a submodule inside it that gives one",
        )
    if len(visits[0].shape) < 2 or visits[0].shape[0] != rows.shape[0]:
        raise ShapeError(
            f"the submodule {place!r} gives a tensor of shape {visits[0].shape} for {rows.shape[0]} inputs",
            expected="the batch as its first dimension",
            fix="name a submodule that keeps the batch first",
        )
    return visits[0]


def _given_name(module: nn.Module, at: Sequence[Location], visit: Visit) -> str | None:
    return next((place for place in at if isinstance(place, str) and module.get_submodule(place) is visit.module), None)


def _make_head(make: Head, visit: Visit) -> nn.Module:
    made = make(tuple(visit.output.shape[1:]))
    if not isinstance(made, nn.Module):
        raise OptionError(
            f"head(shape) gave a {type(made).__name__}",
            expected="a torch module",
            fix="pass a function from the shape of one input's features to a module",
        )
    output = visit.output
    return made.to(output.device, output.dtype if output.is_floating_point() else None)


def _check_logits(what: str, logits: Any, rows: int, classes: int) -> None:
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (rows, classes):
        raise ShapeError(
            f"{what} {shape} for {rows} inputs",
            expected=f"logits of shape ({rows}, {classes})",
            fix="check classes; the last layer has one output a class",
        )
