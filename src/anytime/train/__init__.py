"""Training: one loop over small objectives, eager on a CPU and captured as a CUDA graph on a GPU."""

from anytime.errors import DivergedError
from anytime.train.config import L2W, Distillation, Hardware, StrongAugment, TrainConfig
from anytime.train.data.logits import ExitEvaluation, exit_accuracy
from anytime.train.log import EpochLog
from anytime.train.loop import Outcome, fit
from anytime.train.objectives.losses import distil_from_exit, distillation, joint_cross_entropy, on_logits, product_likelihood
from anytime.train.objectives.plan import phases
from anytime.train.options import FitOptions
from anytime.train.schedule import learning_rate

__all__ = [
    "L2W",
    "Distillation",
    "DivergedError",
    "EpochLog",
    "ExitEvaluation",
    "FitOptions",
    "Hardware",
    "Outcome",
    "StrongAugment",
    "TrainConfig",
    "distil_from_exit",
    "distillation",
    "exit_accuracy",
    "fit",
    "joint_cross_entropy",
    "learning_rate",
    "on_logits",
    "phases",
    "product_likelihood",
]
