"""From logits to metrics: reads files and runs the rules on them block by block."""

from anytime.evaluation.examples import Example
from anytime.evaluation.guarantees import Guarantee, Guarantees, measure_guarantees
from anytime.evaluation.measure import DEFAULT_RULES, Evaluation, evaluate
from anytime.evaluation.source import LogitsFile, open_logits
from anytime.evaluation.stopping import fit_stopping

__all__ = [
    "DEFAULT_RULES",
    "Evaluation",
    "Example",
    "Guarantee",
    "Guarantees",
    "LogitsFile",
    "evaluate",
    "fit_stopping",
    "measure_guarantees",
    "open_logits",
]
