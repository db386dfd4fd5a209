"""Runs: folders of trained networks with their logits, found by what their `config.json` says.

A run is a bundle as `results/publish.py` writes it: settings, figures on all rows, logits of some rows, perhaps weights. Its
checksums are compared before anything is read from it. A run can also be made of logits in memory, for the small scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from anytime.artifacts import open_bundle, tensors_from_bytes
from anytime.calibrate.tune import measure
from anytime.checks import check_labels, check_logits
from anytime.combine import Latest
from anytime.errors import FormatError, MissingFileError, MissingRunError
from anytime.evaluation import evaluate, open_logits
from anytime.models import measure_cost
from anytime.models.base import MultiExit
from anytime.models.zoo import create, load_weights
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
        logits = check_logits(source.logits[:])
        if source.labels is None:
            raise self._lacks(f"labels in {split}-sample.npz")
        return logits, check_labels(source.labels, batch=logits.shape[1], classes=logits.shape[2])

    def outside_logits(self) -> Tensor | None:
        """The logits that were kept of inputs that belong to no class; None where there are none."""
        if self.folder is None:
            return self.outside
        name = f"{_OUTSIDE}-sample.npz"
        return check_logits(open_logits(self._file(name)).logits[:]) if name in self.files else None

    def indices(self, split: Split = "test") -> Tensor:
        """Which rows of the data set the kept logits belong to."""
        import numpy as np

        with np.load(self._file(f"{split}-sample.npz"), allow_pickle=False) as stored:
            return torch.from_numpy(stored["indices"].astype(np.int64))

    def figures(self, split: Split = "test") -> Mapping[str, Mapping[str, Any]]:
        """The figures of `latest`, `caching`, `product`, and what else was measured, on all rows.

        They have their names in `anytime evaluate --json`; a network with a single exit has a few under `latest` alone.
        """
        return self._document(split)["rules"]  # type: ignore[no-any-return]

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
                weights |= {key: _whole(part) for key, part in tensors_from_bytes(path.read_bytes(), path=path).items()}
        if not weights:
            raise self._lacks(f"{_WEIGHTS}*.safetensors")
        network = self._network()
        load_weights(network, weights)
        return network.eval()

    def _network(self) -> MultiExit:
        if self.model is None or self.data not in _CLASSES:
            raise self._lacks("a model for CIFAR in config.json")
        return create(self.model, classes=_CLASSES[self.data])

    def _document(self, split: Split) -> Mapping[str, Any]:
        if self.folder is None:
            return self._measured[split]
        path = self._file(f"{split}-metrics.json")
        try:
            document = json.loads(path.read_text())
            if {"rules", "samples", "classes"} <= document.keys():
                return document  # type: ignore[no-any-return]
        except (ValueError, AttributeError):
            pass
        raise self._lacks(f"a document of `anytime evaluate --json` in {split}-metrics.json")

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
        """All runs in the folders of a folder; a folder without `config.json` is none."""
        place = Path(folder)
        if not place.is_dir():
            raise MissingFileError(
                f"there is no folder {place}",
                expected="a folder with runs, such as results/ of the repository",
                fix="give --runs FOLDER, or a smaller --scale, which needs none",
                path=place,
            )
        return cls(tuple(read_run(path.parent) for path in sorted(place.glob("*/config.json"))), str(place))

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
    return tuple(found)


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
    """
    model, objective = str(config["model"]), str(config["recipe"]["objective"])
    kind = model.partition("-")[0]
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
    try:
        config = json.loads(path.read_text())
        seed = int(config["recipe"]["seed"])
        return Run(folder.name, network_of(config), data_of(config), seed, folder, str(config["model"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path} cannot be read as the settings of a run ({type(error).__name__}: {error})",
            expected="JSON with `data`, `model` and a `recipe` with `objective` and `seed`",
            fix="publish the run again, or take its folder away",
            path=path,
        ) from None


def _whole(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
