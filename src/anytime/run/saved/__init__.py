"""Folders of models with everything that answers need: `save`, `load`, and `open_folder` for all that is in one."""

from anytime.run.saved.reading import Opened, load, open_folder
from anytime.run.saved.writing import save

__all__ = ["Opened", "load", "open_folder", "save"]
