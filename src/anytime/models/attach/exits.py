"""Exits on any module: `attach_exits` puts heads at chosen places of a network that returns logits.

The result is a model like any other in this library, which runs the network up to the next exit only. The network is split into
stages by tracing; if it cannot be traced, by replaying its forward without the parts that ran before; and if that gives other
results, it runs in a thread that waits at each exit.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anytime.checks import Inputs, check_choice, count_rows, map_inputs, tensors_of
from anytime.errors import AttachWarning, OptionError, ShapeError, StateError
from anytime.models.attach.heads import PooledHead
from anytime.models.attach.paused import make_pausable, run_paused
from anytime.models.attach.places import Location, call_of, visit_places
from anytime.models.attach.probe import Place, Visit, bare_module, check_example, evaluating, first_tensor, logits_of, run_once
from anytime.models.attach.replayed import ReplayedStages
from anytime.models.attach.traced import Trace, TracedStages, UntraceableError, traced_through
from anytime.models.base import Carry, MultiExit
from anytime.models.input_spec import specs_that_run
from anytime.models.modes import without_autocast

Head = Callable[..., nn.Module]
"""Makes a head from the shape of the features of one input. A parameter `channels_first`, if there is one, says whether the
features of a sequence are `(channels, length)`, as those of 1-D convolutions."""
Method = Literal["auto", "trace", "replay", "thread"]
Statistics = Literal["fixed", "moving"]
_MASK = "attention_mask"
_FAR = 0.1
"""How far from the requested fraction of the MACs an exit may be without a warning."""


class AttachedExits(MultiExit):
    """Attach exits to a module; its own output is the last exit. `attach_exits` is this class.

    Args:
        module: A module that maps its inputs to logits, `(batch, classes)`. It is used, not copied.
        at: The places: names as in `module.named_modules()`, or fractions of the MACs, which select the block whose end is
            nearest. `name#2` is the second call of a submodule that runs several times.
        head: Makes the head for a place from the shape of the features of one input; `PooledHead` by default. A head with a
            true attribute `reads_previous` gets the logits of the exit before as its second argument.
        example: A batch, of which at most two rows are used: a tensor, a tuple of tensors, which the module gets by position,
            or a dict, which it gets by name (or whole, if it takes one argument), without `labels`. Heads on sequences read an
            `attention_mask` and pool real tokens only.
        classes: The number of classes; by default as many as the module has.
        frozen: Whether to train the heads only.
        statistics: The batch norms of a frozen module: `fixed`, always in eval mode (ZTW), or `moving`, updated in train mode
            as in SDN's released code.
        method: `trace` splits the module into stages by tracing it. `replay` runs its forward for each stage without the parts
            that ran before, see `anytime.models.attach.replayed`. `thread` runs it in a thread that waits at each exit: no
            engine but `eager`, no export. `auto` takes the first of these that gives the results of the module, and warns of
            `thread`. Use `thread` if forward uses Python's random numbers.

    Attributes:
        backbone: The module.
        heads: One per place; the last exit is the output of the module.
        classes: The number of classes.
        exit_names: The places, in the order in which they are passed.
        exit_fractions: The fraction of the module's MACs up to each place.
        method: `trace`, `replay` or `thread`.
        why: Why this method was chosen, with the line at which tracing stopped.

    Example:
        >>> body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> model = attach_exits(body, at=["1", 0.8], example=torch.randn(2, 8), classes=3)
        >>> model.exit_names, model(torch.randn(5, 8)).shape
        (('1', '3'), torch.Size([3, 5, 3]))
    """

    announces: ClassVar[bool] = True
    """Whether to warn of exits far from the requested fractions; a subclass with places of its own need not."""

    @torch.inference_mode(False)  # heads are to be trained
    @without_autocast()  # heads take the dtype of the module, not that of features under autocast
    def __init__(
        self,
        module: nn.Module,
        at: Sequence[Location],
        head: Head | None = None,
        *,
        example: Inputs,
        classes: int | None = None,
        frozen: bool = False,
        statistics: Statistics = "fixed",
        method: Method = "auto",
    ) -> None:
        super().__init__()
        check_choice(method, "method", get_args(Method))
        check_choice(statistics, "statistics", get_args(Statistics))
        module = bare_module(module)
        given = check_example(example)
        device = next(module.parameters(), tensors_of(given)[0]).device
        rows = map_inputs(lambda tensor: tensor[:2].to(device), given)
        self.input_names = tuple(rows) if isinstance(rows, Mapping) else ()
        self.frozen, self.statistics = frozen, statistics
        self._mask = _find_mask(module, rows)
        self.backbone = module
        seen, visits, reached = visit_places(module, at, rows)
        self.input_specs = specs_that_run(
            rows, lambda made: run_once(module, map_inputs(lambda tensor: tensor.to(device), made))
        )
        names = {id(part): name for name, part in reversed(list(module.named_modules(remove_duplicate=False)))}
        named = {id(module.get_submodule(name)): name for name, _ in (call_of(place) for place in at if isinstance(place, str))}
        self._calls = tuple(len(seen.of(visit.module)) for visit in visits)  # how often each runs
        self.exit_names = tuple(
            (names | named)[id(visit.module)] + (f"#{seen.number(visit) + 1}" if calls > 1 else "")
            for visit, calls in zip(visits, self._calls, strict=True)
        )
        self.exit_fractions = tuple(visit.flops / max(1, seen.flops) for visit in visits)
        self.num_exits = len(visits) + 1
        self._overwritten = tuple(visit.overwritten for visit in visits)
        self._fixed = frozen and statistics == "fixed"
        self._warn_of_places(reached)
        self.classes = known = _check_logits("the module returns", seen.output, count_rows(rows), classes)
        self.heads = nn.ModuleList(
            _make_head(head or partial(PooledHead, classes=known), module, visit, seen.channels_first(visit))
            for visit in visits
        )
        self._check_heads(visits, known, self._mask_of(rows))
        self._through = tuple(names[id(part)] for part in traced_through(module, [visit.module for visit in visits]))
        self._stages: dict[tuple[bool, ...], TracedStages | str] = {}  # by modes; a text says why there are none
        self._eval_stages: TracedStages | None = None
        self._replayed: ReplayedStages | None = None
        self.method, self.why = self._choose(method, rows, [*(visit.output_then for visit in visits), seen.output])
        # The module keeps its modes.
        self.training = module.training
        self.heads.train(module.training)
        self._hold_statistics()
        if frozen:  # last, so that a refused module is not changed
            module.requires_grad_(False)

    def exits(self, x: Inputs) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; the module runs up to the place of that exit only."""
        if self.staged:
            yield from super().exits(x)
            return
        logits: Tensor | None = None
        mask = self._mask_of(x)
        with closing(run_paused(self.backbone, self._places(), x)) as outputs:
            for exit, overwritten in enumerate(self._overwritten):
                features = first_tensor(next(outputs))
                # If a later layer overwrites these features, the head needs its own copy for the gradient.
                logits = self._answer(exit, features.clone() if overwritten else features, logits, mask)
                del features
                yield logits
            yield logits_of(next(outputs))

    @property
    def staged(self) -> bool:
        """Whether the module is split into stages in its current modes."""
        return not isinstance(self._find_stages(), str) and super().staged

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage on the values of the module, and on the logits of the exit before if the head reads them."""
        stages = self._require_stages()
        self._check_carry(exit, carry)
        values, previous = (carry[:-1], carry[-1]) if self._reads_previous(exit) else (carry, None)
        left, found = stages.run(self.backbone, exit, values)
        if exit == len(self.heads):
            return (), logits_of(found)
        mask = stages.mask_in(exit, values) if isinstance(stages, ReplayedStages) else None
        logits = self._answer(exit, found, previous, mask)
        return (*left, logits) if self._reads_previous(exit + 1) else left, logits

    def carry_size(self, exit: int) -> int:
        """The values of the module, and the logits of the exit before if the head reads them."""
        return self._require_stages().size(exit) + self._reads_previous(exit)

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """The length of sequences varies, if the module takes sequences of other lengths than the example's."""
        if self._replayed is None:
            return super().free_sizes(exit)
        return (*self._replayed.free_sizes(exit), *({},) * self._reads_previous(exit))

    def extra_repr(self) -> str:
        """Where the exits are, and how the module is split."""
        places = (f"{name} ({fraction:.2f})" for name, fraction in zip(self.exit_names, self.exit_fractions, strict=True))
        return f"{self.num_exits} exits: {', '.join([*places, 'the end'])}; method={self.method!r}"

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the batch norms of a frozen module stay in eval mode unless `statistics` is `moving`."""
        super().train(mode)
        self._hold_statistics()
        return self

    def _hold_statistics(self) -> None:
        if self._fixed:
            for part in self.backbone.modules():
                if isinstance(part, _NormBase):
                    part.eval()

    def _answer(self, exit: int, features: Tensor, previous: Tensor | None, mask: Tensor | None) -> Tensor:
        head = self.heads[exit]
        if features.dtype in (torch.float16, torch.bfloat16):  # the module may use autocast, which has ended here
            features = features.to(next(head.parameters(), features).dtype)
        options = {}
        if mask is not None and getattr(head, "reads_mask", False):
            tokens = features.mT if getattr(head, "channels_first", False) else features
            options = {"mask": mask} if mask.shape == tokens.shape[:2] else {}
        read = (features, previous) if getattr(head, "reads_previous", False) else (features,)
        logits: Tensor = head(*read, **options)
        return logits

    def _mask_of(self, x: Inputs) -> Tensor | None:
        """The attention mask, `(batch, tokens)`, among the inputs."""
        return None if self._mask is None else tensors_of(x, self.input_names)[self._mask]

    def _warn_of_places(self, reached: Mapping[float, float]) -> None:
        for requested, fraction in reached.items():
            if abs(fraction - requested) > _FAR and self.announces:
                warnings.warn(
                    f"the exit requested at {requested:g} of the MACs is at {fraction:.2f}, the nearest end of a block; "
                    "name a place to choose another",
                    AttachWarning,
                    stacklevel=5,  # the caller, outside of the decorators
                )

    def _reads_previous(self, exit: int) -> bool:
        return 0 < exit < len(self.heads) and bool(getattr(self.heads[exit], "reads_previous", False))

    def _places(self) -> list[Place]:
        found = zip(map(call_of, self.exit_names), self._calls, strict=True)
        return [Place(self.backbone.get_submodule(name), call, calls) for (name, call), calls in found]

    def _modes(self) -> tuple[bool, ...]:
        """The modes of the traced modules and their children, which forward may depend on."""
        through = map(self.backbone.get_submodule, self._through)
        return tuple(part.training for outer in through for part in (outer, *outer.children()))

    def _find_stages(self) -> TracedStages | ReplayedStages | str:
        """The stages for the current modes, or why there are none."""
        if self._replayed is not None:
            if self._replayed.trains or not any(self.backbone.get_submodule(name).training for name in self._through):
                return self._replayed
            make_pausable(self._places())
            return "in these modes the module runs other operations than in eval mode"
        if self._eval_stages is None:
            return f"it runs in a thread; {self.why}"
        modes = self._modes()
        if modes not in self._stages:
            try:
                self._stages[modes] = self._eval_stages.of(Trace(self.backbone, self._places()))
            except UntraceableError as error:
                self._stages[modes] = str(error)
                make_pausable(self._places())
        return self._stages[modes]

    def _require_stages(self) -> TracedStages | ReplayedStages:
        stages = self._find_stages()
        if isinstance(stages, str):
            raise StateError(
                f"the module cannot run stage by stage: {stages}",
                expected="a module that can be traced in its current modes",
                fix="use exits(x)" + ("; method='trace' says what prevents tracing" if self.method == "thread" else ""),
            )
        return stages

    def _choose(self, method: Method, rows: Inputs, expected: list[Tensor]) -> tuple[Literal["trace", "replay", "thread"], str]:
        """The first method that gives the results of the module, and why."""
        obstacles = []
        if method in ("auto", "trace"):
            try:
                self._trace(rows, expected)
                return "trace", "the module was traced"
            except UntraceableError as error:
                obstacles.append(f"tracing stopped: {error}")
        if method in ("auto", "replay"):
            try:
                with evaluating(self):
                    stages = ReplayedStages.found(
                        self.backbone, [call_of(name) for name in self.exit_names], rows, mask=self._mask
                    )
                    for name in self._through:  # and not the layers in between, whose train mode is theirs alone
                        self.backbone.get_submodule(name).training = True
                    stages.check_train_mode(self.backbone, rows)
                self._replayed = stages
                return "replay", "; ".join([*obstacles, "its parts were replayed"])
            except UntraceableError as error:
                obstacles.append(f"replaying failed: {error}")
        why = "; ".join(obstacles) or "requested"
        if method in ("trace", "replay"):
            raise OptionError(
                f"method is {method!r}, but {why}",
                expected="a forward that can be split between the exits",
                fix=f"remove method={method!r}, or pass method='thread'",
            )
        if method == "auto":
            warnings.warn(
                f"the {type(self.backbone).__name__} runs in a thread, without faster engines and export: {why}. "
                "Pass method='thread' to accept this",
                AttachWarning,
                stacklevel=5,
            )
        make_pausable(self._places())
        return "thread", why

    def _trace(self, rows: Inputs, expected: list[Tensor]) -> None:
        """Trace in both modes, and compare the results with those of the module."""
        if not isinstance(rows, Tensor):
            raise UntraceableError("the module takes a dict or a tuple")
        with evaluating(self):
            stages = TracedStages.found(Trace(self.backbone, self._places()), self.backbone, rows, expected)
            self._stages[self._modes()] = stages
            self.train()
            Trace(self.backbone, self._places())
        self._eval_stages = stages

    @torch.no_grad()
    def _check_heads(self, visits: list[Visit], classes: int, mask: Tensor | None) -> None:
        logits: Tensor | None = None
        with evaluating(self.heads):
            for exit, (name, visit) in enumerate(zip(self.exit_names, visits, strict=True)):
                try:
                    logits = self._answer(exit, visit.output_then, logits, mask)
                except Exception as error:
                    raise OptionError(
                        f"the head at {name!r} fails on features of shape {tuple(visit.output.shape)}: {error}",
                        expected="a module that takes the features there and returns logits",
                        fix="make it from the shape that head= is called with, (channels, height, width) or (tokens, width)",
                    ) from error
                _check_logits(f"the head at {name!r} returns", logits, visit.output.shape[0], classes)


attach_exits = AttachedExits


def _find_mask(module: nn.Module, x: Inputs) -> int | None:
    """The index of the attention mask among several inputs, by their names or those of the arguments of forward."""
    if isinstance(x, Tensor):
        return None
    names = list(x if isinstance(x, Mapping) else inspect.signature(module.forward).parameters)[: len(x)]
    return names.index(_MASK) if _MASK in names else None


def _make_head(make: Head, module: nn.Module, visit: Visit, channels_first: bool) -> nn.Module:
    told = {"channels_first": channels_first} if "channels_first" in inspect.signature(make).parameters else {}
    made = make(tuple(visit.output.shape[1:]), **told)
    if not isinstance(made, nn.Module):
        raise OptionError(
            f"head(shape) returned a {type(made).__name__}",
            expected="a torch.nn.Module",
            fix="pass a function from the shape of the features of one input to a module",
        )
    output = visit.output
    dtype = output.dtype if output.is_floating_point() else None
    kinds = {tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()}
    if len(kinds) == 1:  # features have another dtype than the module where it uses autocast itself
        (dtype,) = kinds
    return made.to(output.device, dtype)


def _check_logits(what: str, logits: Any, rows: int, classes: int | None) -> int:
    """The number of classes."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if len(shape) != 2 or shape[0] != rows or classes not in (None, shape[1]) or shape[1] < 2:
        fix = "check classes; the last layer needs one output per class"
        if shape in ((rows,), (rows, 1)):
            fix = "return two logits for two classes, such as -z / 2 and z / 2 in place of the logit z of a sigmoid"
        elif len(shape) > 2:
            fix = "pass a module with one answer per input; for answers per token or pixel, see docs/dense.md"
        raise ShapeError(
            f"{what} {shape or f'a {type(logits).__name__}'} for {rows} inputs",
            expected=f"logits of shape ({rows}, {'classes' if classes is None else classes}), at least two classes",
            fix=fix,
        )
    return int(shape[1])
