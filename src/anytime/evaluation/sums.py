"""What an evaluation adds up over rows: sums, a sample and the worst rows; two of them merge, and they can be stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.artifacts import tensors_from_bytes, tensors_to_bytes
from anytime.errors import IntegrityError
from anytime.evaluation.examples import ExampleCollector
from anytime.metrics import Summary

_DOCUMENT = "document"
_FEW = 1000


@dataclass(frozen=True)
class Sums:
    """Sums over some rows.

    Attributes:
        summaries: Of each rule.
        examples: The sample and the worst rows among them.
        seen: How many rows each tuned rule was tuned on.
        heads: A fingerprint of the first rows of each file that begins among these rows.
    """

    summaries: dict[Any, Summary]
    examples: ExampleCollector
    seen: dict[str, int] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Sums) -> None:
        """Add the sums over other rows."""
        for name, summary in self.summaries.items():
            summary.merge(other.summaries[name])
        self.examples.merge(other.examples)
        self.seen.update({name: self.seen.get(name, 0) + count for name, count in other.seen.items()})
        self.heads.update(other.heads)

    def to_bytes(self) -> bytes:
        """As a safetensors file: the same bytes for the same sums."""
        tensors: dict[str, Tensor] = {}
        for index, summary in enumerate(self.summaries.values()):
            for name, value in summary.sums.items():
                tensors |= _packed(f"{index} {name}", value)
        text = json.dumps({"examples": self.examples.state(), "seen": self.seen, "heads": self.heads})
        document = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
        return tensors_to_bytes({**tensors, _DOCUMENT: document})

    def restore(self, data: bytes, path: str | Path) -> Sums:
        """Fill empty sums with what `to_bytes` returned; `path` is for an error."""
        tensors = tensors_from_bytes(data, path=path)
        try:
            document = json.loads(tensors.pop(_DOCUMENT).numpy().tobytes())
            for index, summary in enumerate(self.summaries.values()):
                names = dict.fromkeys(name.split(" ")[1] for name in tensors if name.startswith(f"{index} "))
                summary.sums = {name: _unpacked(f"{index} {name}", tensors) for name in names}
            self.examples.restore(document["examples"])
            self.seen.update(document["seen"])
            self.heads.update(document["heads"])
        except (KeyError, ValueError, TypeError) as error:
            raise IntegrityError(
                f"{path} holds no sums ({error})", expected="sums of an evaluation", fix="remove it", path=path
            ) from error
        return self


def _packed(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor by its name; or, if most of it is zero, as large histograms of few rows are, its shape, places and values."""
    places = value.flatten().nonzero()[:, 0]
    if 2 * len(places) + _FEW > value.numel():
        return {name: value}
    shape = torch.tensor(value.shape)
    return {f"{name} shape": shape, f"{name} places": places, f"{name} values": value.flatten()[places]}


def _unpacked(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name in tensors:
        return tensors[name]
    shape, places, values = (tensors[f"{name} {part}"] for part in ("shape", "places", "values"))
    return values.new_zeros(shape.tolist()).flatten().index_put_((places,), values).view(*shape.tolist())


def scores_to_bytes(scores: Mapping[str, Tensor]) -> bytes:
    """The scores of calibration rows by rule, as a safetensors file."""
    return tensors_to_bytes({str(index): value for index, value in enumerate(scores.values())})


def scores_from_bytes(data: bytes, names: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """What `scores_to_bytes` wrote for rules of these names."""
    found = tensors_from_bytes(data, path=path)
    return {name: found[str(index)] for index, name in enumerate(names)}
