"""Small objects fitted on held-out rows and carried beside a model."""

from anytime.calibrate.adaptive import AdaptiveFit, Trial, fit_adaptive_threshold
from anytime.calibrate.certify import Certificate, ChoiceCertificate, certify, certify_choice
from anytime.calibrate.ensembles import FittedRule, fit_arithmetic, fit_geometric
from anytime.calibrate.laplace.mixture import LaplaceMixture, fit_mixture
from anytime.calibrate.laplace.package import laplace_torch
from anytime.calibrate.laplace.posterior import LastLayerLaplace, fit_laplace
from anytime.calibrate.powers import PowersFit, fit_powers
from anytime.calibrate.temperature import Temperature, fit_temperature
from anytime.calibrate.tuning.frontier import Candidate, Frontier, tune
from anytime.calibrate.tuning.static import StaticTrial, sweep_static_thresholds
from anytime.calibrate.tuning.tuned import TunedRule
from anytime.models.ensemble import average_logits

__all__ = [
    "AdaptiveFit",
    "Candidate",
    "Certificate",
    "ChoiceCertificate",
    "FittedRule",
    "Frontier",
    "LaplaceMixture",
    "LastLayerLaplace",
    "PowersFit",
    "StaticTrial",
    "Temperature",
    "Trial",
    "TunedRule",
    "average_logits",
    "certify",
    "certify_choice",
    "fit_adaptive_threshold",
    "fit_arithmetic",
    "fit_geometric",
    "fit_laplace",
    "fit_mixture",
    "fit_powers",
    "fit_temperature",
    "laplace_torch",
    "sweep_static_thresholds",
    "tune",
]
