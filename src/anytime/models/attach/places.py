"""The places where exits are attached: names of submodules, or fractions of the MACs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from anytime.checks import Inputs, count_rows
from anytime.errors import OptionError, ShapeError
from anytime.models.attach.probe import Probe, Visit, probe

Location = str | float
"""The name of a submodule, or a fraction of the MACs above 0 and below 1. `name#2` is its second call, if it runs often."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def visit_places(module: nn.Module, at: Sequence[Location], rows: Inputs) -> tuple[Probe, list[Visit], dict[float, float]]:
    """Run a module, and return the calls of the submodules at the places, in the order in which they finish.

    The last result has for each fraction in `at` that of the place.
    """
    if not isinstance(at, Sequence) or isinstance(at, str):
        name = str(at) if isinstance(at, int) else at
        raise OptionError(f"at is {at!r}", expected="a list of names or fractions", fix=f"pass at=[{name!r}]")
    first = None if all(isinstance(place, str) for place in at) else probe(module, rows)
    known = {name for name, _ in module.named_modules()}
    fractions = [_check_fraction(place, known) for place in at if not isinstance(place, str)]
    nearest: dict[float, Visit] = {}
    for fraction in sorted(fractions):
        nearest[fraction] = _by_fraction(module, first, fraction, [visit.flops for visit in nearest.values()])
    parts = [_by_name(module, place) if isinstance(place, str) else _call(first, nearest[place]) for place in at]
    seen = probe(module, rows, keep=tuple(part for part, _ in parts))
    visits = [_visit(seen, part, number, place, rows) for (part, number), place in zip(parts, at, strict=True)]
    for index, visit in enumerate(visits):
        if any(visit is other for other in visits[:index]):
            raise OptionError(
                f"{at[index]!r} selects the same place as another exit",
                expected="each exit at its own place",
                fix="remove one of them, or name the places",
            )
    reached = {fraction: visit.flops / seen.flops for fraction, visit in nearest.items()}
    return seen, [visit for visit in seen.visits if any(visit is wanted for wanted in visits)], reached


def call_of(place: str) -> tuple[str, int]:
    """The name of a submodule and the index of its call.

    >>> call_of("layers.0#3"), call_of("layers.0")
    (('layers.0', 2), ('layers.0', 0))
    """
    name, _, number = place.partition("#")
    return name, int(number) - 1 if number.isdecimal() else 0


def _by_name(module: nn.Module, place: str) -> tuple[nn.Module, int | None]:
    """A submodule, and the index of the call if the name has one."""
    known: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    name, number = call_of(place)
    if name and name in known:
        return known[name], number if "#" in place else None
    names = [other for other in known if other]
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    raise OptionError(
        f"there is no submodule {name!r}",
        expected=f"one of {', '.join(names[:8])}{' …' if len(names) > 8 else ''}",
        fix=f"did you mean {' or '.join(map(repr, close))}?" if close else "list the names with module.named_modules()",
    )


def _check_fraction(fraction: Any, names: set[str]) -> float:
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        raise OptionError(
            f"an exit is at {fraction!r}",
            expected="the name of a submodule, or a fraction of the MACs above 0 and below 1",
            fix=f"pass the name of the submodule in quotes: {str(fraction)!r}"
            if str(fraction) in names
            else "remove it: the module's own output is always the last exit"
            if fraction in (1, 1.0)
            else "pass 0.5 for half of the MACs, or a name in quotes, such as 'blocks.3'",
        )
    return fraction


def _call(seen: Probe | None, visit: Visit) -> tuple[nn.Module, int]:
    """A submodule and the index of its call."""
    assert seen is not None
    return visit.module, seen.number(visit)


def _by_fraction(module: nn.Module, seen: Probe | None, fraction: float, taken: Sequence[int]) -> Visit:
    """The block whose end is nearest to a fraction of the MACs and is not taken; the last of several that end there."""
    assert seen is not None
    blocks, rows = _blocks(module), seen.output.shape[0]
    ends = [
        visit
        for visit in seen.visits
        if any(visit.module is block for block in blocks)
        and visit.shape is not None
        and len(visit.shape) >= 2
        and visit.shape[0] == rows
        and 0 < visit.flops < seen.flops
    ]
    if not ends:
        raise OptionError(
            f"no block of the module ends between its start and its end, for the fraction {fraction}",
            expected="at least two blocks of layers whose MACs torch can count",
            fix="name the places instead of passing fractions",
        )
    free = [visit for visit in ends if visit.flops not in taken]
    if not free:
        shown = sorted({visit.flops / seen.flops for visit in ends})
        raise OptionError(
            f"no block is left for the fraction {fraction}: those with the batch first end at "
            + ", ".join(f"{end:.2f}" for end in shown),
            expected=f"at most {len(shown)} fractions for this module",
            fix=f"remove {fraction}, or name places with module.named_modules()",
        )
    nearest = min(abs(visit.flops / seen.flops - fraction) for visit in free)
    return [visit for visit in free if abs(visit.flops / seen.flops - fraction) == nearest][-1]


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of lists and sequences, outermost first, siblings of one type, and single layers.

    The features of a member or sibling, such as `layer1` and `layer2`, are complete: not within a sum.
    """
    found: list[nn.Module] = []
    repeated = _repeated(module)
    for child in module.children():
        is_member = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        has_members = any(isinstance(inner, nn.ModuleList) for inner in child.children())
        is_sibling = any(child is other for other in repeated) and not _has_blocks(child)
        if next(child.children(), None) is None or (is_member and not has_members) or is_sibling:
            found.append(child)
        else:
            found += _blocks(child)
    return found


def _repeated(module: nn.Module) -> list[nn.Module]:
    """The children with parts of their own that have a sibling of the same type."""
    parts = [child for child in module.children() if not isinstance(child, _CONTAINERS) and next(child.children(), None)]
    types = Counter(map(type, parts))
    return [part for part in parts if types[type(part)] > 1]


def _has_blocks(module: nn.Module) -> bool:
    """Whether it is a stage of several blocks: in a list, or as siblings that have such siblings inside, as in RegNet."""
    lists = (child for child in module.children() if isinstance(child, _CONTAINERS))
    in_list = any(sum(next(inner.children(), None) is not None for inner in each.children()) > 1 for each in lists)
    return in_list or any(map(_repeated, _repeated(module)))


def _visit(seen: Probe, part: nn.Module, number: int | None, place: Location, rows: Inputs) -> Visit:
    visits = seen.of(part)
    if not 0 <= (number or 0) < len(visits) or (number is None and len(visits) > 1):
        raise OptionError(
            f"the submodule {place!r} runs {len(visits)} times" if visits else f"the submodule {place!r} never runs",
            expected="a submodule that runs once for every input, or the number of a call",
            fix=f"name one of its calls, '{call_of(str(place))[0]}#1' to '#{len(visits)}'"
            if visits
            else "name a member of the list, e.g. 'blocks.3'",
        )
    visit = visits[number or 0]
    shape = visit.shape
    if shape is None or len(shape) < 2 or shape[0] != count_rows(rows):
        returned = f"a {type(visit.output).__name__}" if shape is None else f"shape {shape} for {count_rows(rows)} inputs"
        raise ShapeError(
            f"the submodule {place!r} returns {returned}",
            expected="a tensor with the batch as its first dimension",
            fix="name a submodule that returns one",
        )
    return visit
