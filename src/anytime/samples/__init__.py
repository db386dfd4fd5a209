"""Sample logits of a network, and a sample network, trained by this project and small enough to ship.

>>> from anytime import evaluate, samples
>>> round(evaluate(samples.cifar100_msdnet()).rules["product"].label_drop_percent["0.5"], 1)
0.0
"""

from __future__ import annotations

from pathlib import Path

from anytime.conformal import ConformalSets
from anytime.evaluation import LogitsFile, open_logits

__all__ = ["cifar100_msdnet", "digits_model"]


def cifar100_msdnet() -> LogitsFile:
    """An MSDNet with 7 exits on 1,000 test images of CIFAR-100, `(7, 1000, 100)` in float16, with labels.

    The network is `results/msdnet-cifar100-seed0`. The images are a random tenth of the test split; the array `indices` of the
    file has their positions. On all 10,000 images the accuracy is 63.5 % at the first exit and 72.8 % at the last.
    """
    return open_logits(Path(__file__).parent / "cifar100_msdnet.npz")


def digits_model() -> tuple[Path, ConformalSets]:
    """The folder of a ResNet with five exits on scikit-learn's digits, and prediction sets for it with a coverage of 95 %.

    Its accuracy on the 300 test images is 98.7 % at the first exit and 99.3 % at the last with the product
    (`python tools/make_sample_model.py`).
    """
    here = Path(__file__).parent
    return here / "digits", ConformalSets.load(here / "digits-sets.json")
