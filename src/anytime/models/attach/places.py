"""The places where exits are attached: names of submodules, or fractions of the MACs."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from anytime.checks import Inputs, count_rows
from anytime.errors import OptionError, ShapeError
from anytime.models.attach.probe import Probe, Visit, probe

Location = str | float
"""The name of a submodule, or a fraction of the MACs above 0 and below 1."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def visit_places(module: nn.Module, at: Sequence[Location], rows: Inputs) -> tuple[Probe, list[Visit]]:
    """Run a module, and return the calls of the submodules at the places, in the order in which they finish."""
    if not isinstance(at, Sequence) or isinstance(at, str):
        raise OptionError(f"at is {at!r}", expected="a list of names or fractions", fix=f"pass at=[{at!r}]")
    first = None if all(isinstance(place, str) for place in at) else probe(module, rows)
    parts = [_by_name(module, place) if isinstance(place, str) else _by_fraction(module, first, place) for place in at]
    seen = probe(module, rows, keep=tuple(parts))
    visits = [_only_visit(seen, part, place, rows) for part, place in zip(parts, at, strict=True)]
    for index, part in enumerate(parts):
        if any(part is other for other in parts[:index]):
            raise OptionError(
                f"{at[index]!r} selects the same place as another exit",
                expected="each exit at its own place",
                fix="remove one of them, or name the places",
            )
    return seen, [visit for visit in seen.visits if any(visit is wanted for wanted in visits)]


def _by_name(module: nn.Module, name: str) -> nn.Module:
    known: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if name and name in known:
        return known[name]
    names = [other for other in known if other]
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    raise OptionError(
        f"there is no submodule {name!r}",
        expected=f"one of {', '.join(names[:8])}{' …' if len(names) > 8 else ''}",
        fix=f"did you mean {' or '.join(map(repr, close))}?" if close else "list the names with module.named_modules()",
    )


def _by_fraction(module: nn.Module, seen: Probe | None, fraction: Any) -> nn.Module:
    """The block whose end is nearest to a fraction of the MACs; the last of several that end at the same fraction."""
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        raise OptionError(
            f"an exit is at {fraction!r}",
            expected="the name of a submodule, or a fraction of the MACs above 0 and below 1",
            fix="remove it: the module's own output is always the last exit",
        )
    assert seen is not None
    blocks, rows = _blocks(module), seen.output.shape[0]
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
            f"no block of the module ends between its start and its end, for the fraction {fraction}",
            expected="at least two blocks of layers whose MACs torch can count",
            fix="name the places instead of passing fractions",
        )
    nearest = min(abs(visit.flops / seen.flops - fraction) for visit in ends)
    return [visit.module for visit in ends if abs(visit.flops / seen.flops - fraction) == nearest][-1]


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of lists and sequences, outermost first, and single layers: their features are complete, not within a sum."""
    found: list[nn.Module] = []
    for child in module.children():
        is_member = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        has_members = any(isinstance(inner, nn.ModuleList) for inner in child.children())
        if next(child.children(), None) is None or (is_member and not has_members):
            found.append(child)
        else:
            found += _blocks(child)
    return found


def _only_visit(seen: Probe, part: nn.Module, place: Location, rows: Inputs) -> Visit:
    visits = seen.of(part)
    if len(visits) != 1:
        raise OptionError(
            f"the submodule {place!r} runs {len(visits)} times" if visits else f"the submodule {place!r} never runs",
            expected="a submodule that runs once for every input",
            fix="name a submodule inside or around it" if visits else "name a member of the list, e.g. 'blocks.3'",
        )
    shape = visits[0].shape
    if shape is None or len(shape) < 2 or shape[0] != count_rows(rows):
        returned = f"a {type(visits[0].output).__name__}" if shape is None else f"shape {shape} for {count_rows(rows)} inputs"
        raise ShapeError(
            f"the submodule {place!r} returns {returned}",
            expected="a tensor with the batch as its first dimension",
            fix="name a submodule that returns one",
        )
    return visits[0]
