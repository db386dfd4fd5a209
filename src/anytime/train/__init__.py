"""Training: one loop over small objectives, the same on a CPU and, as a CUDA graph, on a GPU."""

from anytime.errors import DivergedError
from anytime.train.config import L2W, Distillation, Machine, TrainConfig
from anytime.train.log import EpochLog
from anytime.train.logits import Evaluation, exit_accuracy
from anytime.train.loop import Habits, Outcome, fit
from anytime.train.objectives import distil_from_exit, distillation, joint_cross_entropy, on_logits, product_likelihood
from anytime.train.plan import phases
from anytime.train.schedule import learning_rate

__all__ = [
    "L2W",
    "Distillation",
    "DivergedError",
    "EpochLog",
    "Evaluation",
    "Habits",
    "Machine",
    "Outcome",
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
