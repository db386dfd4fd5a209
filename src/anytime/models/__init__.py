"""Networks with exits, one file an architecture."""

from anytime.models.base import ExitModel, MultiExit

__all__ = ["ExitModel", "MultiExit"]
