"""A model and its rule as one file per stage: writing a bundle, loading it, and rules as ONNX graphs."""

from anytime.run.export.loading import ExportedModel, load_exported
from anytime.run.export.writing import TOLERANCE, export

__all__ = ["TOLERANCE", "ExportedModel", "export", "load_exported"]
