"""Appendix B.11: the product on the dynamic vision transformer, whose exits are transformers with more and more tokens."""

from __future__ import annotations

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Finding
from anytime.reproduce.needs import DVIT
from anytime.reproduce.studies.more_networks import accuracy_and_falls

_NOTE = (
    "The paper shows networks that others trained on ImageNet, which is not to be had here. Ours is the same cascade of three "
    "transformers at the size of CIFAR, trained from scratch: 4², 6² and 8² tokens of images of 32², half the width and half "
    "the depth, and crops and flips alone in place of the published augmentation, without which transformers stay far below "
    "convolutional networks on so few images. Three exits give fewer chances to fall than seven."
)


def study(context: Context) -> Finding:
    """Accuracy and the label's falls under the three rules."""
    return accuracy_and_falls(context, DVIT, _NOTE)
