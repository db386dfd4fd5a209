"""Engines: the same model on different backends, stage by stage.

`make_engine` makes one by name or chooses the fastest. Each engine is a module of its own, which imports its backend late.
"""

from anytime.run.engines.base import Engine, Stages
from anytime.run.engines.choose import ENGINES, make_engine

__all__ = ["ENGINES", "Engine", "Stages", "make_engine"]
