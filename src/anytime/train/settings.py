"""All settings of a run: which network, on which data, by which recipe, on which hardware.

In files and on the command line the names are flat: the fields of `RunConfig`, `TrainConfig` and `Hardware`. Later sources
override earlier ones: a shipped recipe, a file, flags. Errors name the source of the setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from anytime.artifacts import write_text
from anytime.checks import LARGEST_OLD_SEED, check_choice, check_count, check_number, check_seed, check_threads
from anytime.data.text import TextName
from anytime.errors import FormatError, OptionError
from anytime.reading import parsing, read_file
from anytime.train.config import Hardware, TrainConfig

DataName = Literal["cifar10", "cifar100", "digits", "imagenet", "tiny-imagenet", TextName]
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# Settings after whose change the expected accuracy still holds.
_NO_EFFECT = {"about", "root", "seed", "minutes", "processes", "workers", "checkpoint_every", "evaluate_every", "expected"}
_LEAST = {"length": 2, "held_out": 0, "checkpoint_every": 1, "evaluate_every": 1}
_LARGEST_FILE, _EXACT_IN_FLOAT64 = 1 << 20, 2**53
_HARDWARE = tuple(part.name for part in fields(Hardware))
_RECIPE = tuple(part.name for part in fields(TrainConfig))


class Source(NamedTuple):
    """Settings, and where they come from, for errors."""

    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """The measured test accuracy of each exit with these settings, and how far below it a run may end."""

    accuracy: tuple[float, ...]
    tolerance: float

    def missed(self, accuracy: Sequence[float]) -> tuple[int, ...]:
        """The exits, counted from 1, that end below.

        >>> Expected((0.6, 0.7), tolerance=0.01).missed((0.595, 0.68))
        (2,)
        """
        pairs = zip(self.accuracy, accuracy, strict=True)
        return tuple(exit for exit, (expected, found) in enumerate(pairs, 1) if found < expected - self.tolerance)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run.

    Attributes:
        data: Name of the data set.
        model: Name of the network, one of `anytime.models.names()`.
        recipe: How it is trained.
        hardware: Where it is trained.
        about: One sentence of description.
        root: Folder with the data. None for digits, and for texts in the folder that `ANYTIME_SHARED` names.
        init: Initial weights: a safetensors file or the folder of a run; for texts also `minilm`, the installed package, or the
            folder of a pretrained encoder. None for a new network.
        options: Fields of the network's config to change.
        length: Most tokens per text; the rest is cut off.
        classes: Number of classes to use of a text data set, a random sample by `split_seed`; None for all.
        held_out: Validation rows, split off the training rows of a data set without a validation split.
        split_seed: Seed of that split.
        checkpoint_every: Epochs between checkpoints.
        evaluate_every: Epochs between validations.
        minutes: Stop, with a checkpoint, after this many minutes.
        processes: Number of processes that train together, each on a part of every batch.
        workers: Threads that decode images, for data that does not fit in memory.
        expected: Test accuracy that was measured with these settings, or published for such a network.
    """

    data: DataName
    model: str
    recipe: TrainConfig
    hardware: Hardware
    about: str = ""
    root: str | None = None
    init: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    length: int = 64
    classes: int | None = None
    held_out: int = 5000
    split_seed: int = 0
    checkpoint_every: int = 5
    evaluate_every: int = 1
    minutes: float | None = None
    processes: int = 1
    workers: int = 4
    expected: Expected | None = None

    def __post_init__(self) -> None:
        check_choice(self.data, "data", get_args(DataName))
        for name in ("model", "about"):
            _check(isinstance(getattr(self, name), str), name, getattr(self, name), "text")
        for name, low in _LEAST.items():
            check_count(getattr(self, name), name, low=low, most=_EXACT_IN_FLOAT64)
        for name in ("processes", "workers"):
            check_threads(getattr(self, name), name=name)
        if self.classes is not None:
            _check(self.texts, "classes", self.classes, f"none with {self.data}: only texts support it")
            check_count(self.classes, "classes")
        if self.minutes is not None:
            check_number(self.minutes, "minutes", above=0)
        _check(not self.texts or self.processes == 1, "processes", self.processes, "1 with texts")
        named = isinstance(self.options, Mapping) and all(isinstance(name, str) for name in self.options)
        _check(named, "options", self.options, "settings of the network by name, such as {exits: 5}")
        _check("classes" not in self.options, "options", dict(self.options), "no classes: the data set says how many there are")
        for name in ("root", "init"):
            _check(isinstance(getattr(self, name), str | None), name, getattr(self, name), "a path")
        check_seed(self.split_seed, most=LARGEST_OLD_SEED, name="split_seed")
        if self.root is None and self.data != "digits" and not self.texts:
            raise OptionError("root is None", expected=f"the folder with {self.data}", fix="give --root FOLDER")

    @property
    def texts(self) -> bool:
        """Whether the data are texts."""
        return self.data in get_args(TextName)

    def values(self) -> dict[str, Any]:
        """All settings by their flat names, as plain values; `resolve` turns them into the same `RunConfig`."""
        own = {name: getattr(self, name) for name in _own_names() if name != "expected"}
        expected = self.expected and {"accuracy": list(self.expected.accuracy), "tolerance": self.expected.tolerance}
        plain = {**own, "options": dict(self.options), **self.recipe.to_json(), **self.hardware.to_json()}
        return {**plain, "expected": expected} if expected else plain

    def to_yaml(self) -> str:
        """All settings, as a file that `read_settings` reads."""
        import yaml

        text: str = yaml.safe_dump(self.values(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        return text

    def save(self, path: Path) -> None:
        """Write the settings to a file."""
        write_text(path, self.to_yaml())


def resolve(*sources: Source) -> RunConfig:
    """The settings of a run from several sources; later ones override earlier ones."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, values in sources:
        for name in values:
            if name not in setting_names():
                raise _unknown("setting", name, setting_names(), where=where)
        if "device" in values:  # another device has its own best settings
            merged = {name: value for name, value in merged.items() if name not in _HARDWARE}
        changed = {name for name in set(values) - _NO_EFFECT - set(_HARDWARE) if values[name] != merged.get(name)}
        if changed and "expected" not in values:
            merged.pop("expected", None)
        if type(values.get("epochs")) is int and "warmup" not in values and isinstance(merged.get("warmup"), int | float):
            merged["warmup"] = min(merged["warmup"], values["epochs"])
        merged |= values
        origin |= dict.fromkeys(values, where)
    for name in ("data", "model"):
        if name not in merged:
            fix = f"name a recipe, or give --{name} or a file with {name}"
            raise OptionError(f"no {name} was given", expected="data and model", fix=fix)
    try:
        return _build(merged)
    except OptionError as error:
        where = origin.get(error.got.split()[0], "")
        raise OptionError(f"{where}: {error.got}" if where else error.got, expected=error.expected, fix=error.fix) from error


def read_settings(path: str | Path) -> Source:
    """The settings in a YAML file."""
    path = Path(path)
    fix = f"check the path, or name a recipe: {', '.join(recipe_names())}"
    return Source(str(path), _parse(read_file(path, most=_LARGEST_FILE, expected="a YAML file with settings", fix=fix), path))


def recipe_names() -> tuple[str, ...]:
    """The recipes that ship with the library."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _recipes().iterdir() if file.name.endswith(".yaml")))


def read_recipe(name: str) -> Source:
    """The settings of a recipe that ships with the library."""
    if name not in recipe_names():
        raise _unknown("recipe", name, recipe_names())
    return Source(f"recipe {name}", _parse(_recipes().joinpath(f"{name}.yaml").read_bytes(), Path(f"{name}.yaml")))


def setting_names() -> tuple[str, ...]:
    """All names that a file may contain."""
    return (*_own_names(), *_RECIPE, *_HARDWARE)


def load_yaml(data: bytes | str) -> Any:
    """The plain values of a YAML text; aliases are refused, as a few of them can expand to terabytes."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias (*name): write the value out")
            return super().compose_node(parent, index)

    return plain_number(yaml.load(data, Loader))


def plain_number(value: Any) -> Any:
    """`1e-4` as a number, in lists and mappings too; YAML 1.1 reads it as text.

    >>> plain_number("1e-4"), plain_number("cosine"), plain_number({"meta_lr": "1e-4"})
    (0.0001, 'cosine', {'meta_lr': 0.0001})
    """
    if isinstance(value, dict):
        return {name: plain_number(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain_number(inner) for inner in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def read_pair(text: str) -> tuple[str, Any]:
    """Name and value of a setting on the command line.

    >>> read_pair("head-rate=20"), read_pair("options={layers: [6], head: plain}")
    (('head_rate', 20), ('options', {'layers': [6], 'head': 'plain'}))
    """
    name, sign, value = text.partition("=")
    expected, fix = "NAME=VALUE with a value in YAML, such as nesterov=true", "write it as NAME=VALUE, quoted if it has spaces"
    if not sign or not name:
        raise OptionError(f"{text!r} is not a setting", expected=expected, fix=fix)
    with parsing(f"setting {text}", expected=expected, fix=fix, kind=FormatError):
        return name.strip().replace("-", "_"), load_yaml(value)


def _build(values: Mapping[str, Any]) -> RunConfig:
    import torch

    parts = ({name: value for name, value in values.items() if name in names} for names in (_own_names(), _RECIPE, _HARDWARE))
    own, recipe, hardware = parts
    device = hardware.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    _check(isinstance(device, str), "device", device, "cpu, cuda or cuda:1")
    return RunConfig(
        **{name: value for name, value in own.items() if name != "expected"},
        recipe=TrainConfig.from_json(recipe),
        hardware=Hardware.from_json({**Hardware.best(device).to_json(), **hardware}),
        expected=_expected(own.get("expected")),
    )


def _expected(values: Any) -> Expected | None:
    if values is None:
        return None
    good = isinstance(values, Mapping) and set(values) == {"accuracy", "tolerance"} and isinstance(values["accuracy"], list)
    numbers = [*values["accuracy"], values["tolerance"]] if good else [None]
    good = all(isinstance(number, int | float) and 0 <= number <= 1 for number in numbers)
    _check(good, "expected", values, "accuracy, a list with one number from 0 to 1 per exit, and tolerance")
    return Expected(tuple(values["accuracy"]), values["tolerance"])


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    expected, fix = "YAML with lines of `name: value`", "compare it with config.yaml of a run, which has all settings"
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="is not YAML"):
        loaded = load_yaml(data)
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise FormatError(f"{path} has no settings by name", expected=expected, fix=fix, path=path)
    return loaded


def _unknown(what: str, name: str, known: Sequence[str], *, where: str = "") -> OptionError:
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(close)}?" if close else f"choose a {what} of this list"
    got = f"{where + ': ' if where else ''}there is no {what} {name!r}"
    return OptionError(got, expected=f"one of {', '.join(sorted(known))}", fix=fix)


def _check(good: bool, name: str, value: object, expected: str) -> None:
    if not good:
        raise OptionError(
            f"{name} is {value!r}", expected=expected, fix=f"change {name} in the file or with --set {name}=VALUE"
        )


def _own_names() -> tuple[str, ...]:
    return tuple(part.name for part in fields(RunConfig) if part.name not in ("recipe", "hardware"))


def _recipes() -> Any:
    return resources.files("anytime").joinpath("train", "recipes")
