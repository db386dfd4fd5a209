"""Data sets, one file each, and their transforms, splits, tokens and batches."""

from anytime.data.augment import Draws, augment, crop_flip, draw, no_draws, normalise
from anytime.data.base import ImageData, StreamedImages
from anytime.data.batches import Batch, plan_batches
from anytime.data.cifar import load_cifar
from anytime.data.digits import load_digits
from anytime.data.imagenet import load_imagenet
from anytime.data.split import Split, hold_out
from anytime.data.text import TextData, TokenData, draw_classes, load_text, take_classes, tokenize
from anytime.data.tiny_imagenet import load_tiny_imagenet
from anytime.data.toys import make_simple_1d, make_spiral
from anytime.data.wordpiece import WordPiece

__all__ = [
    "Batch",
    "Draws",
    "ImageData",
    "Split",
    "StreamedImages",
    "TextData",
    "TokenData",
    "WordPiece",
    "augment",
    "crop_flip",
    "draw",
    "draw_classes",
    "hold_out",
    "load_cifar",
    "load_digits",
    "load_imagenet",
    "load_text",
    "load_tiny_imagenet",
    "make_simple_1d",
    "make_spiral",
    "no_draws",
    "normalise",
    "plan_batches",
    "take_classes",
    "tokenize",
]
