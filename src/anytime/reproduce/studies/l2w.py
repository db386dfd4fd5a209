"""Appendix B.11: the product on L2W, an MSDNet whose samples were weighed by a second network."""

from __future__ import annotations

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Finding
from anytime.reproduce.needs import L2W
from anytime.reproduce.studies.more_networks import accuracy_and_falls

_NOTE = (
    "The network has five exits and linear growth, as L2W was published for CIFAR. Where its recipe had to be cut to the time "
    "of a GPU (fewer epochs, a step of the weight network for some batches only), the settings of the run say so."
)


def study(context: Context) -> Finding:
    """Accuracy and the label's falls under the three rules."""
    return accuracy_and_falls(context, L2W, _NOTE)
