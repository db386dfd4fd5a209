"""Models of `transformers` from their config: made by `AutoConfig` and an auto class, never by code from a folder."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from anytime.errors import MissingExtraError

AUTO_CLASSES = (
    "AutoModelForSequenceClassification",
    "AutoModelForImageClassification",
    "AutoModelForAudioClassification",
    "AutoModelForVideoClassification",
    "AutoModelForTokenClassification",
    "AutoModelForSemanticSegmentation",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
)
"""The auto classes whose models return logits of classes; a folder can name no other."""
_ATTENTION = ("eager", "sdpa")
_NOT_KEPT = ("_name_or_path", "auto_map", "transformers_version", "architectures")
_LOOPS = re.compile(r"layer|depth|block|stage|num_labels|expert")
"""Settings by which a config builds in a loop."""


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The auto class and the config of a model of `transformers`; None for another model, or one that no auto class makes."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    config: Any = model.config
    for name in AUTO_CLASSES:
        auto = getattr(library, name, None)
        if auto is not None and auto._model_mapping.get(type(config), None) is type(model):
            attention = getattr(config, "_attn_implementation", None)
            # As JSON; the name is often the path of a folder.
            settings = {
                key: value for key, value in json.loads(config.to_json_string(use_diff=False)).items() if key not in _NOT_KEPT
            }
            return {"auto_class": name, "config": settings, "attention": attention if attention in _ATTENTION else None}
    return None


def build(settings: Mapping[str, Any], *, tensors: int, meta: bool = False) -> nn.Module:
    """A model with random weights; raises `ValueError` if the settings are not those of one.

    Args:
        settings: What `describe` returned.
        tensors: How many weights are stored: a config that asks for more layers is refused before it is built.
        meta: Whether to make it on torch's meta device, without memory.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "the model is one of transformers, which is not installed",
            expected="transformers, or a function that builds the bare model",
            fix="pip install transformers, or pass build=: anytime.load(folder, build=make_model)",
        ) from error
    match settings:
        case {"auto_class": str() as auto, "config": {"model_type": str() as kind} as config} if auto in AUTO_CLASSES:
            rest = {str(name): value for name, value in config.items() if name not in ("model_type", "auto_map")}
            for name, number in _numbers(rest):
                if _LOOPS.search(name) and number > max(tensors, 1 << 10):
                    raise ValueError(f"{name} is {number}")
            described = transformers.AutoConfig.for_model(kind, **rest)
            attention = settings.get("attention")
            chosen = {"attn_implementation": attention} if attention in _ATTENTION else {}
            with torch.device("meta" if meta else "cpu"):
                made: nn.Module = getattr(transformers, auto).from_config(described, trust_remote_code=False, **chosen)
            return made
    raise ValueError("the settings name no auto class and config of transformers")


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers({str(inner): each for inner, each in value.items()})
        for number in value if isinstance(value, list) else (value,):
            if type(number) is int:
                yield name, number
