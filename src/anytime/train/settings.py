"""All the settings of a run: which network, on which data, by which recipe, on which machine.

In a file and on the command line they are flat names, those of the fields of `RunConfig`, `TrainConfig` and `Hardware`.
Later sources win over earlier ones: a shipped recipe, a file, flags. What is wrong is said with where it came from.
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
from anytime.checks import LARGEST_OLD_SEED, check_count, check_seed, check_threads
from anytime.data.text import TextName
from anytime.errors import FormatError, OptionError
from anytime.reading import parsing, read_file
from anytime.train.config import Hardware, TrainConfig

DataName = Literal["cifar10", "cifar100", "digits", "imagenet", TextName]
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# Settings that change nothing about what is learnt, or only its luck: the expected accuracy holds whatever they are.
_HARMLESS = {"about", "root", "seed", "minutes", "processes", "workers", "checkpoint_every", "evaluate_every", "expected"}
_WHOLE = {"length": 2, "held_out": 0, "checkpoint_every": 1, "evaluate_every": 1}
_LARGEST_FILE, _MOST = 1 << 20, 2**53


class Source(NamedTuple):
    """Settings and the words for where they came from."""

    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """The test accuracy of each exit that a recipe was measured to reach, or one like it, and how far below a run may stay."""

    accuracy: tuple[float, ...]
    tolerance: float

    def missed(self, found: Sequence[float]) -> tuple[int, ...]:
        """The exits, counted from 1, that stay below.

        >>> Expected((0.6, 0.7), tolerance=0.01).missed((0.595, 0.68))
        (2,)
        """
        pairs = zip(self.accuracy, found, strict=True)
        return tuple(exit for exit, (want, have) in enumerate(pairs, 1) if have < want - self.tolerance)


@dataclass(frozen=True)
class RunConfig:
    """A run in full.

    Attributes:
        data: Name of the data set.
        model: Name of the network, one of `anytime.models.names()`.
        recipe: How it learns.
        machine: Where.
        about: A sentence on what this is.
        root: Folder with the data; none for data that is built in, and for texts in the folder `ANYTIME_SHARED` names.
        init: Weights to begin from: a safetensors file or the folder of a run; for texts also `minilm`, the installed package,
            or the folder of a pretrained encoder. None for a new network.
        options: Fields of the network's config to change.
        length: Word pieces a text at most; the rest is cut off.
        classes: How many of the classes of a set of texts to take, drawn by `split_seed`; none for all.
        held_out: Validation rows, split off the training rows of a set that has none of its own.
        split_seed: Of that split.
        checkpoint_every: Epochs between checkpoints.
        evaluate_every: Epochs between validations.
        minutes: Stop, with a checkpoint, after this many.
        processes: How many share each batch.
        workers: Threads that decode images, for data too large to hold.
        expected: Test accuracy that was measured with these settings, or published for such a network.
    """

    data: DataName
    model: str
    recipe: TrainConfig
    machine: Hardware
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
        _check(self.data in get_args(DataName), "data", self.data, f"one of {', '.join(get_args(DataName))}")
        for name in ("model", "about"):
            _check(isinstance(getattr(self, name), str), name, getattr(self, name), "a word or a sentence")
        for name, low in _WHOLE.items():
            check_count(getattr(self, name), name, low=low, most=_MOST)
        for name in ("processes", "workers"):
            check_threads(getattr(self, name), name=name)
        classes, minutes = self.classes, self.minutes
        _check(classes is None or (self.texts and type(classes) is int), "classes", classes, "a number, with texts alone")
        _check(minutes is None or (type(minutes) in (int, float) and minutes > 0), "minutes", minutes, "a number above 0")
        _check(not self.texts or self.processes == 1, "processes", self.processes, "1 with texts")
        named = isinstance(self.options, Mapping) and all(isinstance(name, str) for name in self.options)
        _check(named, "options", self.options, "settings of the network by name, as a mapping")
        _check("classes" not in self.options, "options", dict(self.options), "no classes: the data set says how many there are")
        for name in ("root", "init"):
            _check(isinstance(getattr(self, name), str | None), name, getattr(self, name), "a path")
        check_seed(self.split_seed, most=LARGEST_OLD_SEED, name="split_seed")
        needs_root = not isinstance(self.root, str) and self.data != "digits" and not (self.texts and self.root is None)
        _check(not needs_root, "root", self.root, f"the folder with {self.data}", fix="give --root FOLDER")

    @property
    def texts(self) -> bool:
        """Whether the data are texts."""
        return self.data in get_args(TextName)

    def values(self) -> dict[str, Any]:
        """All settings by their flat names, as plain values; `resolve` makes the same of them."""
        own = {name: getattr(self, name) for name in _own_names() if name != "expected"}
        expected = self.expected and {"accuracy": list(self.expected.accuracy), "tolerance": self.expected.tolerance}
        plain = {**own, "options": dict(self.options), **self.recipe.to_json(), **self.machine.to_json()}
        return {**plain, "expected": expected} if expected else plain

    def to_yaml(self) -> str:
        """All settings, in full, as a file that `read_settings` reads."""
        import yaml

        text: str = yaml.safe_dump(self.values(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        return text

    def save(self, path: Path) -> None:
        """Write the settings to a file."""
        write_text(path, self.to_yaml())


def resolve(*sources: Source) -> RunConfig:
    """The settings of a run from several sources, of which later ones win."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, values in sources:
        _check_known(values, where)
        if "device" in values:  # another device has its own best settings
            merged = {name: value for name, value in merged.items() if name not in _machine_names()}
        if _learns_otherwise(merged, values):
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
        raise _unknown("recipe", name, recipe_names(), where="")
    file = _recipes().joinpath(f"{name}.yaml")
    return Source(f"recipe {name}", _parse(file.read_bytes(), Path(f"{name}.yaml")))


