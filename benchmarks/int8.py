"""A trial of int8 on the CPU: ONNX Runtime's static quantiser on the CIFAR-100 MSDNet, against float32 in the same run.

    python benchmarks/int8.py FOLDER_WITH_CIFAR100                needs the data and the extra engines
    python benchmarks/int8.py FOLDER_WITH_CIFAR100 --rows 1000    fewer test rows

The network up to an exit is one session with one thread, so no carry leaves it as float32. Weights have one scale per channel;
activations are calibrated on rows that the network was not trained on. The sessions take turns; times are medians of the
thread's CPU time for one image.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from torch import Tensor, nn

import anytime
from anytime.data.cifar import STATISTICS, load_cifar
from anytime.data.split import Split
from anytime.run.engines.folding import folded_copy
from anytime.run.engines.onnx import make_session, onnx_bytes

RUN = Path("results/msdnet-cifar100-seed0")
CALIBRATION, BLOCK = 192, 20
_LAYERS = ["Conv", "Relu", "AveragePool", "Flatten", "Reshape", "Gemm"]
_ALL = [*_LAYERS, "Concat"]
VARIANTS: dict[str, dict[str, Any]] = {
    "layers": {"op_types_to_quantize": _LAYERS},
    "layers and concatenations": {"op_types_to_quantize": _ALL},
    "by percentile": {"op_types_to_quantize": _ALL, "calibrate_method": CalibrationMethod.Percentile},
}


class AllExits(nn.Module):
    """A network as a function of its input."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.model.exits(x))


class Rows(CalibrationDataReader):  # type: ignore[misc]
    """Calibration images, in batches."""

    def __init__(self, x: np.ndarray) -> None:
        self.rows = iter(np.split(x, len(x) // 32))

    def get_next(self) -> dict[str, np.ndarray] | None:
        rows = next(self.rows, None)
        return None if rows is None else {"x": rows}


def normalise(images: Tensor) -> np.ndarray:
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in STATISTICS["cifar100"])
    return ((images.float() / 255 - mean) / std).numpy()


def quantised(file: Path, x: np.ndarray, options: dict[str, Any]) -> bytes:
    made = file.with_name("int8.onnx")
    quantize_static(
        file,
        made,
        Rows(x),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        **options,
    )
    return made.read_bytes()


def up_to(file: bytes, exit: int, folder: Path) -> Any:
    source, part = folder / "whole.onnx", folder / "part.onnx"
    source.write_bytes(file)
    onnx.utils.extract_model(str(source), str(part), ["x"], [f"logits_{exit}"])
    return make_session(part.read_bytes())


def median_times(sessions: dict[str, list[Any]], x: np.ndarray, rounds: int) -> dict[str, np.ndarray]:
    """CPU milliseconds up to each exit."""
    times: dict[str, list[list[float]]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, parts in sessions.items():
            row = []
            for part in parts:
                part.run(None, {"x": x})
                begin = time.thread_time()
                for _ in range(BLOCK):
                    part.run(None, {"x": x})
                row.append((time.thread_time() - begin) / BLOCK)
            times[name].append(row)
    return {name: 1e3 * np.median(np.array(values), axis=0) for name, values in times.items()}


def accuracies(file: bytes, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Percent correct at each exit, by the latest exit and by the product."""
    session = make_session(file, threads=2)
    logits = np.concatenate([np.stack(session.run(None, {"x": rows})) for rows in np.split(x, len(x) // 100)], 1)
    rules = {"latest": anytime.Latest(), "product": anytime.Product()}
    return {name: 100 * (rule(logits).labels.numpy() == labels).mean(1) for name, rule in rules.items()}


def show(name: str, values: np.ndarray, form: str) -> None:
    print(f"  {name:28}" + "".join(f"{value:{form}}" for value in values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with CIFAR-100")
    parser.add_argument("--rows", type=int, default=10_000, help="test rows, a multiple of 100")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()

    data = load_cifar("cifar100", given.data)
    held_out = Split.from_json((RUN / "split.json").read_text()).held_out
    calibration = normalise(data["train"].images[held_out[:CALIBRATION]])
    test, labels = normalise(data["test"].images[: given.rows]), data["test"].labels[: given.rows].numpy()
    model: Any = anytime.run.open_folder(RUN).model
    x = torch.from_numpy(test[:2])
    outputs = [f"logits_{exit}" for exit in range(model.num_exits)]
    files = {"float32": onnx_bytes(AllExits(folded_copy(model, x)), (x,), inputs=["x"], outputs=outputs)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "float32.onnx"
        source.write_bytes(files["float32"])
        files |= {name: quantised(source, calibration, options) for name, options in VARIANTS.items()}
        sessions = {name: [up_to(file, exit, Path(folder)) for exit in range(len(outputs))] for name, file in files.items()}
    times = median_times(sessions, test[:1], given.rounds)
    right = {name: accuracies(file, test, labels) for name, file in files.items()}
    for name in files:
        print(f"{name}: ms up to each exit, times faster than float32, then percent correct and the difference")
        show("ms", times[name], "7.3f")
        show("times faster", times["float32"] / times[name], "7.2f")
        for rule, percent in right[name].items():
            show(rule, percent, "7.2f")
            show("difference", percent - right["float32"][rule], "+7.2f")


if __name__ == "__main__":
    main()
