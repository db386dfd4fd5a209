"""Runs: folders of trained networks with their logits, identified by their `config.json`.

A run is a bundle as `results/publish.py` writes it: settings, metrics on all rows, logits of some rows, and possibly
weights. Its checksums are verified before anything is read. For the small scales, a run can also be made of logits in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from anytime.arrays import open_npz
from anytime.artifacts import open_bundle
from anytime.calibrate.measure import measure
from anytime.checks import check_labels, check_logits
from anytime.combine import Latest
from anytime.data.split import Split as RowSplit
from anytime.data.split import hold_out
from anytime.errors import FormatError, MissingFileError, MissingRunError, OptionError, ShapeError
from anytime.evaluation import evaluate, open_logits
from anytime.metrics import RuleMetrics
from anytime.models import measure_cost
from anytime.models.base import MultiExit
from anytime.models.published import CONFIG_EXPECTED, PUBLISH_AGAIN, WEIGHTS, load_published, published_network, read_config
from anytime.reading import parsing, read_json
from anytime.reproduce.needs import Need

Split = Literal["test", "val"]
_OUTSIDE, _EPOCHS = "oos-sample.npz", "epochs.json"
Logits = tuple[Tensor, Tensor]
"""`(exits, rows, classes)` in float32, and labels."""

_IMAGE = (3, 32, 32)


@dataclass(frozen=True, eq=False)
class Run:
    """One trained network and its logits.

    Attributes:
        name: Of its folder.
        network: `msdnet`, `imta`, `ztw`, …: see `network_of`.
        data: The data set: see `data_of`.
        seed: Of the training.
        folder: Its folder, or None for a run in memory.
        model: The network's name in the zoo, or None.
        stored: Logits and labels of each split, for a run in memory.
        outside: Logits of inputs that belong to no class, for a run in memory.
        costs: MACs up to each exit, for a run in memory.
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
        """The files of the bundle, with verified checksums."""
        assert self.folder is not None
        return open_bundle(self.folder)

    def logits(self, split: Split = "test") -> Logits:
        """The logits that were kept, and their labels."""
        if self.folder is None:
            return self.stored[split]
        source = open_logits(self._file(f"{split}-sample.npz"))
        logits = check_logits(source.logits[:], name=f"the {split} logits of run {self.name}")
        if source.labels is None:
            raise self.lacks(f"labels in {split}-sample.npz")
        return logits, check_labels(source.labels, batch=logits.shape[1], classes=logits.shape[2])

    def outside_logits(self) -> Tensor | None:
        """The kept logits of inputs that belong to no class; None if there are none."""
        if self.folder is None or _OUTSIDE not in self.files:
            return self.outside
        return check_logits(open_logits(self._file(_OUTSIDE)).logits[:], name=f"the out-of-scope logits of run {self.name}")

    def indices(self, split: Split = "test") -> Tensor:
        """Which rows of the data set the kept logits belong to."""
        name = f"{split}-sample.npz"
        rows = self.logits(split)[0].shape[1]  # raises if the file cannot be read
        found = open_npz(self._file(name), ("indices",)).get("indices")
        if found is None or found.shape != (rows,) or found.dtype.kind not in "iu":
            raise self.lacks(f"index per row in {name}")
        return torch.from_numpy(found[...].astype("int64"))

    def metrics(self, rules: Sequence[str] | None = None, split: Split = "test") -> dict[str, RuleMetrics]:
        """The metrics of some rules on all rows, or of all that were measured; needs more than one exit."""
        found, where = self._document(split)["rules"], f"{split}-metrics.json"
        for rule in rules or ():
            if rule not in found:
                raise self.lacks(f"{rule} in {where}")
        try:
            return {rule: RuleMetrics.from_json(found[rule]) for rule in rules or found}
        except OptionError as error:
            raise self.lacks(f"complete metrics in {where} ({error.got})") from error

    def accuracy(self, split: Split = "test") -> tuple[float, ...]:
        """The accuracy of `latest` per exit, also of a network with a single exit."""
        rules = self._document(split)["rules"]
        try:
            return tuple(float(value) for value in rules["latest"]["accuracy"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self.lacks(f"accuracy of latest in {split}-metrics.json") from error

    def rows(self, split: Split = "test") -> int:
        """Number of rows behind `metrics`."""
        return int(self._document(split)["samples"])

    def classes(self, split: Split = "test") -> int:
        """Number of classes."""
        return int(self._document(split)["classes"])

    def exits(self, split: Split = "test") -> int:
        """Number of exits."""
        return int(self._document(split)["exits"])

    def epochs(self, split: Split = "test") -> dict[int, dict[str, dict[str, Any]]]:
        """Some metrics after some epochs of the training, by epoch and rule; empty if none were measured."""
        if self.folder is None or _EPOCHS not in self.files:
            return {}
        path, expected = self.files[_EPOCHS], "metrics by split, epoch and rule"
        document = read_json(path, expected=expected, fix="publish the run again")
        with parsing(path, expected=expected, fix="publish the run again", kind=FormatError):
            return {int(epoch): dict(rules) for epoch, rules in document[split].items()}

    def macs(self) -> tuple[float, ...]:
        """MACs up to each exit."""
        if self.costs is not None:
            return self.costs
        network = self._network()  # stored costs may have any unit
        return tuple(float(cost) for cost in measure_cost(network, torch.zeros(1, *_IMAGE)).macs)

    def split(self, rows: int) -> RowSplit:
        """Which of the `rows` training rows of its data set it was trained on, and which were held out."""
        if self.folder is None:
            raise self.lacks("config.json")
        config = read_config(self.folder)
        with _reading_settings(self.folder):
            return hold_out(rows, config["held_out"], seed=config["split_seed"])

    @property
    def has_weights(self) -> bool:
        """Whether `load` can give the network."""
        return self.folder is not None and any(name.startswith(WEIGHTS) for name in self.files)

    def load(self) -> MultiExit:
        """The network, in eval mode."""
        if self.folder is None or not self.has_weights:
            raise self.lacks(f"{WEIGHTS}*.safetensors")
        return load_published(self.folder)

    def _network(self) -> MultiExit:
        if self.model is None:
            raise self.lacks("model for CIFAR in config.json")
        return published_network({"model": self.model, "data": self.data}, self.folder or Path(self.name))

    def _document(self, split: Split) -> Mapping[str, Any]:
        if self.folder is None:
            return self._measured[split]
        path = self._file(f"{split}-metrics.json")
        document = read_json(path, expected="a document of `anytime evaluate --json`", fix="publish the run again")
        if _is_evaluation(document):
            return document  # type: ignore[no-any-return]
        raise self.lacks(f"document of `anytime evaluate --json` in {split}-metrics.json")

    @cached_property
    def _measured(self) -> dict[str, Mapping[str, Any]]:
        return {
            split: document_of_one(logits, labels) if len(logits) == 1 else evaluate(logits, labels, costs=self.costs).to_json()
            for split, (logits, labels) in self.stored.items()
        }

    def _file(self, name: str) -> Path:
        if self.folder is None or name not in self.files:
            raise self.lacks(name)
        return self.files[name]

    def lacks(self, what: str) -> FormatError:
        """The error for a part of the run that is missing."""
        return FormatError(
            f"run {self.name} has no {what}",
            expected="a bundle as results/publish.py writes it",
            fix="publish the run again: python results/publish.py RUN FOLDER/NAME",
            path=self.folder or self.name,
        )


@dataclass(frozen=True, eq=False)
class Runs:
    """The available runs.

    Attributes:
        every: All of them.
        where: Where they were looked for.
        stand_in: Makes runs of a small network if some are missing; None to raise an error instead.
    """

    every: tuple[Run, ...] = ()
    where: str = "memory"
    stand_in: Callable[[Need], Sequence[Run]] | None = None
    _made: dict[Need, tuple[Run, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Runs:
        """The run in a folder, or all runs in its subfolders; subfolders without `config.json` are ignored."""
        place = Path(folder)
        if not place.is_dir():
            raise MissingFileError(
                f"there is no folder {place}",
                expected="a folder with runs, such as results/ of the repository",
                fix="pass --runs FOLDER, or a smaller --scale, which needs no runs",
                path=place,
            )
        found = sorted([*place.glob("config.json"), *place.glob("*/config.json")])
        return cls(tuple(read_run(path.parent) for path in found), str(place))

    def find(self, network: str, data: str) -> tuple[Run, ...]:
        """The runs of a network on a data set, by seed; empty if there are none."""
        found = (run for run in self.every if (run.network, run.data) == (network, data))
        return tuple(sorted(found, key=lambda run: run.seed))

    def need(self, need: Need) -> tuple[Run, ...]:
        """The runs of a need, or stand-ins, or an error with the command that trains them."""
        found = tuple(
            run for data in need.data for run in self.find(need.first or need.network, data) or self.find(need.network, data)
        )
        if len(found) >= need.seeds:
            return found
        if self.stand_in is None:
            raise need.missing(self.where, len(found))
        if need not in self._made:
            self._made[need] = tuple(self.stand_in(need))
        return self._made[need]

    def by_data(self, need: Need, *, optional: bool = False) -> dict[str, tuple[Run, ...]]:
        """The runs of a need by data set; of an optional need perhaps none."""
        try:
            runs = self.need(need)
        except MissingRunError:
            if not optional:
                raise
            return {}
        return {data: tuple(run for run in runs if run.data == data) for data in dict.fromkeys(run.data for run in runs)}

    def with_stand_in(self, make: Callable[[Need], Sequence[Run]]) -> Runs:
        """The same runs, with stand-ins for missing ones."""
        return replace(self, stand_in=make, _made={})


def on_shared_rows(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same runs with only the test rows that all of them kept; runs in memory have the same rows."""
    if any(run.folder is None for run in runs):
        return runs
    kept = [run.indices().tolist() for run in runs]
    shared = sorted(set(kept[0]).intersection(*kept[1:]))
    if not shared:
        raise FormatError(
            f"no test row was kept by all of {', '.join(run.name for run in runs)}",
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
    """Raise unless all runs have the same sizes, such as exits, so that their numbers can be averaged."""
    if len({tuple(size.items()) for size in sizes.values()}) > 1:
        words = (f"{name} has {', '.join(f'{n:,} {what}' for what, n in size.items())}" for name, size in sizes.items())
        raise ShapeError(
            "; ".join(words),
            expected="runs that differ only in their seed or training",
            fix="pass --runs a folder without the runs of another network or data set",
        )


def document_of_one(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """The metrics of a network with a single exit, under their names in `anytime evaluate --json`."""
    found = measure(Latest(), logits, labels, drops=())
    size = dict(zip(("exits", "samples", "classes"), logits.shape, strict=True))
    return {**size, "rules": {"latest": {name: [value] for name, value in found.items()}}}


def network_of(config: Mapping[str, Any]) -> str:
    """The network of a run from its settings: the architecture, or the training method where that makes the difference.

    >>> network_of({"model": "msdnet-cifar", "recipe": {"objective": "joint-then-product"}})
    'msdnet-finetuned'
    >>> network_of({"model": "msdnet-cifar", "recipe": {"objective": "product", "frozen": ["blocks"]}})
    'msdnet-heads'
    >>> network_of({"model": "minilm-l6", "options": {"layers": [6]}, "recipe": {"objective": "joint"}})
    'minilm-single'
    >>> network_of({"model": "msdnet-cifar", "recipe": {"objective": "joint", "schedule": "step"}})  # its published schedule
    'msdnet-published'
    """
    model, objective = str(config["model"]), str(config["recipe"]["objective"])
    kind = model.partition("-")[0]
    if (kind, objective, config["recipe"].get("schedule")) == ("msdnet", "joint", "step"):
        return "msdnet-published"
    if len((config.get("options") or {}).get("layers", ())) == 1:
        return f"{kind}-single"
    methods = {"one-for-all": "imta", "equilibrium": "imta-stage1", "l2w": "l2w"}
    methods |= {"joint-then-product": f"{kind}-finetuned"}
    methods |= {"product": f"{kind}-heads" if config["recipe"].get("frozen") else f"{kind}-product"}
    return methods.get(objective, kind)


def data_of(config: Mapping[str, Any]) -> str:
    """The data set of a run from its settings, with the number of classes if only some were used.

    >>> data_of({"data": "clinc150", "classes": None}), data_of({"data": "clinc150", "classes": 20})
    ('clinc150', 'clinc150-20')
    """
    data, classes = str(config["data"]), config.get("classes")
    return data if classes is None else f"{data}-{int(classes)}"


def read_run(folder: str | Path) -> Run:
    """A run that `results/publish.py` wrote."""
    folder = Path(folder).resolve()
    config = read_config(folder)
    with _reading_settings(folder):
        return Run(folder.name, network_of(config), data_of(config), config["recipe"]["seed"], folder, config["model"])


def _reading_settings(folder: Path) -> AbstractContextManager[None]:
    what = "cannot be read as the settings of a run"
    return parsing(folder / "config.json", expected=CONFIG_EXPECTED, fix=PUBLISH_AGAIN, kind=FormatError, what=what)


def _is_evaluation(document: object) -> bool:
    """Whether a document has the parts of `anytime evaluate --json` that studies read."""
    if not isinstance(document, dict):
        return False
    rules, sizes = document.get("rules"), [document.get(name) for name in ("samples", "classes", "exits")]
    return (
        all(type(size) is int and size > 0 for size in sizes)
        and isinstance(rules, dict)
        and all(isinstance(found, dict) for found in rules.values())
    )
