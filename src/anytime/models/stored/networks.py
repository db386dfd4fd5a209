"""What a network is made of, as JSON, and the network made again from it and from the weights.

A description is a tree: exits attached to a backbone, an ensemble of members. Its leaves are networks of this library, models
of `transformers`, and modules of the caller's own, which a function of the caller makes: code is never stored or read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from anytime.checks import map_inputs
from anytime.errors import AnytimeError, FormatError, OptionError
from anytime.models.attach.exits import AttachedExits, Head, Statistics
from anytime.models.attach.heads import PooledHead
from anytime.models.attach.probe import inside
from anytime.models.base import ExitModel
from anytime.models.ensemble import AveragedEnsemble, Ensemble
from anytime.models.input_spec import InputSpec, make_inputs, specs_from_documents
from anytime.models.stored import hugging_face
from anytime.models.stored.weights import check_stored, fill, part_of
from anytime.models.zoo import describe as describe_own
from anytime.models.zoo import take, unfilled
from anytime.models.ztw import CascadeHead, cascade_heads
from anytime.reading import parsing

Build = Callable[[], Any]
"""Makes a model, or the part of one that is not of this library, with any weights."""
ENSEMBLES: dict[str, type[Ensemble | AveragedEnsemble]] = {"ensemble": Ensemble, "averaged-ensemble": AveragedEnsemble}
OTHERS = ("attached", "transformers", "built", *ENSEMBLES)
"""Architectures that are not networks of this library."""
_DEEPEST = 8
_SAVED, _SAVE_AGAIN = "what anytime.save writes", "copy the folder again, or save the model again with this version"


def describe(model: nn.Module, specs: Sequence[InputSpec] = (), classes: int | None = None) -> dict[str, Any]:
    """The description of a network.

    Args:
        model: The network.
        specs: What it takes, if that is known.
        classes: The number of classes, if known.

    Returns:
        `architecture`, `config`, and for other networks than those of this library `inputs` and `classes`, if known.
    """
    if (known := describe_own(model)) is not None:
        return known
    if (found := hugging_face.describe(model)) is not None:
        return {"architecture": "transformers", "config": found}
    if type(model) is AttachedExits:
        return _describe_attached(model)
    config: dict[str, Any]
    if isinstance(model, Ensemble | AveragedEnsemble) and type(model) in ENSEMBLES.values():
        name = next(name for name, kind in ENSEMBLES.items() if kind is type(model))
        config = {"members": [describe(member) for member in model.members]}
    else:
        name, config = "built", {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
        config |= {"exits": model.num_exits} if isinstance(model, ExitModel) else {}
    return {"architecture": name, "config": config, **(_described(specs, classes) if specs else {})}


def _describe_attached(model: AttachedExits) -> dict[str, Any]:
    config = {
        "at": list(model.exit_names),
        "heads": _describe_heads(model.heads),
        "frozen": model.frozen,
        "statistics": model.statistics,
        "method": model.method,
        "backbone": describe(model.backbone),
    }
    return {"architecture": "attached", "config": config, **_described(model.input_specs, model.classes)}


def _described(specs: Sequence[InputSpec], classes: int | None) -> dict[str, Any]:
    return {"inputs": [spec.document() for spec in specs], "classes": classes}


@dataclass
class Rebuilding:
    """Makes a network from its description.

    Attributes:
        path: The file of the description, for errors.
        weights: All weights by name, without those that are tied.
        tied: For each tied one the name under which it is stored.
        build: Makes a part that is not of this library; several functions make one part each, in order.
        head: Makes the heads, if they are of the caller's own.
    """

    path: Path
    weights: Mapping[str, Tensor]
    tied: Mapping[str, str]
    build: Build | Sequence[Build] | None = None
    head: Head | None = None
    _made: int = field(default=0, init=False)
    _headed: bool = field(default=False, init=False)

    def network(self, description: Any) -> nn.Module:
        """The network, with its weights, in eval mode."""
        network = self._make(description, "", 0)
        if isinstance(self.build, Sequence) and self._made != len(self.build):
            raise OptionError(
                f"build has {len(self.build)} functions",
                expected=f"{self._made}, one for each part of the model in {self.path} that is not of this library",
                fix="pass a single function if it makes all parts",
            )
        if self.build is not None and not self._made:
            raise OptionError(
                f"build is given, and all parts of the model in {self.path} are of this library",
                expected="no build",
                fix="remove build (--build on the command line)",
            )
        if self.head is not None and not self._headed:
            raise OptionError(
                f"head is given, and the model in {self.path} has no heads of your own",
                expected="no head",
                fix="remove head: these heads are made by this library, or by build",
            )
        fill(network, self.weights, self.tied, path=self.path, made_by="the model")
        return network.eval()

    def _make(self, description: Any, prefix: str, depth: int) -> nn.Module:
        match description:
            case {"architecture": str() as name, "config": dict() as config} if depth < _DEEPEST:
                if name == "attached":
                    return self._attached(description, config, prefix, depth)
                if name in ENSEMBLES:
                    return self._ensemble(name, description, config, prefix, depth)
                if name == "transformers" and self.build is None:
                    return self._of_transformers(config, prefix)
                if name in ("built", "transformers"):
                    return self._built(config, prefix)
                return self._of_library(description, prefix)
        raise self._unreadable("describes a network as " + f"{description!r}"[:100])

    def _attached(self, description: Any, config: Mapping[str, Any], prefix: str, depth: int) -> nn.Module:
        with self._parsing():
            places, specs = [str(place) for place in config["at"]], specs_from_documents(description["inputs"])
            heads, classes, inner = config["heads"], description["classes"], config["backbone"]
            frozen, statistics = config["frozen"] is True, _statistics(config["statistics"])
            method: Literal["thread", "auto"] = "thread" if config["method"] == "thread" else "auto"
            if not places or len(set(places)) != len(places) or not specs or type(classes) is not int:
                raise ValueError("the places, inputs or classes of the exits are missing")
        backbone = self._make(inner, f"{prefix}backbone.", depth + 1)
        if isinstance(backbone, AttachedExits):  # build made all of it
            self._check_places(backbone, places)
            return backbone
        head = self._head(heads, classes)
        dtype = next((tensor.dtype for tensor in backbone.parameters() if tensor.is_floating_point()), None)
        # The whole may have been converted after its exits were attached, with model.half().
        example = map_inputs(
            lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, make_inputs(specs, batch=2)
        )
        try:
            return AttachedExits(
                backbone,
                places,
                head,
                example=example,
                classes=classes,
                frozen=frozen,
                statistics=statistics,
                method=method,
            )
        except AnytimeError as error:
            raise FormatError(
                f"{self.path} does not fit: {error.got}",
                expected=error.expected,
                fix="pass build and head as the model was saved with; if they are, copy the folder again",
                path=self.path,
            ) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # the backbone's own
            shapes = ", ".join(str(spec.shape) for spec in specs)
            raise self._unreadable(f"has inputs of shape {shapes}, which the backbone does not take: {error}"[:400]) from error

    def _check_places(self, model: AttachedExits, places: list[str]) -> None:
        if list(model.exit_names) != places:
            raise FormatError(
                f"build() attaches exits at {', '.join(model.exit_names)}",
                expected=f"{', '.join(places)}, as in {self.path}",
                fix="attach them at the same places, or return the bare backbone",
                path=self.path,
            )

    def _head(self, heads: Any, classes: int) -> Head | None:
        match heads:
            case {"kind": "pooled"}:
                return None
            case {"kind": "cascade", "normalise": bool() as normalise, "convolution": bool() as convolution}:
                return cascade_heads(classes, normalise=normalise, convolution=convolution)
            case {"kind": "own", "classes": [*kinds]}:
                self._headed = True
                if self.head is None:
                    raise OptionError(
                        f"the heads in {self.path} are of your own: {', '.join(sorted(set(map(str, kinds))))[:200]}",
                        expected="head=, as it was passed to attach_exits, or a build that returns the model with its exits",
                        fix="anytime.load(folder, build=make_backbone, head=make_head)",
                    )
                return self.head
        raise self._unreadable(f"has heads {heads!r}"[:200])

    def _ensemble(self, name: str, description: Any, config: Mapping[str, Any], prefix: str, depth: int) -> nn.Module:
        members = config.get("members")
        if not isinstance(members, list) or not 1 <= len(members) <= max(1, len(self.weights)):
            raise self._unreadable("has an ensemble without members")
        made: list[Any] = [self._make(member, f"{prefix}members.{number}.", depth + 1) for number, member in enumerate(members)]
        with self._parsing():
            specs = specs_from_documents(description.get("inputs", [])) if name == "ensemble" else ()
        try:
            return Ensemble(made, example=make_inputs(specs, batch=1)) if specs else ENSEMBLES[name](made)
        except OptionError as error:
            raise self._unreadable(f"has members that do not fit: {error.got}", expected=error.expected) from error

    def _of_library(self, description: Any, prefix: str) -> nn.Module:
        weights, tied = part_of(prefix, self.weights, self.tied)
        return take(
            unfilled(description, self.path), {**weights, **{name: weights[tied[name]] for name in tied}}, path=self.path
        )

    def _of_transformers(self, config: Mapping[str, Any], prefix: str) -> nn.Module:
        weights, tied = part_of(prefix, self.weights, self.tied)
        made_by = f"the {config.get('auto_class')} in it"
        with self._parsing():  # first without memory: the sizes in an untrusted config are those of the weights
            empty = hugging_face.build(config, tensors=len(weights), meta=True)
            check_stored(empty, weights, tied, path=self.path, made_by=made_by)
            made = hugging_face.build(config, tensors=len(weights))
        return self._checked(made, prefix, made_by=made_by)

    def _built(self, config: Mapping[str, Any], prefix: str) -> nn.Module:
        build = self._next(str(config.get("class")))
        made = build()
        if not isinstance(made, nn.Module):
            raise OptionError(
                f"build() returned a {type(made).__name__}",
                expected=f"a torch.nn.Module, as the {config.get('class')} that was saved",
                fix="return the bare module from the function: def make(): return MyNetwork(...)",
            )
        if prefix.endswith("backbone."):
            if isinstance(made, AttachedExits):
                return made
            made = inside(made)
        exits = config.get("exits")
        if exits is not None and getattr(made, "num_exits", None) != exits:
            raise FormatError(
                f"build() returned a {type(made).__name__} with {getattr(made, 'num_exits', 'no')} exits",
                expected=f"{exits} exits, as the model in {self.path} has",
                fix="return the model with its exits from the function, as it was saved, "
                f"such as from_outputs(Network(), exits={exits})",
                path=self.path,
            )
        return self._checked(made, prefix, made_by=f"the {type(made).__name__} that build() returned")

    def _next(self, kind: str) -> Build:
        found = self.build
        if isinstance(found, Sequence):
            found = found[self._made] if self._made < len(found) else None
        self._made += 1
        if found is None:
            several = f", and only {self._made - 1} functions were passed" if self._made > 1 else ""
            raise OptionError(
                f"the model in {self.path.parent} needs the code of {kind[:200]}, which a folder does not hold{several}",
                expected="build, a function that makes it with any weights; a list of functions if there are several",
                fix="anytime.load(folder, build=make_model), or --build package.module:function on the command line",
            )
        if not callable(found) or isinstance(found, nn.Module):
            raise OptionError(
                f"build is a {type(found).__name__}",
                expected="a function without arguments that returns a torch.nn.Module",
                fix="pass the function itself: build=make_model, or build=lambda: MyNetwork(...)",
            )
        if needed := _needed(found):
            raise OptionError(
                f"build needs {', '.join(needed)}",
                expected="a function without arguments that returns a torch.nn.Module",
                fix="wrap it: build=lambda: make_model(...); on the command line, name a function that does this",
            )
        return found

    def _checked(self, module: nn.Module, prefix: str, *, made_by: str) -> nn.Module:
        """The module, which gets its weights with the whole: exits are attached in the dtype that build() returns."""
        check_stored(module, *part_of(prefix, self.weights, self.tied), path=self.path, made_by=made_by)
        return module.eval()

    def _parsing(self) -> Any:
        return parsing(self.path, expected=_SAVED, fix=_SAVE_AGAIN, kind=FormatError, what="does not describe a network")

    def _unreadable(self, got: str, *, expected: str = _SAVED) -> FormatError:
        return FormatError(f"{self.path} {got}", expected=expected, fix=_SAVE_AGAIN, path=self.path)


def parts_to_build(description: Any) -> tuple[str, ...]:
    """The classes of the parts that a function of the caller has to make."""
    return tuple(str(node["config"].get("class")) for node in _nodes(description) if node["architecture"] == "built")


def stored_inputs(description: Any) -> tuple[tuple[InputSpec, ...], int | None]:
    """The inputs and the number of classes in a description, of the first part that has them; raises `ValueError`."""
    for node in _nodes(description):
        if "inputs" in node:
            return specs_from_documents(node["inputs"]), node["classes"] if type(node.get("classes")) is int else None
    return (), None


def class_names(description: Any) -> tuple[str, ...] | None:
    """The names of the classes in the config of a model of `transformers`, if they are not numbered only."""
    for node in _nodes(description):
        if node["architecture"] == "transformers":
            named = node["config"]["config"].get("id2label") or {}
            names = tuple(str(named[key]) for key in sorted(named, key=int))
            return None if all(name.startswith("LABEL_") for name in names) else names
    return None


def _nodes(description: Any, depth: int = 0) -> Iterator[Any]:
    match description:
        case {"architecture": str(), "config": dict() as config} if depth < _DEEPEST:
            yield description
            members = config.get("members")
            for part in (config.get("backbone"), *(members if isinstance(members, list) else ())):
                yield from _nodes(part, depth + 1)


def _describe_heads(heads: nn.ModuleList) -> dict[str, Any]:
    kinds = {type(head) for head in heads}
    if kinds == {PooledHead}:
        return {"kind": "pooled"}
    if kinds == {CascadeHead}:
        normalise = isinstance(heads[0].norm, nn.LayerNorm)
        return {
            "kind": "cascade",
            "normalise": normalise,
            "convolution": any(isinstance(head.features, nn.Sequential) for head in heads),
        }
    return {"kind": "own", "classes": [type(head).__qualname__ for head in heads]}


def _needed(build: Build) -> list[str]:
    """The arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return []
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in several]


def _statistics(value: Any) -> Statistics:
    if value not in get_args(Statistics):
        raise ValueError(f"statistics is {value!r}")
    return cast(Statistics, value)
