"""Small objects fitted on held-out rows and carried beside a model."""

from anytime.calibrate.adaptive import AdaptiveFit, Trial, fit_adaptive_threshold

__all__ = ["AdaptiveFit", "Trial", "fit_adaptive_threshold"]
