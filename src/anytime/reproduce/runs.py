"""Runs: folders of trained networks with their logits, found by what their `config.json` says.

A run is a bundle as `results/publish.py` writes it: settings, figures on all rows, logits of some rows, perhaps weights. Its
checksums are compared before anything is read from it. A run can also be made of logits in memory, for the small scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from anytime.arrays import open_npz
from anytime.artifacts import open_bundle, tensors_from_bytes
from anytime.calibrate.measure import measure
from anytime.checks import check_labels, check_logits
from anytime.combine import Latest
from anytime.errors import FormatError, MissingFileError, MissingRunError, ShapeError
from anytime.evaluation import evaluate, open_logits
from anytime.models import measure_cost
from anytime.models.base import MultiExit
from anytime.models.zoo import create, load_weights
from anytime.reading import parsing, read_file, read_json
from anytime.reproduce.needs import Need

Split = Literal["test", "val"]
_OUTSIDE = "oos"
_WEIGHTS = "weights-"
Logits = tuple[Tensor, Tensor]
"""`(exits, rows, classes)` in float32, and labels."""

_IMAGE = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
_CLASSES = {"cifar10": 10, "cifar100": 100}


@dataclass(frozen=True, eq=False)
class Run:
    """One trained network and what it said.

    Attributes:
        name: Of its folder.
        network: `msdnet`, `imta`, `ztw`, …: see `network_of`.
        data: The data set: see `data_of`.
        seed: Of the training.
        folder: Where it lies, or None for one in memory.
        model: The network's name in the zoo, or None.
        stored: Logits and labels of each split, for one in memory.
        outside: Logits of inputs that belong to no class, for one in memory.
        costs: Multiply-accumulates up to each exit, for one in memory.
    """

    name: str
    network: str
    data: str
    seed: int
    folder: Path | None = None
    model: str | None = None
    stored: Mapping[str, Logits] = field(default_factory=dict)
    outside: Tensor | None = None
    costs: tuple[float, ...] | None = None

    @cached_property
    def files(self) -> dict[str, Path]:
        """Where the files of the bundle lie, each compared with its checksum."""
        assert self.folder is not None
        return open_bundle(self.folder)

    def logits(self, split: Split = "test") -> Logits:
        """The logits that were kept, and their labels."""
        if self.folder is None:
            return self.stored[split]
        source = open_logits(self._file(f"{split}-sample.npz"))
        logits = check_logits(source.logits[:], name=f"the {split} logits of run {self.name}")
        if source.labels is None:
            raise self._lacks(f"labels in {split}-sample.npz")
        return logits, check_labels(source.labels, batch=logits.shape[1], classes=logits.shape[2])

    def outside_logits(self) -> Tensor | None:
        """The logits that were kept of inputs that belong to no class; None where there are none."""
        if self.folder is None:
            return self.outside
        name = f"{_OUTSIDE}-sample.npz"
        if name not in self.files:
            return None
        return check_logits(open_logits(self._file(name)).logits[:], name=f"the {_OUTSIDE} logits of run {self.name}")

    def indices(self, split: Split = "test") -> Tensor:
        """Which rows of the data set the kept logits belong to."""
        name = f"{split}-sample.npz"
        rows = self.logits(split)[0].shape[1]  # refuses a file that cannot be read
        found = open_npz(self._file(name), ("indices",)).get("indices")
        if found is None or found.shape != (rows,) or found.dtype.kind not in "iu":
            raise self._lacks(f"index for each row in {name}")
        return torch.from_numpy(found[...].astype("int64"))

    def figures(self, split: Split = "test") -> Mapping[str, Mapping[str, Any]]:
        """The figures of `latest`, `caching`, `product`, and what else was measured, on all rows.

        They have their names in `anytime evaluate --json`; a network with a single exit has a few under `latest` alone. To ask
        for a rule or figure that was not measured is an error that names the run.
        """
        where = f"{split}-metrics.json"
        rules = self._document(split)["rules"]
        return _Figures({rule: _Figures(found, self, f"{where} for {rule}") for rule, found in rules.items()}, self, where)

    def rows(self, split: Split = "test") -> int:
        """How many rows `figures` is of."""
        return int(self._document(split)["samples"])

    def classes(self, split: Split = "test") -> int:
        """How many classes `figures` is of."""
        return int(self._document(split)["classes"])

    def macs(self) -> tuple[float, ...]:
        """Multiply-accumulates up to each exit."""
        if self.costs is not None:
            return self.costs
        network = self._network()  # stored costs may be in any unit
        return tuple(float(cost) for cost in measure_cost(network, torch.zeros(1, *_IMAGE[self.data])).macs)

    @property
    def has_weights(self) -> bool:
        """Whether the network itself can be had."""
        return self.folder is not None and any(name.startswith(_WEIGHTS) for name in self.files)

    def load(self) -> MultiExit:
        """The network, in eval mode."""
        weights: dict[str, Tensor] = {}
        for name, path in self.files.items():
            if name.startswith(_WEIGHTS):
                weights |= {key: _whole(part) for key, part in tensors_from_bytes(read_file(path), path=path).items()}
        if not weights:
            raise self._lacks(f"{_WEIGHTS}*.safetensors")
        network = self._network()
        load_weights(network, weights)
        return network.eval()

    def _network(self) -> MultiExit:
        if self.model is None or self.data not in _CLASSES:
            raise self._lacks("model for CIFAR in config.json")
        return create(self.model, classes=_CLASSES[self.data])

    def _document(self, split: Split) -> Mapping[str, Any]:
        if self.folder is None:
            return self._measured[split]
        path = self._file(f"{split}-metrics.json")
        document = read_json(path, expected="a document of `anytime evaluate --json`", fix="publish the run again")
        if _is_evaluation(document):
            return document  # type: ignore[no-any-return]
        raise self._lacks(f"document of `anytime evaluate --json` in {split}-metrics.json")

    @cached_property
    def _measured(self) -> dict[str, Mapping[str, Any]]:
        return {
            split: document_of_one(logits, labels) if len(logits) == 1 else evaluate(logits, labels, costs=self.costs).to_json()
            for split, (logits, labels) in self.stored.items()
        }

    def _file(self, name: str) -> Path:
        if self.folder is None or name not in self.files:
            raise self._lacks(name)
        return self.files[name]

    def _lacks(self, what: str) -> FormatError:
        return FormatError(
            f"run {self.name} has no {what}",
            expected="a bundle as results/publish.py writes it",
            fix="publish the run again",
            path=self.folder or self.name,
        )


class _Figures(dict[str, Any]):
    """What was measured, by name; what was not is missed with the name of the run and the file."""

    def __init__(self, found: Mapping[str, Any], run: Run, where: str) -> None:
        super().__init__({name: value for name, value in found.items() if value is not None})
        self._run, self._where = run, where

    def __missing__(self, name: str) -> NoReturn:
        raise self._run._lacks(f"{name} in {self._where}")


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs at hand.

    Attributes:
        every: Found or made.
        where: Where they were looked for, in words.
        stand_in: Makes a run of a small network where one is missing; None where that is not wanted.
    """

    every: tuple[Run, ...] = ()
    where: str = "memory"
    stand_in: Callable[[Need], Sequence[Run]] | None = None
    _made: dict[Need, tuple[Run, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Runs:
        """All runs in the folders of a folder, or the one that it is; a folder without `config.json` is none."""
        place = Path(folder)
        if not place.is_dir():
            raise MissingFileError(
                f"there is no folder {place}",
                expected="a folder with runs, such as results/ of the repository",
                fix="give --runs FOLDER, or a smaller --scale, which needs none",
                path=place,
            )
        found = sorted([*place.glob("config.json"), *place.glob("*/config.json")])
        return cls(tuple(read_run(path.parent) for path in found), str(place))

    def find(self, network: str, data: str) -> tuple[Run, ...]:
        """The runs of a network on a data set, by seed; perhaps none."""
        return tuple(
            sorted((run for run in self.every if (run.network, run.data) == (network, data)), key=lambda run: run.seed)
        )

    def need(self, need: Need) -> tuple[Run, ...]:
        """The runs that are needed: those at hand, or stand-ins, or an error that says how to get them."""
        found = tuple(run for data in need.data for run in self.find(need.network, data))
        if len(found) >= need.seeds:
            return found
        if self.stand_in is not None:
            if need not in self._made:
                self._made[need] = tuple(self.stand_in(need))
            return self._made[need]
        raise need.missing(self.where, len(found))

    def wish(self, need: Need) -> tuple[Run, ...]:
        """As `need`, for runs that a study can do without: none where there are none."""
        try:
            return self.need(need)
        except MissingRunError:
            return ()

    def sets(self, need: Need) -> dict[str, tuple[Run, ...]]:
        """The runs that are needed, by data set."""
        found: dict[str, tuple[Run, ...]] = {}
        for run in self.need(need):
            found[run.data] = (*found.get(run.data, ()), run)
        return found

    def with_stand_in(self, make: Callable[[Need], Sequence[Run]]) -> Runs:
        """The same runs, and stand-ins where one is missing."""
        return replace(self, stand_in=make, _made={})


def on_shared_rows(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same runs with the test rows alone that were kept of all of them; runs in memory have the same rows."""
    if any(run.folder is None for run in runs):
        return runs
    kept = [run.indices().tolist() for run in runs]
    shared = sorted(set(kept[0]).intersection(*kept[1:]))
    if not shared:
        raise FormatError(
            f"no test row was kept of all of {', '.join(run.name for run in runs)}",
            expected="logits of the same rows of the backbone and of the finetuned network",
            fix="publish one of them again with more rows: python results/publish.py RUN FOLDER --rows TEST VAL",
            path=runs[-1].folder or runs[-1].name,
        )
    found = []
    for run, rows in zip(runs, kept, strict=True):
        place = {row: at for at, row in enumerate(rows)}
        places = torch.tensor([place[row] for row in shared])
        logits, labels = run.logits()
        found.append(replace(run, folder=None, stored={"test": (logits[:, places], labels[places])}))
    check_alike({run.name: {"exits": len(run.logits()[0])} for run in found})
    return tuple(found)


def check_alike(sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Refuse to put runs together whose numbers are not of the same kind.

    Args:
        sizes: For each run what must agree, such as its exits.
    """
    if len({tuple(size.items()) for size in sizes.values()}) > 1:
        words = (f"{name} has {', '.join(f'{n:,} {what}' for what, n in size.items())}" for name, size in sizes.items())
        raise ShapeError(
            "; ".join(words),
            expected="runs that differ in their seed or training alone",
            fix="give --runs a folder without those that are of another network or data set",
        )


def document_of_one(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """What can be said of a network with a single exit, under the names that `anytime evaluate --json` has for it."""
    found = measure(Latest(), logits, labels, drops=())
    size = dict(zip(("exits", "samples", "classes"), logits.shape, strict=True))
    return {**size, "rules": {"latest": {name: [value] for name, value in found.items()}}}


def network_of(config: Mapping[str, Any]) -> str:
    """What a run trained, from its settings: the architecture, or the method where that makes the difference.

    >>> network_of({"model": "msdnet-cifar", "recipe": {"objective": "joint-then-product"}})
    'msdnet-finetuned'
    >>> network_of({"model": "minilm-l6", "options": {"layers": [6]}, "recipe": {"objective": "joint"}})
    'minilm-single'
    >>> network_of({"model": "msdnet-cifar", "recipe": {"objective": "joint", "schedule": "step"}})  # its published schedule
    'msdnet-published'
    """
    model, objective = str(config["model"]), str(config["recipe"]["objective"])
    kind = model.partition("-")[0]
    if (kind, objective, config["recipe"].get("schedule")) == ("msdnet", "joint", "step"):
        return "msdnet-published"
    methods = {
        "one-for-all": "imta",
        "equilibrium": "imta-stage1",
        "l2w": "l2w",
        "joint-then-product": f"{kind}-finetuned",
        "product": f"{kind}-finetuned",
    }
    single = len((config.get("options") or {}).get("layers", ())) == 1
    return f"{kind}-single" if single else methods.get(objective, kind)


def data_of(config: Mapping[str, Any]) -> str:
    """What a run learnt from, from its settings: a data set, or some of its classes.

    >>> data_of({"data": "clinc150", "classes": None}), data_of({"data": "clinc150", "classes": 20})
    ('clinc150', 'clinc150-20')
    """
    data, classes = str(config["data"]), config.get("classes")
    return data if classes is None else f"{data}-{int(classes)}"


def is_published(folder: str | Path) -> bool:
    """Whether a folder holds a published run with its network."""
    return any(Path(folder).glob(f"{_WEIGHTS}*.safetensors"))


def read_run(folder: str | Path) -> Run:
    """A published run; its `load` gives the network, where that was kept.

    Args:
        folder: As `results/publish.py` writes it.
    """
    folder = Path(folder).resolve()
    path = folder / "config.json"
    expected, fix = "JSON with data, model and a recipe with objective and seed", "publish the run again, or move its folder"
    config = read_json(path, expected=expected, fix=fix)
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="cannot be read as the settings of a run"):
        seed = int(config["recipe"]["seed"])
        return Run(folder.name, network_of(config), data_of(config), seed, folder, str(config["model"]))


def _is_evaluation(document: object) -> bool:
    """Whether a document has the parts of `anytime evaluate --json` that studies read."""
    if not isinstance(document, dict):
        return False
    rules, sizes = document.get("rules"), (document.get("samples"), document.get("classes"))
    return (
        all(type(size) is int and size > 0 for size in sizes)
        and isinstance(rules, dict)
        and all(isinstance(found, dict) for found in rules.values())
    )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
