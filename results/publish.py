"""Publish the small files of a training run: `python results/publish.py RUN results/NAME [--rows TEST VAL] [--weights]`.

RUN is a folder of `anytime train`, or one of an earlier version with `config.json` and `model.safetensors`. Settings, log and
summary are copied, of texts also the split, metrics are computed on all rows, and the logits and labels of a random sample of
rows are kept in float16. Weights, if requested, have matrices in float16, in parts under 3 MB. All files form one bundle with
checksums.

For texts more rules are evaluated, such as the product fitted on the validation rows, and logits of out-of-scope queries are
kept too. A network with a single head, which is published for its accuracy, has no logits here.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anytime.artifacts import bundle_kind, tensors_from_bytes, tensors_to_bytes, verify_bundle, write_bundle
from anytime.combine import Rule
from anytime.errors import AnytimeError, MissingFileError
from anytime.evaluation import evaluate
from anytime.outputs import check_folder
from anytime.reproduce.runs import document_of_one
from anytime.reproduce.studies.text import text_rules
from anytime.train.run import stored_config

_PLAIN = ("log.csv", "summary.json", "data.json", "epochs.json")
_PART = 2_300_000
_SAMPLE = 1_000_000
"""Bytes of logits per split that are kept for texts; for a few classes that is all of them."""
_IMAGE_ROWS = {"test": 1000, "val": 500}

Stored = dict[str, Any]
"""The arrays of an .npz file: logits, indices and, if there are any, labels."""


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments and write the bundle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs=2, metavar=("TEST", "VAL"))
    parser.add_argument("--costs", type=float, nargs="+", help="MACs up to each exit")
    parser.add_argument("--weights", action="store_true")
    options = parser.parse_args(arguments)
    try:
        check_folder(options.folder, kind="", inputs=(options.run,))
        files = publish(options.run, rows=options.rows, costs=options.costs, weights=options.weights)
        write_bundle(options.folder, files)
    except AnytimeError as error:
        parser.error(str(error))
    print(f"{options.folder}: {sum(map(len, files.values())) / 1e6:.1f} MB")


def publish(
    run: Path, *, rows: tuple[int, int] | None = None, costs: list[float] | None = None, weights: bool = False
) -> dict[str, bytes]:
    """The files of a bundle, by name.

    Args:
        run: The folder of a training run.
        rows: Numbers of test and validation rows to keep the logits of.
        costs: Cumulative cost up to each exit, such as MACs.
        weights: Whether to keep the weights.
    """
    if bundle_kind(run) is not None:
        verify_bundle(run)
    config, texts = _config(run)
    files = {"config.json": json.dumps(config, indent=1).encode()}
    copied = (*_PLAIN, "split.json") if texts else _PLAIN  # which rows of images were held out follows from the settings
    files |= {name: (run / name).read_bytes() for name in copied if (run / name).is_file()}
    arrays = {name: dict(np.load(run / f"{name}.npz")) for name in ("test", "val", "oos") if (run / f"{name}.npz").is_file()}
    if "test" not in arrays:
        raise _missing(run, "test.npz")
    asked = dict(zip(("test", "val"), rows, strict=True)) if rows is not None else {} if texts else _IMAGE_ROWS
    for name in ("test", "val"):
        if name not in arrays:
            continue
        if len(arrays[name]["logits"]) == 1:
            files[f"{name}-metrics.json"] = _json(document_of_one(*_tensors(arrays[name])))
            continue
        more = text_rules(*_tensors(arrays["val"])) if texts and name == "test" and "val" in arrays else None
        # A run that was packed with a part of its rows has the metrics of all rows beside it.
        ready = run / f"{name}-metrics.json"
        metrics = json.loads(ready.read_text()) if ready.is_file() else _metrics(arrays[name], more, costs)
        files[f"{name}-metrics.json"] = _json(metrics)
        files[f"{name}-sample.npz"] = _sample(arrays[name], asked.get(name))
    if "oos" in arrays and len(arrays["oos"]["logits"]) > 1 and config.get("classes") is None:
        files["oos-sample.npz"] = _sample(arrays["oos"], None)
    return files | (_weights(run) if weights else {})


def _config(run: Path) -> tuple[dict[str, Any], bool]:
    """The settings, without the folders of the machine, and whether the data are texts."""
    if (run / "config.json").is_file():
        return json.loads((run / "config.json").read_text()), False
    config = stored_config(run)
    names = ("model", "init", "data", "classes", "length", "options", "held_out", "split_seed")
    values = {name: getattr(config, name) for name in names if config.texts or name not in ("classes", "length")}
    document = {**values, "init": _name(config.init), "options": dict(config.options)}
    document |= {"recipe": config.recipe.to_json(), "hardware": config.hardware.to_json()}
    return document, config.texts


def _name(init: str | None) -> str | None:
    """The name of the folder of the initial weights, or of their package."""
    if init is None:
        return None
    path = Path(init)
    return path.parent.name if path.name == "model" else path.name


def _metrics(stored: Stored, more: Mapping[str, Rule[Any]] | None, costs: list[float] | None) -> dict[str, Any]:
    rules: dict[str, Any] = {} if more is None else {"rules": dict(more)}
    return evaluate(*_tensors(stored), costs=costs, **rules).to_json()


def _sample(stored: Stored, rows: int | None) -> bytes:
    """A random sample of rows, the same for all runs on the same data: a smaller sample is a part of a larger one."""
    exits, count, classes = stored["logits"].shape
    kept = min(count, _SAMPLE // (2 * exits * classes) if rows is None else rows)
    chosen = np.sort(np.random.default_rng(0).permutation(count)[:kept])
    some: Stored = {
        name: values[:, chosen] if name == "logits" else _smallest(values[chosen]) for name, values in stored.items()
    }
    packed = io.BytesIO()
    np.savez_compressed(packed, **some)
    return packed.getvalue()


def _smallest(numbers: NDArray[Any]) -> NDArray[Any]:
    """Labels or indices in the smallest type that holds them."""
    return numbers.astype(np.min_scalar_type(int(numbers.max())))


def _tensors(stored: Stored) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(stored["logits"].astype(np.float32)), torch.from_numpy(stored["labels"])


def _missing(run: Path, name: str) -> MissingFileError:
    fix = f"finish the run with anytime train --resume --out {run}"
    return MissingFileError(f"{run} has no {name}", expected="the folder of a finished run", fix=fix, path=run / name)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _weights(run: Path) -> dict[str, bytes]:
    places = (run / "model.safetensors", run / "model" / "model.safetensors")
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise _missing(run, "model.safetensors")
    weights = tensors_from_bytes(path.read_bytes(), path=path)
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        small = tensor.half() if tensor.ndim >= 2 else tensor
        if size + small.nbytes > _PART:
            parts.append({})
            size = 0
        parts[-1][name] = small
        size += small.nbytes
    count = len(parts)
    return {f"weights-{i}-of-{count}.safetensors": tensors_to_bytes(part) for i, part in enumerate(parts, 1)}


if __name__ == "__main__":
    main()
