"""The log of a run, one CSV line per epoch."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from anytime.artifacts import write_text
from anytime.errors import FormatError
from anytime.reading import parsing, read_file

_LARGEST = 1e100


@dataclass(frozen=True)
class EpochLog:
    """One epoch: `epoch` counts from 1, `step` from the start of the run; losses are means over the epoch."""

    epoch: int
    step: int
    lr: float
    losses: tuple[float, ...]
    val_accuracy: tuple[float, ...] | None
    images_per_second: float
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The numbers by name, for loggers: `loss/exit_1`, and `val_accuracy/exit_1` if it was measured."""
        return {
            "epoch": self.epoch,
            "lr": self.lr,
            **{f"loss/exit_{exit}": loss for exit, loss in enumerate(self.losses, 1)},
            **{f"val_accuracy/exit_{exit}": value for exit, value in enumerate(self.val_accuracy or (), 1)},
            "images_per_second": self.images_per_second,
        }

    def columns(self) -> dict[str, str]:
        """Names and values of the CSV line; accuracies that were not measured are empty."""
        val = self.val_accuracy or ("",) * len(self.losses)
        return {
            "epoch": str(self.epoch),
            "step": str(self.step),
            "lr": f"{self.lr:.6g}",
            **{f"loss_{exit}": f"{loss:.6g}" for exit, loss in enumerate(self.losses, 1)},
            **{f"val_accuracy_{exit}": f"{value:.6g}" if value != "" else "" for exit, value in enumerate(val, 1)},
            "images_per_second": f"{self.images_per_second:.6g}",
            "seconds": f"{self.seconds:.6g}",
        }


class CsvLog:
    """The file `log.csv` of a run; without a path nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def start(self, step: int) -> None:
        """Keep the lines of epochs that ended by `step`; later ones will be repeated."""
        if self.path is None or not self.path.exists():
            return
        lines = [line for line in read_log(self.path) if int(line["step"]) <= step]
        text = io.StringIO()
        if lines:
            writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        write_text(self.path, text.getvalue())

    def add(self, epoch: EpochLog) -> None:
        """Append a line."""
        if self.path is None:
            return
        columns = epoch.columns()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(columns), lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(columns)


def read_log(path: Path) -> list[dict[str, str]]:
    """The complete lines of a log: a line cut short by a kill is left out, and its epoch will be repeated."""
    expected, fix = "the log of a training run", f"remove {path.name}: the run continues with a new one"
    with parsing(path, expected=expected, fix=fix, kind=FormatError):
        text = read_file(path, expected=expected).decode()
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        names = set(reader.fieldnames or ())
        if names and not {"epoch", "step", "loss_1"} <= names:
            raise ValueError("column epoch, step or loss_1 is missing")
        lines = [line for line in reader if set(line) == names and all(isinstance(value, str) for value in line.values())]
        for line in lines:
            good = all(abs(float(value)) < _LARGEST for value in line.values() if value)
            if not good or int(line["epoch"]) < 0 or int(line["step"]) < 0:
                raise ValueError(f"the line of step {line['step'][:20]} has a value that is not a number")
        return lines
