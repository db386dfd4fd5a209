"""A model from a folder: one of `anytime.save`, of a training run, a published run, or exported stages.

What was saved beside the model comes with it: the rule, the calibration, the policy, the profile, the names of the classes and
the normalisation. Nothing that is read can run code; what the caller has to build is made by a function that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anytime.artifacts import bundle_kind, bundle_names, bundle_reader, tensors_from_bytes
from anytime.calibrate import Temperature
from anytime.combine import Intersection, Rule, parse_rule
from anytime.data.description import DATA, KNOWN, Description, read_description
from anytime.errors import FormatError, MissingFileError, OptionError
from anytime.fitted import LARGEST_FILE, Fitted, document_from, fitted_from, read_fitted
from anytime.models.attach.exits import Head
from anytime.models.input_spec import InputSpec
from anytime.models.published import is_published, load_published, read_config
from anytime.models.stored.networks import Build, Rebuilding, stored_inputs
from anytime.models.zoo import CONFIG, WEIGHTS, input_specs_of
from anytime.outputs import exists
from anytime.policy import FittedPolicy, PlainPolicy
from anytime.reading import json_from, parsing
from anytime.run.arguments import count_classes
from anytime.run.combining import choose_rule
from anytime.run.export.description import DTYPES, NAME
from anytime.run.export.loading import ExportedModel, load_exported
from anytime.run.timing.profile import Profile

RUNNER, POLICY, PROFILE = "runner.json", "policy.json", "profile.json"
INTERSECTION = "intersection"
VERSION = 1
_LARGEST_WEIGHTS, _LARGEST_DOCUMENT = 1 << 40, 1 << 28
_MOST_FITTED = 64
_TOKENS = 128
"""The length of a usual text."""
_FOLDER = "a folder of anytime.save, of a training run, or of anytime export"
_SAVED, _SAVE_AGAIN = "what anytime.save writes", "copy the folder again, or save the model again with this version"


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that is ready to run, with what was saved beside it.

    Attributes:
        model: The network, or the stages that were exported from one.
        name: The name of its folder, or of the network.
        folder: Its folder; the current folder for a network by name.
        trained: Whether its weights are from a folder, not random.
        data: How its inputs were normalised, and the names of its classes, if known.
        known_classes: The number of classes, if known.
        rule: The rule that was saved, if any.
        calibration: The fitted objects that were saved.
        policy: The policy that was saved, if any.
        profile: The profile that was saved, if any.
    """

    model: Any
    name: str
    folder: Path
    trained: bool = True
    data: Description | None = None
    known_classes: int | None = None
    rule: Rule[Any] | Intersection | None = None
    calibration: tuple[Fitted, ...] = ()
    policy: FittedPolicy | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        words = None if self.data is None else self.data.class_names
        if words is not None and self.known_classes not in (None, len(words)):
            raise OptionError(
                f"the data set has {len(words)} classes",
                expected=f"{self.known_classes}, as {self.name} has",
                fix="pass --data with the data set that the network was trained on",
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        if self.known_classes is None:
            raise FormatError(
                f"{self.folder} does not say how many classes its model has",
                expected="a model that was saved with an example of its inputs",
                fix="save it again: anytime.save(model, folder, example=x)",
                path=self.folder,
            )
        return self.known_classes

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The tensors that it takes, if known."""
        return inputs_of(self.model)

    def runner_arguments(self, **given: Any) -> dict[str, Any]:
        """The arguments of a `Runner`: those given, and for the others what was saved.

        With a rule, what was fitted for another rule is left out; with a calibration, the saved rule, unless temperatures
        were given; if the answers are of another rule then, a fitted policy; with an engine or a profile, the saved profile.
        """
        rule, calibration = given.get("rule"), given.get("calibration")
        if "calibration" in given:
            several = calibration if isinstance(calibration, tuple | list) else (calibration,)
            keeps_rule = all(each is None or isinstance(each, Temperature) for each in several)
            saved: dict[str, Any] = {"rule": self.rule if keeps_rule else None}
        else:
            saved = {"rule": self.rule, "calibration": _fitted_for(self.calibration, rule) or None}
        if isinstance(self.policy, PlainPolicy) or self._rule_of({**saved, **given}) == self._rule_of({}):
            saved["policy"] = self.policy
        fits = self.profile is not None and given.get("engine", self.profile.engine) == self.profile.engine
        if self.profile is not None and fits and "profile" not in given:
            saved |= {"profile": self.profile, "engine": self.profile.engine}
        arguments = {**{name: value for name, value in saved.items() if value is not None}, **given}
        by_default = arguments.get("rule") is None and not arguments.get("calibration")
        if by_default and self.known_classes is not None and not isinstance(self.model, ExportedModel):
            # Chosen here, since the model itself may not know its classes.
            arguments["rule"] = choose_rule(None, None, self.known_classes, arguments.get("policy"))[0]
        return arguments

    def _rule_of(self, arguments: Mapping[str, Any]) -> Any:
        """The rule that a runner uses with these arguments; with none of them, the one that was saved."""
        if not arguments:
            arguments = {"rule": self.rule, "calibration": self.calibration}
        return choose_rule(arguments.get("rule"), arguments.get("calibration"), self.known_classes, self.policy)[0]


def load(
    path: str | Path,
    *,
    build: Build | Sequence[Build] | None = None,
    head: Head | None = None,
    trusted: bool = False,
) -> Any:
    """Load a model from a folder, on the CPU and in eval mode, or a fitted object from its file.

    Args:
        path: A folder that `anytime.save`, `anytime train` or `anytime export` wrote, or the file of a fitted object:
            temperatures, prediction sets, a rule, a policy.
        build: For a model of your own: a function without arguments that makes it, with any weights; of attached exits the bare
            backbone, of an ensemble one member. Several functions make one part each. Names, shapes and exits are compared
            with the folder.
        head: The function that made the heads, if one was passed to `attach_exits`.
        trusted: Whether to read exported `.pt2` files, which can run any code; see `Runner.load`.

    Returns:
        The model, with the dtype in which it was saved; `Runner.load` also uses the rule, calibration and policy of the folder.

    Example:
        >>> import tempfile, torch, anytime
        >>> fitted = anytime.fit_temperature(torch.tensor([[[3.0, 0.0]] * 3]), torch.tensor([0, 0, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     anytime.load(fitted.save(f"{folder}/temperature.json")) == fitted
        True
    """
    if exists(path, Path.is_dir):
        return open_folder(path, build=build, head=head, trusted=trusted).model
    if build is not None or head is not None:
        raise MissingFileError(f"there is no folder {path}", expected=_FOLDER, fix="check the path", path=path)
    return read_fitted(path)


def open_folder(
    folder: str | Path,
    data: str | None = None,
    *,
    build: Build | Sequence[Build] | None = None,
    head: Head | None = None,
    threads: int = 1,
    trusted: bool = False,
) -> Opened:
    """Open a folder that this library wrote.

    Args:
        folder: As for `load`.
        data: What the model was trained on: `cifar10`, `cifar100`, `imagenet` or a data.json; by default the folder's own.
        build: As for `load`.
        head: As for `load`.
        threads: Threads per stage of exported stages.
        trusted: As for `load`.
    """
    folder = Path(folder)
    if is_exported(folder):
        found = _open_exported(folder, threads, trusted)
    elif exists(folder, is_published):
        found = _open_published(folder)
    else:
        return _open_saved(folder, data, build, head)
    if build is not None or head is not None:
        raise OptionError(f"build is given, and {folder} needs none", expected="no build or head", fix="remove build (--build)")
    return found if data is None else replace(found, data=_with_words(_read_data(data), found.data))


def is_exported(folder: Path) -> bool:
    """Whether a folder has exported stages."""
    return exists(folder / NAME)


def inputs_of(model: Any) -> tuple[InputSpec, ...]:
    """The tensors that a model or exported stages take, if known."""
    if not isinstance(model, ExportedModel):
        return input_specs_of(model)
    examples = model.description.get("example") or [[_TOKENS] * len(shape[1:]) for _, _, shape in model.inputs]
    specs = []
    for (name, dtype, (_, *sizes)), usual in zip(model.inputs, examples, strict=True):
        # A variable length is that of the example, or of a usual text; the size of the vocabulary is not known.
        shape = tuple(size if isinstance(size, int) else given for size, given in zip(sizes, usual, strict=True))
        specs.append(InputSpec(name if len(model.inputs) > 1 else "", DTYPES[dtype], shape, fill=1))
    return tuple(specs)


def _open_exported(folder: Path, threads: int, trusted: bool) -> Opened:
    model, name = load_exported(folder, threads=threads, trusted=trusted), folder.resolve().name
    stored = model.description["data"] or {"name": name, "mean": (), "std": ()}
    words = None if model.class_names is None else tuple(model.class_names)
    about = Description(stored["name"], tuple(stored["mean"]), tuple(stored["std"]), words)
    return Opened(model, name, folder, data=about, known_classes=model.classes)


def _open_published(folder: Path) -> Opened:
    model, about = load_published(folder), KNOWN.get(read_config(folder)["data"])
    return Opened(model, folder.resolve().name, folder, data=about, known_classes=count_classes(model))


def _open_saved(folder: Path, data: str | None, build: Any, head: Head | None) -> Opened:
    place = folder / "model" if exists(folder / "model", Path.is_dir) else folder
    if place == folder and exists(folder / "config.yaml"):
        raise MissingFileError(
            f"the run in {folder} has no network yet",
            expected="a finished run",
            fix=f"continue it: anytime train --resume --out {folder}",
            path=folder / "model",
        )
    if not exists(place, Path.is_dir):
        raise MissingFileError(f"there is no folder {folder}", expected=_FOLDER, fix="check the path", path=folder)
    if bundle_kind(place) is None:
        raise MissingFileError(
            f"{folder} has no model of this library: manifest.json does not exist",
            expected=_FOLDER,
            fix="copy all files of the folder again; to a Hugging Face model, add exits first: attach_exits, then anytime.save",
            path=place,
        )
    whole = folder.resolve()
    name = whole.parent.name if whole.name == "model" else whole.name
    with bundle_reader(place) as read:
        description, weights, tied = _read_model(read, place)
        fitted = _read_runner(read, place)
    # After the files are read: an error of the caller's own code is not one of theirs.
    model: Any = Rebuilding(place / CONFIG, weights, tied, build, head).network(description)
    with _parsing(place / CONFIG):
        inputs, classes = stored_inputs(description)
    classes = count_classes(model) if classes is None else classes
    _check_fitted(place, fitted, model.num_exits, classes)
    if inputs and not input_specs_of(model):
        model.input_specs = inputs
    about = _read_data(data) if data is not None else _own_data(whole)
    return Opened(model, name, folder, data=about, known_classes=classes, **fitted)


def _read_model(read: Callable[[str, int], bytes], place: Path) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The description of the network, its weights, and under which names tied ones are stored."""
    path = place / CONFIG
    document = json_from(read(CONFIG, _LARGEST_DOCUMENT), path, expected=_SAVED, fix=_SAVE_AGAIN)
    with _parsing(path):
        version, tied = document.pop("version"), document.pop("tied", {})
        if version not in (1, 2):
            raise ValueError(f"version {version!r}")
        weights = tensors_from_bytes(read(WEIGHTS, _LARGEST_WEIGHTS), path=place / WEIGHTS)
        if not all(
            isinstance(original, str) and original in weights and name not in weights for name, original in tied.items()
        ):
            raise ValueError("tied weights of other names than those stored")
    return document, weights, tied


def _read_runner(read: Callable[[str, int], bytes], place: Path) -> dict[str, Any]:
    """What a runner uses beside the model; nothing for a folder without it."""
    path = place / RUNNER
    if RUNNER not in bundle_names(place):
        return {}
    document = json_from(read(RUNNER, _LARGEST_DOCUMENT), path, expected=_SAVED, fix=_SAVE_AGAIN)
    with _parsing(path):
        if document.get("version") != VERSION:
            raise ValueError(f"version {document.get('version')!r}")
        text, names = document["rule"], document["calibration"]
        if not isinstance(names, list) or len(names) > _MOST_FITTED or not isinstance(text, str | None):
            raise ValueError("a rule and a list of calibrations are missing")
    try:
        rule = None if text is None else Intersection() if text == INTERSECTION else parse_rule(text)
    except OptionError as error:
        raise FormatError(f"{path}: {error.got}", expected=error.expected, fix=_SAVE_AGAIN, path=path) from error
    fitted = partial(_read_fitted, read, place)
    calibration = tuple(fitted(str(name), Fitted) for name in names)
    return {
        "rule": rule,
        "calibration": calibration,
        "policy": fitted(POLICY, FittedPolicy) if document.get("policy") else None,
        "profile": fitted(PROFILE, Profile) if document.get("profile") else None,
    }


def _check_fitted(place: Path, fitted: Mapping[str, Any], exits: int, classes: int | None) -> None:
    """Refuse what was fitted for another model."""
    for each in (*fitted.get("calibration", ()), fitted.get("policy"), fitted.get("profile")):
        if each is not None and (each.exits != exits or (None not in (classes, each.classes) and classes != each.classes)):
            raise FormatError(
                f"{place} has a {each.kind} for {each.exits} exits and {each.classes} classes",
                expected=f"{exits} exits and {classes} classes, as its model has",
                fix=_SAVE_AGAIN,
                path=place,
            )


def _read_fitted(read: Callable[[str, int], bytes], place: Path, name: str, kind: type[Fitted]) -> Any:
    path = place / name
    found = fitted_from(document_from(read(name, LARGEST_FILE), path), path=path)
    if not isinstance(found, kind):
        raise FormatError(f"{path} holds a {found.kind}", expected=f"a {kind.__name__}", fix=_SAVE_AGAIN, path=path)
    return found


def _own_data(folder: Path) -> Description | None:
    """The data.json of a folder, or of the run around RUN/model."""
    places = (folder, folder.parent) if folder.name == "model" else (folder,)
    return next((read_description(place / DATA, sealed=True) for place in places if exists(place / DATA)), None)


def _read_data(data: str) -> Description:
    return KNOWN.get(data) or read_description(Path(data))


def _with_words(given: Description, own: Description | None) -> Description:
    """The description that a caller names, with the names of the classes that the folder has."""
    return given if own is None or own.class_names is None else replace(given, class_names=own.class_names)


def _fitted_for(calibration: tuple[Fitted, ...], rule: Any) -> tuple[Fitted, ...]:
    """The saved objects that fit a rule that the caller passes, if any."""
    if rule is None:
        return calibration
    temperatures = [each for each in calibration if isinstance(each, Temperature)]
    chosen, _ = choose_rule(rule, tuple(temperatures))
    return tuple(each for each in calibration if isinstance(each, Temperature) or getattr(each, "rule", None) in (None, chosen))


def _parsing(path: Path) -> Any:
    return parsing(path, expected=_SAVED, fix=_SAVE_AGAIN, kind=FormatError, what="is not what anytime.save writes")
