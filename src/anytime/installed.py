"""Installed versions and this machine's hardware, for `anytime doctor` and the `environment.json` of a run folder.

Requirements and extras come from the installed distribution, or from pyproject.toml in a source tree.
"""

from __future__ import annotations

import os
import platform
import re
import tomllib
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

NAME = "anytime-nn"
_PACKAGE = "anytime"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(\[(?P<extras>[^]]*)])?\s*\(?(?P<versions>[^;)]*)\)?\s*(;\s*(?P<marker>.*))?")
_MINIMUM = re.compile(r"(?:>=|==|~=)\s*([\w.]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")


@dataclass(frozen=True)
class Package:
    """A required package, its installed version (None if missing) and the lowest that is supported."""

    name: str
    version: str | None
    minimum: str | None = None

    @property
    def state(self) -> Literal["ok", "missing", "too old"]:
        """Whether it is installed and recent enough."""
        if self.version is None:
            return "missing"
        return "too old" if self.minimum and _release(self.version) < _release(self.minimum) else "ok"


@dataclass(frozen=True)
class Extra:
    """An optional part of the library and the packages it needs."""

    name: str
    packages: tuple[Package, ...]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Names of the packages that are missing or too old."""
        return tuple(package.name for package in self.packages if package.state != "ok")

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"pip install '{NAME}[{self.name}]'"


@dataclass(frozen=True)
class Device:
    """A CPU or GPU; memory in bytes, if known."""

    kind: Literal["cpu", "cuda", "mps"]
    name: str
    memory: int | None


@dataclass(frozen=True)
class MachineReport:
    """The hardware: `cores` of the machine, and `usable_cores` of this process."""

    system: str
    processor: str
    cores: int
    usable_cores: int
    memory: int | None
    threads: int | None
    interop_threads: int | None
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Health:
    """Everything that `anytime doctor` reports."""

    python: Package
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    machine: MachineReport
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether Python and every core package are recent enough; extras may be missing."""
        return all(package.state == "ok" for package in (self.python, *self.packages))


def examine() -> Health:
    """Inspect this installation and this machine, without network access."""
    version, python, needs, names = _declared()
    machine, notes = _machine()
    if _version(NAME) is None:
        notes.append(f"{NAME} is not installed as a package; this runs from a source tree. To install it: pip install -e .")
    notes += _strangers()
    return Health(
        python=Package("python", platform.python_version(), _minimum(python or "")),
        packages=(Package(NAME, version), *_packages(needs, None)),
        extras=tuple(Extra(name, _packages(needs, name)) for name in names),
        machine=machine,
        notes=tuple(notes),
    )


def _declared() -> tuple[str | None, str, list[str], list[str]]:
    """Version, lowest Python, requirements and extras of the distribution, or of the source tree."""
    try:
        found = metadata.distribution(NAME)
        extras = found.metadata.get_all("Provides-Extra") or []
        return found.version, found.metadata["Requires-Python"] or "", found.requires or [], extras
    except metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        if project["name"] != NAME:
            return None, "", [], []
        extras = project["optional-dependencies"]
        needs = [f"{need}; extra == '{name}'" for name, listed in extras.items() for need in listed]
        return project["version"], project["requires-python"], project["dependencies"] + needs, list(extras)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, "", [], []


def _strangers() -> list[str]:
    """A note on each other distribution that installs a package of the same name."""
    others = {name for name in metadata.packages_distributions().get(_PACKAGE, []) if _plain(name) != NAME}
    return [
        f"the distribution {name!r}, another project, also installs a package {_PACKAGE}. To remove it: pip uninstall {name}; "
        f"then install {NAME} again"
        for name in sorted(others)
    ]


def _plain(name: str) -> str:
    """The normalised name of a distribution.

    >>> _plain("Anytime_NN")
    'anytime-nn'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def environment() -> dict[str, Any]:
    """The `environment.json` of a run: versions and hardware, without paths or names of users and hosts."""
    health = examine()
    found = {package.name: package.version for extra in health.extras for package in extra.packages if package.version}
    found |= {package.name: package.version for package in health.packages if package.version}
    return {"python": health.python.version, "packages": dict(sorted(found.items())), "machine": asdict(health.machine)}


def _machine() -> tuple[MachineReport, list[str]]:
    threads, interop_threads, devices, notes = _torch()
    memory = _memory()
    machine = MachineReport(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        usable_cores=count_cores(),
        memory=memory,
        threads=threads,
        interop_threads=interop_threads,
        devices=(Device("cpu", processor_name(), memory), *devices),
    )
    return machine, notes


def _torch() -> tuple[int | None, int | None, list[Device], list[str]]:
    """Threads, GPUs, and notes about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch

            threads, interop_threads = torch.get_num_threads(), torch.get_num_interop_threads()
            properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            devices = [Device("cuda", each.name, each.total_memory) for each in properties]
            if torch.backends.mps.is_available():
                devices.append(Device("mps", "Apple GPU", None))
            plain = torch.version.cuda is None and torch.version.hip is None
        except Exception as error:  # a broken installation fails in many ways
            return None, None, [], [f"torch cannot be used: {type(error).__name__}: {error}"]
    notes = [f"torch warns: {warning.message}" for warning in caught]
    if plain and _version("torchvision"):
        notes.append(
            "torchvision is installed with a CPU build of torch: it may fail to import, and its presence alone can break "
            "torchmetrics; if so, pip uninstall torchvision"
        )
    return threads, interop_threads, devices, notes


def count_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """The name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _packages(needs: Iterable[str], extra: str | None) -> tuple[Package, ...]:
    """The requirements of the core (None) or of an extra, without those for other systems or Python versions."""
    found: list[Package] = []
    for need in needs:
        parts = _REQUIREMENT.match(need)
        marker = (parts["marker"] or "") if parts else ""
        if parts is None or _EXTRA.findall(marker) != ([] if extra is None else [extra]) or _EXTRA.sub("", marker).strip("() "):
            continue
        if _plain(parts["name"]) == NAME:  # an extra of extras: anytime-nn[images,text]
            for other in re.findall(r"[\w.-]+", parts["extras"] or ""):
                found += _packages(needs, other)
        else:
            found.append(Package(parts["name"], _version(parts["name"]), _minimum(parts["versions"])))
    return tuple(dict.fromkeys(found))


def _minimum(versions: str) -> str | None:
    found = _MINIMUM.search(versions)
    return found[1] if found else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without trailing zeros.

    >>> _release("2.13.0+cpu") < _release("2.13.1") < _release("10.0rc1") == _release("10")
    True
    """
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