def setting_names() -> tuple[str, ...]:
    """All names that a file may hold."""
    return (*_own_names(), *_recipe_names(), *_machine_names())


def _build(values: Mapping[str, Any]) -> RunConfig:
    own = {name: value for name, value in values.items() if name in _own_names()}
    machine = {name: value for name, value in values.items() if name in _machine_names()}
    recipe = {name: value for name, value in values.items() if name in _recipe_names()}
    expected = own.pop("expected", None)
    return RunConfig(
        **own,
        recipe=TrainConfig.from_json(recipe),
        machine=_machine(machine),
        expected=None if expected is None else _expected(expected),
    )


def _machine(given: Mapping[str, Any]) -> Hardware:
    import torch

    device = given.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    _check(isinstance(device, str), "device", device, "cpu, cuda or cuda:1")
    return Hardware.from_json({**Hardware.best(device).to_json(), **given})


def _expected(values: Any) -> Expected:
    good = isinstance(values, Mapping) and set(values) == {"accuracy", "tolerance"} and isinstance(values["accuracy"], list)
    numbers = [*values["accuracy"], values["tolerance"]] if good else [None]
    good = all(isinstance(number, int | float) and 0 <= number <= 1 for number in numbers)
    _check(good, "expected", values, "accuracy, a list with a share for each exit, and tolerance, a share")
    return Expected(tuple(values["accuracy"]), values["tolerance"])


def _learns_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    names = set(now) - _HARMLESS - set(_machine_names())
    return "expected" not in now and any(now[name] != before.get(name) for name in names)


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    with parsing(path, expected="YAML: lines of `name: value`", fix="correct it", kind=FormatError, what="is not YAML"):
        loaded = load_yaml(data)
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise FormatError(f"{path} holds no settings", expected="lines of `name: value`", fix="see a recipe's", path=path)
    return loaded


def load_yaml(data: bytes | str) -> Any:
    """The plain values in a YAML text; one with an alias is refused: a few of them can stand for terabytes."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias (*name): write the value out")
            return super().compose_node(parent, index)

    return plain_number(yaml.load(data, Loader))


def plain_number(value: Any) -> Any:
    """`1e-4` as the number it means to everybody, in lists and mappings too; YAML 1.1 takes it for a word.

    >>> plain_number("1e-4"), plain_number("cosine"), plain_number({"meta_lr": "1e-4"})
    (0.0001, 'cosine', {'meta_lr': 0.0001})
    """
    if isinstance(value, dict):
        return {name: plain_number(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain_number(inner) for inner in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def read_pair(text: str) -> tuple[str, Any]:
    """Name and value of a setting as it is written on a command line.

    >>> read_pair("head-rate=20"), read_pair("options={layers: [6], head: plain}")
    (('head_rate', 20), ('options', {'layers': [6], 'head': 'plain'}))
    """
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise OptionError(f"--set {text}", expected="NAME=VALUE, such as nesterov=true", fix="correct it")
    with parsing(f"--set {text}", expected="NAME=VALUE with a value of YAML, such as nesterov=true", kind=FormatError):
        return name.strip().replace("-", "_"), load_yaml(value)


def _check_known(values: Mapping[str, Any], where: str) -> None:
    for name in values:
        if name not in setting_names():
            raise _unknown("setting", name, setting_names(), where=where)


def _unknown(what: str, name: str, known: Sequence[str], *, where: str) -> OptionError:
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(close)}?" if close else "choose one of those"
    came = f"{where + ': ' if where else ''}no {what} is called {name!r}"
    return OptionError(came, expected=f"one of {', '.join(sorted(known))}", fix=fix)


def _check(good: bool, name: str, value: object, expected: str, *, fix: str | None = None) -> None:
    if not good:
        raise OptionError(f"{name} is {value!r}", expected=expected, fix=fix or f"correct {name}")


def _own_names() -> tuple[str, ...]:
    return tuple(part.name for part in fields(RunConfig) if part.name not in ("recipe", "machine"))


def _recipe_names() -> tuple[str, ...]:
    return tuple(part.name for part in fields(TrainConfig))


def _machine_names() -> tuple[str, ...]:
    return tuple(part.name for part in fields(Hardware))


def _recipes() -> Any:
    return resources.files("anytime").joinpath("train", "recipes")
