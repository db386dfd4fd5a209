"""From logits to metrics: reads files and runs the rules on them block by block."""

from anytime.combine.named import DEFAULT_RULES
from anytime.evaluation.collect import collect_logits
from anytime.evaluation.evaluating import evaluate
from anytime.evaluation.examples import Example
from anytime.evaluation.guarantees import Guarantee, Guarantees, measure_guarantees
from anytime.evaluation.measure import Evaluation
from anytime.evaluation.source import CollectedLogits, LogitsFile, open_logits
from anytime.evaluation.stopping import fit_stopping

__all__ = [
    "DEFAULT_RULES",
    "CollectedLogits",
    "Evaluation",
    "Example",
    "Guarantee",
    "Guarantees",
    "LogitsFile",
    "collect_logits",
    "evaluate",
    "fit_stopping",
    "measure_guarantees",
    "open_logits",
]
