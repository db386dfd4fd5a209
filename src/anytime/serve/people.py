"""`POST /predict` for people: an image file, a text or numbers in, classes with their names and probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from anytime.data.images import FORMATS
from anytime.errors import InputError, OptionError
from anytime.run import Answer
from anytime.run.budget import seconds
from anytime.serve.oip import TensorSpec, read_numbers
from anytime.serve.problems import Problem
from anytime.serve.strict_json import parse_json

IMAGES = tuple(f"image/{name.lower()}" for name in FORMATS)
TYPES = (*IMAGES, "text/plain", "application/json")
_TOP = 5


def read_query(pairs: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], int]:
    """The query as the parameters of a request, and how many classes to return.

    >>> read_query([("deadline", "20ms"), ("max_exit", "3")])
    ({'timeout': 20000, 'max_exit': 3}, 5)
    """
    known: dict[str, Callable[[str], Any]] = {
        "deadline": lambda text: max(1, round(1e6 * seconds(text))),
        "min_exit": int,
        "max_exit": int,
        "target_confidence": float,
        "top": int,
    }
    found: dict[str, Any] = {}
    for name, text in pairs:
        if name not in known or name in found:
            raise _wrong(f"the query parameter {name!r}", f"each of {', '.join(known)} at most once")
        try:
            found[name] = known[name](text)
        except (ValueError, OptionError):
            raise _wrong(f"{name} is {text!r}", "a duration such as 20ms" if name == "deadline" else "a number") from None
    top = found.pop("top", _TOP)
    if not 1 <= top <= 1000:
        raise _wrong(f"top is {top}", "a number from 1 to 1,000")
    if "deadline" in found:
        found = {"timeout": found.pop("deadline"), **found}
    return found, top


def read_input(kind: str, body: bytes, specs: Sequence[TensorSpec], most: int) -> Any:
    """The body of a request: the bytes of an image, or the arrays or texts in it by the names of the inputs.

    Args:
        kind: The media type.
        body: The body.
        specs: What the model takes.
        most: The largest number of elements.
    """
    if kind in IMAGES:
        return body
    texts = specs[0].datatype == "BYTES"
    if kind == "text/plain" and texts:
        try:
            return {specs[0].name: [body.decode()]}
        except UnicodeDecodeError:
            raise _wrong("a text that is not UTF-8", "a text in UTF-8") from None
    if kind == "application/json":
        document = parse_json(body)
        if list(document) != ["input"]:
            raise _wrong("JSON without input, or with more", '{"input": ...}: numbers, a text or a list of texts')
        if len(specs) == 1:
            return {specs[0].name: read_numbers(document["input"], specs[0], most)}
        given, tensors = document["input"], [spec.name for spec in specs]
        if not isinstance(given, dict) or sorted(given) != sorted(tensors):
            raise _wrong("an input that does not name each tensor", f"an object with {', '.join(tensors)}")
        return {spec.name: read_numbers(given[spec.name], spec, most) for spec in specs}
    takes = "a text or JSON" if texts else "an image or JSON" if len(specs) == 1 else "JSON"
    names = ", ".join(TYPES)
    fix = "state the type: curl -H 'Content-Type: image/png' --data-binary @image.png"
    raise Problem(415, "unknown_type", f"a body of type {kind or 'unknown'!r}", expected=f"{takes}: {names}", fix=fix)


def document(answer: Answer, name: str, word: Callable[[int], str], top: int, how: dict[str, Any]) -> dict[str, Any]:
    """The answer for people.

    Args:
        answer: The answer.
        name: Of the model.
        word: The name of a class.
        top: How many classes to return.
        how: The parameters of the response.
    """
    return {"model": name, "answers": [_row(answer, row, word, top) for row in range(len(answer.labels))], **how}


def _row(answer: Answer, row: int, word: Callable[[int], str], top: int) -> dict[str, Any]:
    label = int(answer.labels[row])
    values, labels = answer.probs[row].topk(min(top, answer.probs.shape[1]))
    best = [_class(int(each), float(value), word) for each, value in zip(labels, values, strict=True) if value > 0]
    found = {**_class(label, float(answer.confidence[row]), word), "fell_back": bool(answer.fell_back[row]), "top": best}
    members: Tensor | None = None if answer.prediction_set is None else answer.prediction_set[row]
    return found if members is None else {**found, "set": [word(each) for each in members.nonzero()[:, 0].tolist()]}


def _class(label: int, probability: float, word: Callable[[int], str]) -> dict[str, Any]:
    return {"label": label, "name": word(label), "probability": probability}


def _wrong(got: str, expected: str) -> InputError:
    return InputError(got, expected=expected, fix="see docs/serving.md for what /predict takes")
