"""From logits to figures: reads files, runs the rules block by block, gathers what the metrics say."""

from anytime.evaluation.examples import Example
from anytime.evaluation.measure import DEFAULT_RULES, Evaluation, evaluate
from anytime.evaluation.promises import Promise, Promises, promises
from anytime.evaluation.source import LogitsFile, open_logits

__all__ = ["DEFAULT_RULES", "Evaluation", "Example", "LogitsFile", "Promise", "Promises", "evaluate", "open_logits", "promises"]
