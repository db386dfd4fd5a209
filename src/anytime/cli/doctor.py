"""`anytime doctor`: installed versions, this machine's hardware, and how to install what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING

from anytime.cli.options import Flag
from anytime.installed import NAME, Health, MachineReport, examine
from anytime.safe_text import print_safely as print
from anytime.safe_text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def doctor(*, json: Flag = False) -> int:
    """Show versions, devices, threads and extras, and how to install what is missing.

    Args:
        json: Print one JSON document instead of a table.

    Returns:
        0, or 1 if a core package is missing or too old.
    """
    health = examine()
    if json:
        print(to_json(health))
    else:
        from anytime.cli.console import make_console

        make_console().print(render(health))
    return 0 if health.healthy else 1


def to_json(health: Health) -> str:
    """The JSON document."""
    document = {
        "healthy": health.healthy,
        "packages": [{**asdict(package), "state": package.state} for package in (health.python, *health.packages)],
        "extras": [{**asdict(extra), "lacking": extra.lacking, "command": extra.command} for extra in health.extras],
        "machine": asdict(health.machine),
        "notes": health.notes,
    }
    return dumps(document, indent=1)


def render(health: Health) -> RenderableType:
    """The table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for rows in (_package_rows(health), _extra_rows(health), _machine_rows(health.machine)):
        for mark, style, name, value in rows:
            table.add_row(Text(mark, style), Text(printable(name)), Text(printable(value)))
        table.add_section()
    for note in health.notes:
        table.add_row(Text("note", "yellow"), "", Text(printable(note)))
    return table


Row = tuple[str, str, str, str]


def _package_rows(health: Health) -> Iterable[Row]:
    for package in (health.python, *health.packages):
        ok = package.state == "ok"
        wanted = "" if ok else f" ({package.minimum} or later is required)" if package.minimum else " (required)"
        yield package.state, "green" if ok else "red", package.name, f"{package.version or 'not found'}{wanted}"


def _extra_rows(health: Health) -> Iterable[Row]:
    for extra in health.extras:
        name = f"{NAME}[{extra.name}]"
        if extra.lacking:
            yield "missing", "yellow", name, f"optional: {', '.join(extra.lacking)}; {extra.command}"
        else:
            yield "ok", "green", name, "optional"


def _machine_rows(machine: MachineReport) -> Iterable[Row]:
    yield "", "", "system", machine.system
    yield "", "", "cores", f"{machine.usable_cores} usable of {machine.cores}"
    if machine.threads is not None:
        yield "", "", "torch threads", f"{machine.threads} within an operation, {machine.interop_threads} between"
    for device in machine.devices:
        memory = "" if device.memory is None else f", {device.memory / 2**30:.1f} GiB"
        yield "", "", device.kind, f"{device.name}{memory}"
