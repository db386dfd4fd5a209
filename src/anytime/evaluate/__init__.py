"""From logits to figures: reads files, runs the rules block by block, gathers what the metrics say."""

from anytime.evaluate.evaluation import DEFAULT_RULES, Evaluation, Example, evaluate
from anytime.evaluate.source import LogitsFile, open_logits

__all__ = ["DEFAULT_RULES", "Evaluation", "Example", "LogitsFile", "evaluate", "open_logits"]
