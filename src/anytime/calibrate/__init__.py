"""Small objects fitted on held-out rows and carried beside a model."""

from anytime.calibrate.certify import Certificate, ChoiceCertificate, DropTally, certify, certify_choice
from anytime.calibrate.ensembles import fit_arithmetic, fit_geometric
from anytime.calibrate.laplace.posterior import Laplace, fit_laplace
from anytime.calibrate.product import FittedProduct, fit_product
from anytime.calibrate.rules import FittedRule
from anytime.calibrate.temperature import Temperature, fit_temperature
from anytime.calibrate.thresholds import (
    AdaptiveThreshold,
    StaticTrial,
    Trial,
    fit_adaptive_threshold,
    sweep_static_thresholds,
)
from anytime.calibrate.tuning.frontier import Candidate, Frontier, tune
from anytime.calibrate.tuning.tuned import TunedRule
from anytime.combine.named import as_rule
from anytime.models.ensemble import average_logits

__all__ = [
    "AdaptiveThreshold",
    "Candidate",
    "Certificate",
    "ChoiceCertificate",
    "DropTally",
    "FittedProduct",
    "FittedRule",
    "Frontier",
    "Laplace",
    "StaticTrial",
    "Temperature",
    "Trial",
    "TunedRule",
    "as_rule",
    "average_logits",
    "certify",
    "certify_choice",
    "fit_adaptive_threshold",
    "fit_arithmetic",
    "fit_geometric",
    "fit_laplace",
    "fit_product",
    "fit_temperature",
    "sweep_static_thresholds",
    "tune",
]
