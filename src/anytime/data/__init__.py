"""Data sets, one file each, and what is done to their images."""

from anytime.data.augment import Draws, augment, crop_flip, draw, no_draws, normalise
from anytime.data.base import ImageData, StreamedImages
from anytime.data.cifar import load_cifar
from anytime.data.digits import load_digits
from anytime.data.imagenet import load_imagenet
from anytime.data.split import Split, hold_out
from anytime.data.toys import make_curve, make_spiral

__all__ = [
    "Draws",
    "ImageData",
    "Split",
    "StreamedImages",
    "augment",
    "crop_flip",
    "draw",
    "hold_out",
    "load_cifar",
    "load_digits",
    "load_imagenet",
    "make_curve",
    "make_spiral",
    "no_draws",
    "normalise",
]
