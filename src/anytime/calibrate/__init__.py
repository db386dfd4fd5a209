"""Small objects fitted on held-out rows and carried beside a model."""

from anytime.calibrate.adaptive import AdaptiveFit, Trial, fit_adaptive_threshold
from anytime.calibrate.ensembles import fit_arithmetic, fit_geometric

__all__ = ["AdaptiveFit", "Trial", "fit_adaptive_threshold", "fit_arithmetic", "fit_geometric"]
