"""Answers by a deadline: budgets, forecasts, the runner, its scheduler and the engines below it."""

from anytime.run.answer import Answer, Reason
from anytime.run.batch import StageReport
from anytime.run.budget import Budget
from anytime.run.executor import LoadStatus
from anytime.run.options import RunOptions
from anytime.run.runner import Runner
from anytime.run.saved import Opened, load, open_folder, save
from anytime.run.task import Task
from anytime.run.timing.forecast import Forecast
from anytime.run.timing.profile import Profile, profile_model

__all__ = [
    "Answer",
    "Budget",
    "Forecast",
    "LoadStatus",
    "Opened",
    "Profile",
    "Reason",
    "RunOptions",
    "Runner",
    "StageReport",
    "Task",
    "load",
    "open_folder",
    "profile_model",
    "save",
]
