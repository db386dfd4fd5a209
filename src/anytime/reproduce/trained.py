"""What the published runs were trained on and how, for the page; tests compare it with the settings of the runs."""

from __future__ import annotations

from collections.abc import Mapping

_PUBLISHED = "its published schedule: the rate divided by 10 at 1/2 and 3/4 of the epochs, no Nesterov momentum"
_OURS = "cosine schedule, Nesterov momentum"

TRAINED: Mapping[str, tuple[str, str, str, str]] = {
    "msdnet-cifar10": ("MSDNet", "45,000", "170", _OURS),
    "msdnet-cifar100-49500": ("MSDNet", "49,500", "300", f"{_PUBLISHED}; batch 256 at a rate of .4, not 64 at .1"),
    "msdnet-cifar100": ("MSDNet", "45,000", "270", _OURS),
    "msdnet-tiny-imagenet": ("MSDNet for ImageNet, 5 exits", "95,000", "90", "cosine schedule"),
    "msdnet-finetuned-cifar10": ("MSDNet, finetuned", "45,000", "120", "the product's likelihood in the last third"),
    "msdnet-finetuned-cifar100": ("MSDNet, finetuned", "45,000", "200", "the product's likelihood in the last third"),
    "msdnet-heads-cifar100": ("heads of msdnet-cifar100-seed0", "45,000", "1", "the product's likelihood, all else frozen"),
    "msdnet-product-cifar100": ("MSDNet", "45,000", "270", "the product's likelihood from the first epoch on"),
    "imta-cifar10": ("IMTA", "45,000", "170 + 90", "gradient equilibrium, then heads on frozen features"),
    "imta-cifar100": ("IMTA", "45,000", "200 + 90", "gradient equilibrium, then heads on frozen features"),
    "ztw-cifar100": ("ResNet-56 with ZTW's heads", "45,000", "100 + 50", "the ResNet, then heads on frozen features"),
    "l2w-cifar100": ("L2W, MSDNet with 5 exits", "45,000", "105", "learned sample weights; 300 epochs as published"),
    "dvit-cifar100": ("DViT, 3 exits", "45,000", "300", "strong augmentation, mixed images, smoothed labels, averaged weights"),
}
"""By the name of a run without its seed: network, images, epochs, and what else to know."""
