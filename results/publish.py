"""Keep what is small of a training run: `python results/publish.py RUN results/NAME --rows 2000 1000 [--weights]`.

A run is what `python -m anytime.train.cifar` leaves. Settings, log, split and summary are kept whole, figures are taken on all
rows, logits and labels of the first rows are kept in float16, and weights, if asked for, with matrices in float16 and in
parts under 3 MB. All of it is one bundle with checksums.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import torch

from anytime.artifacts import tensors_from_bytes, tensors_to_bytes, write_bundle
from anytime.evaluation import evaluate

_PLAIN = ("config.json", "log.csv", "split.json", "summary.json")
_PART = 2_300_000


def main() -> None:
    """Read the arguments and write the bundle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs=2, default=(2000, 1000), metavar=("TEST", "VAL"))
    parser.add_argument("--costs", type=float, nargs="+", help="cumulative cost up to each exit")
    parser.add_argument("--weights", action="store_true")
    options = parser.parse_args()
    files = {name: (options.run / name).read_bytes() for name in _PLAIN}
    for name, rows in zip(("test", "val"), options.rows, strict=True):
        files |= _logits(options.run / f"{name}.npz", name, rows, options.costs)
    if options.weights:
        files |= _weights(options.run / "model.safetensors")
    write_bundle(options.folder, files)
    print(f"{options.folder}: {sum(map(len, files.values())) / 1e6:.1f} MB")


def _logits(path: Path, name: str, rows: int, costs: list[float] | None) -> dict[str, bytes]:
    stored = np.load(path)
    ready = path.with_name(f"{name}-metrics.json")  # where the run was packed with fewer rows than it has
    logits, labels = stored["logits"], stored["labels"]
    if ready.is_file():
        figures = json.loads(ready.read_text())
    else:
        figures = evaluate(torch.from_numpy(logits.astype(np.float32)), torch.from_numpy(labels), costs=costs).to_json()
    sample = io.BytesIO()
    np.savez_compressed(sample, logits=logits[:, :rows], labels=labels[:rows], indices=stored["indices"][:rows])
    return {f"{name}-metrics.json": json.dumps(figures, indent=1).encode(), f"{name}-sample.npz": sample.getvalue()}


def _weights(path: Path) -> dict[str, bytes]:
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
