"""The README of a saved model: what it is, how it is loaded, and its metrics, with the header that model hubs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anytime.errors import OptionError
from anytime.models.input_spec import InputSpec
from anytime.models.stored.networks import parts_to_build
from anytime.reading import is_file, read_file
from anytime.safe_text import printable

CARD = "README.md"
_MARK = "<!-- Written by anytime.save; remove this line to keep your changes. -->"
_SHOWN = 1 << 20


def is_ours(path: Path) -> bool:
    """Whether a README was written here and not changed by its owner since."""
    return is_file(path) and _MARK.encode() in read_file(path, most=_SHOWN)


def rule_metrics(metrics: Any) -> dict[str, list[float]]:
    """The accuracy of each rule per exit, from an `Evaluation` or its document; empty without one or without labels."""
    if metrics is None:
        return {}
    document = metrics.to_json() if hasattr(metrics, "to_json") else metrics
    try:
        found = {str(name): each.get("accuracy") for name, each in document["rules"].items()}
        return {name: [float(value) for value in values] for name, values in found.items() if values is not None}
    except (TypeError, KeyError, AttributeError, ValueError):
        raise OptionError(
            f"metrics is a {type(metrics).__name__}",
            expected="an Evaluation, or the document of `anytime evaluate --json`",
            fix="pass metrics=anytime.evaluate(logits, labels)",
        ) from None


def card_text(
    name: str,
    model: Any,
    description: Mapping[str, Any],
    accuracy: Mapping[str, Sequence[float]],
    files: Sequence[str],
    specs: Sequence[InputSpec],
) -> str:
    """The README.

    Args:
        name: Of the folder.
        model: The model.
        description: Its description.
        accuracy: Per rule, of each exit.
        files: The names of the files in the folder.
        specs: What the model takes.
    """
    parts = parts_to_build(description)
    places = getattr(model, "exit_names", ())
    exits = f"{model.num_exits} exits" + (f", at `{'`, `'.join(places)}` and at the end" if places else "")
    build = ", build=make_model" if parts else ""
    lines = [
        "---",
        "library_name: anytime-nn",
        "tags:",
        "- early-exit",
        "- anytime-prediction",
        "---",
        "",
        f"# {printable(name)}",
    ]
    lines += ["", f"A neural network with {exits}, which answers by a deadline.", _MARK, "", "```python"]
    lines += ["import anytime", ""]
    if parts:
        lines += [
            f"def make_model():  # makes the {printable(', '.join(dict.fromkeys(parts)))}, with any weights",
            "    ...",
            "",
        ]
    lines += [
        f"with anytime.Runner.load(FOLDER{build}) as runner:",
        '    print(runner.predict(x, deadline="50ms").labels)',
        "```",
    ]
    lines += ["", "`pip install anytime-nn` installs the library. `FOLDER` is the path of this folder."]
    if specs:
        lines += ["", "| input | type | shape |", "| --- | --- | --- |"]
        sizes = (", ".join(("batch", *map(str, spec.shape))) for spec in specs)
        lines += [f"| {spec.name or 'x'} | {str(spec.dtype)[6:]} | ({size}) |" for spec, size in zip(specs, sizes, strict=True)]
    if accuracy:
        columns = [str(exit) for exit in range(1, 1 + max(map(len, accuracy.values())))]
        lines += ["", "Accuracy per exit:", "", f"| rule | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
        lines += [f"| {rule} | {' | '.join(f'{value:.3f}' for value in values)} |" for rule, values in accuracy.items()]
    lines += ["", f"Files: {', '.join(f'`{file}`' for file in sorted(files))}. Checksums are in `manifest.json`."]
    return "\n".join(lines) + "\n"
