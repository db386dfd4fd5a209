"""A model into a folder, completely or not at all: what it is made of, its weights, and what a runner uses beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anytime.artifacts import bundle_names, json_text, overwrites, tensors_to_bytes, write_bundle, write_text
from anytime.checks import Inputs, check_inputs, map_inputs
from anytime.combine import Intersection, Rule
from anytime.data.description import DATA, describe_data
from anytime.data.text import VOCABULARY, describe_tokenizer
from anytime.data.wordpiece import WordPiece
from anytime.errors import OptionError
from anytime.fitted import Fitted
from anytime.models.attach.probe import evaluating
from anytime.models.base import ExitModel
from anytime.models.ensemble import AveragedEnsemble, Ensemble
from anytime.models.input_spec import InputSpec, input_specs
from anytime.models.stored import networks
from anytime.models.stored.weights import weights_of
from anytime.models.zoo import CONFIG, KIND, WEIGHTS, input_specs_of
from anytime.outputs import check_folder, exists
from anytime.policy import FittedPolicy, PlainPolicy, Policy
from anytime.run.arguments import check_policy, check_profile, count_classes
from anytime.run.combining import choose_rule
from anytime.run.export.loading import ExportedModel
from anytime.run.saved.card import CARD, card_text, is_ours, rule_metrics
from anytime.run.saved.reading import INTERSECTION, POLICY, PROFILE, RUNNER, VERSION
from anytime.run.timing.profile import Profile


def save(
    model: ExitModel,
    folder: str | Path,
    *,
    rule: Rule[Any] | Intersection | Fitted | str | None = None,
    calibration: Any = None,
    policy: Policy | FittedPolicy | None = None,
    profile: Profile | str | Path | None = None,
    class_names: Sequence[str] | None = None,
    normalisation: Any = None,
    tokenizer: tuple[WordPiece, int] | None = None,
    example: Inputs | None = None,
    metrics: Any = None,
    overwrite: bool = True,
) -> Path:
    """Save a model with all that its answers need, for `anytime.load`, `Runner.load` and the command line. Nothing is pickled.

    The folder has `config.json` (what the network is made of), `model.safetensors` (its parameters and persistent buffers, in
    their dtype, tied ones once), a `README.md` and a manifest of checksums. Code is not stored: a module of your own is made by
    the function `build` that you pass to `load`.

    Args:
        model: A network of this library, one with attached exits, an ensemble, a `MultiExit` of your own, or any torch module
            with `num_exits` and `exits(x)`.
        folder: Where to write. A model that was saved there before is replaced; anything else is not.
        rule: The rule of its answers: as for `Runner`, or a fitted one.
        calibration: Fitted objects, as for `Runner`.
        policy: Lets inputs stop early, as for `Runner`: fitted, or one of `anytime.policy`.
        profile: Its stage times, or their file.
        class_names: The names of the classes, in the order of the logits; by default those of a Hugging Face config.
        normalisation: Of pixels from 0 to 1: the mean and the standard deviation of each channel, or the name of a data set,
            such as `cifar10` or `imagenet`.
        tokenizer: Of a text encoder of this library: the tokenizer, and the tokens per row.
        example: A batch that the model takes; attached exits know their inputs, and other modules need one for the command
            line and faster engines. Names, types and shapes are stored, not the numbers.
        metrics: Metrics for the README: an `Evaluation`, or the document of `anytime evaluate --json`.
        overwrite: Whether a model that was saved there before may be replaced.

    Returns:
        The folder.

    Example:
        >>> import tempfile, anytime
        >>> model = anytime.create_model("mlp-toy", classes=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = anytime.save(model, folder, rule="caching", class_names=["ant", "bee", "cat"])
        ...     print(anytime.Runner.load(folder).predict(torch.zeros(1, 2)).exits)
        5
    """
    network, place = _check_model(model), Path(folder)
    check_folder(place, kind=KIND)
    if not overwrite and bundle_names(place):
        error = overwrites(place, "holds a model that was saved before")
        error.fix = "use another folder, or pass overwrite=True"
        raise error
    specs, classes = _describe_inputs(network, example)
    files = _runner_files(model, rule, calibration, policy, profile, classes)
    description, tensors, tied = networks.describe(network, specs, classes), *weights_of(network)
    version = 2 if description["architecture"] in networks.OTHERS else 1  # what earlier releases read
    document = {"version": version, **description, **({"tied": tied} if tied else {})}
    names = networks.class_names(description) if class_names is None else class_names
    about = describe_data(place.resolve().name, normalisation, names, classes)
    files |= _data_files(about, tokenizer)
    files |= {CONFIG: json_text(document).encode(), WEIGHTS: tensors_to_bytes(tensors)}
    card = card_text(place.resolve().name, model, description, rule_metrics(metrics), list(files), specs)
    write_bundle(place, files, kind=KIND)
    if not exists(place / CARD) or is_ours(place / CARD):  # people edit cards, on the hub as well
        write_text(place / CARD, card)
    return place


def _check_model(model: Any) -> nn.Module:
    if isinstance(model, ExportedModel):
        raise OptionError(
            "the model is exported stages", expected="the network they were exported from", fix="copy their folder as it is"
        )
    if not isinstance(model, nn.Module) or not isinstance(model, ExitModel):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="a torch module with num_exits and exits(x)",
            fix="attach exits first: anytime.attach_exits(module, at=[0.5], example=x); if it returns the logits of all exits, "
            "wrap it in anytime.models.from_outputs"
            if isinstance(model, nn.Module)
            else "save fitted objects with fitted.save(path), and models of other libraries, such as trees, with those",
        )
    return model


def _describe_inputs(model: nn.Module, example: Any) -> tuple[tuple[InputSpec, ...], int | None]:
    """What the model takes, and its number of classes, as far as they are known; an example is run to find out."""
    parts = (model, *(model.members if isinstance(model, Ensemble | AveragedEnsemble) else ()))
    specs: tuple[InputSpec, ...] = next(filter(None, map(input_specs_of, parts)), ())
    classes = next(filter(None, map(count_classes, parts)), None)
    if example is None:
        return specs, classes
    rows = map_inputs(lambda tensor: tensor[:1], check_inputs(example, "example"))
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    assert isinstance(model, ExitModel)
    with evaluating(model), torch.no_grad():
        logits: Tensor = next(iter(model.exits(map_inputs(lambda tensor: tensor.to(device), rows))))
    return specs or input_specs(rows), classes or int(logits.shape[1])


def _runner_files(
    model: ExitModel, rule: Any, calibration: Any, policy: Any, profile: Any, classes: int | None
) -> dict[str, bytes]:
    """The files of what a runner uses; checked as a runner does, before anything is written."""
    fitted = [] if calibration is None else list(calibration) if isinstance(calibration, tuple | list) else [calibration]
    if isinstance(rule, Fitted):
        fitted, rule = [rule, *fitted], None
    chosen, _ = choose_rule(rule, tuple(fitted), classes, policy)
    policy, profile = check_policy(policy, chosen), check_profile(profile)
    exits = model.num_exits
    if isinstance(chosen, Rule):
        chosen.start(exits)
    if isinstance(policy, Policy):
        policy = PlainPolicy.of(policy, exits=exits, classes=classes)
    for each in (*fitted, policy, profile):
        if each is not None:
            each.check_fits(exits, classes or each.classes or 1)
    named = {f"calibration-{number}.json": each for number, each in enumerate(fitted, 1)}
    stored = {
        **named,
        **({POLICY: policy} if policy is not None else {}),
        **({PROFILE: profile} if profile is not None else {}),
    }
    if rule is None and not stored:
        return {}
    text = None if rule is None else INTERSECTION if isinstance(chosen, Intersection) else repr(choose_rule(rule, None)[0])
    document = {
        "version": VERSION,
        "rule": text,
        "calibration": list(named),
        "policy": policy is not None,
        "profile": profile is not None,
    }
    return {RUNNER: json_text(document).encode()} | {name: json_text(each.document()).encode() for name, each in stored.items()}


def _data_files(about: Any, tokenizer: Any) -> dict[str, bytes]:
    """The description of the data and the vocabulary, if there are any."""
    files: dict[str, bytes] = {}
    settings: dict[str, Any] = {}
    if tokenizer is not None:
        match tokenizer:
            case (WordPiece() as known, int() as length):
                lines, settings = describe_tokenizer(known, length=length)
                files[VOCABULARY] = lines.encode()
            case _:
                raise OptionError(
                    f"tokenizer is a {type(tokenizer).__name__}",
                    expected="an anytime.data.WordPiece and the tokens per row",
                    fix="pass tokenizer=(tokenizer, 128); texts for other models are given as token ids",
                )
    if about is None and not settings:
        return files
    words = None if about is None or about.class_names is None else list(about.class_names)
    stored = {"name": "texts" if about is None else about.name, "class_names": words}
    scale = {"mean": [] if about is None else list(about.mean), "std": [] if about is None else list(about.std)}
    return {**files, DATA: json_text({**stored, **scale, **settings}).encode()}
