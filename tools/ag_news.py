"""Pack the test rows of AG News into the parquet file that `anytime.data.text.load_text("agnews")` reads.

    python tools/ag_news.py test.csv OUT

The file has 7,600 rows: a class from 1 to 4, a title and a description. The training file is 16 times as large and not needed
for a network of this size: 2,000 random rows become the test split, the others are trained on.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from anytime.artifacts import write_bytes

TEST_ROWS = 2000


def pack(source: Path, folder: Path, test_rows: int = TEST_ROWS) -> Path:
    """Write `agnews.parquet` to `folder`."""
    with source.open(newline="", encoding="utf-8") as file:
        rows = [(int(label) - 1, f"{title}. {text}".replace("\\", " ")) for label, title, text in csv.reader(file)]
    splits = np.full(len(rows), "train", dtype=object)
    splits[np.random.RandomState(0).permutation(len(rows))[:test_rows]] = "test"
    labels, texts = zip(*rows, strict=True)
    stored = io.BytesIO()
    parquet.write_table(pa.table({"split": splits.tolist(), "text": texts, "label": labels}), stored)
    write_bytes(folder / "agnews.parquet", stored.getvalue())
    return folder / "agnews.parquet"


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(pack(options.source, options.folder))


if __name__ == "__main__":
    main()
