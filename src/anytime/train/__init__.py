"""Training: one loop over small objectives, the same on a CPU and, as a CUDA graph, on a GPU."""

from anytime.train.config import Machine, TrainConfig
from anytime.train.log import EpochLog
from anytime.train.logits import Evaluation, exit_accuracy
from anytime.train.loop import DivergedError, Habits, Outcome, fit
from anytime.train.objectives import joint_cross_entropy, on_logits, phases, product_likelihood
from anytime.train.schedule import learning_rate

__all__ = [
    "DivergedError",
    "EpochLog",
    "Evaluation",
    "Habits",
    "Machine",
    "Outcome",
    "TrainConfig",
    "exit_accuracy",
    "fit",
    "joint_cross_entropy",
    "learning_rate",
    "on_logits",
    "phases",
    "product_likelihood",
]
