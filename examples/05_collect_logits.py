"""Logits of a whole data set in a file, continued after an interruption, and metrics in a loop of one's own.

The first collection is interrupted, as by Ctrl-C or a kill. The second continues where it ended, with every row once. The file
may be larger than memory: `anytime.evaluate` and `anytime evaluate FILE` read it in blocks.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

import anytime
from anytime.data import load_digits
from anytime.metrics import Metrics

folder, _ = anytime.samples.digits_model()
model = anytime.load(folder)  # five exits, for digits of 16 × 16 pixels
test = load_digits()["test"]
images = interpolate((test.images / 255.0 - test.mean[0]) / test.std[0], size=16)
noisy = images.repeat(1 if "--small" in sys.argv else 50, 1, 1, 1)
noisy = noisy + torch.randn(noisy.shape, generator=torch.Generator().manual_seed(0))
labels = test.labels.repeat(len(noisy) // len(images))
# No shuffling: a collection can be continued if the loader yields the same batches again.
loader = DataLoader(TensorDataset(noisy, labels), batch_size=50)


def with_ctrl_c(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, until somebody presses Ctrl-C."""
    for number, batch in enumerate(batches):
        if number == 3:
            raise KeyboardInterrupt
        yield batch


out = Path(mkdtemp()) / "logits.npz"
try:
    anytime.collect_logits(model, with_ctrl_c(loader), out)
except KeyboardInterrupt:
    print("interrupted; what is done is in", *(path.name for path in out.parent.iterdir()))
collected = anytime.collect_logits(model, loader, out)
print(collected, f"{out.stat().st_size:,} bytes")

found = anytime.evaluate(collected).rules["product"]
print("from the file, accuracy of the product:", *(f"{value:.3f}" for value in found.accuracy or ()))

# The same numbers in a validation loop that keeps no logits. On a GPU, update does not wait for it.
metrics = Metrics(["latest", "product"])
with torch.no_grad():
    for x, y in loader:
        metrics.update(model(x), y)
found = metrics.compute()["product"]
print("from a loop, accuracy of the product:  ", *(f"{value:.3f}" for value in found.accuracy or ()))
