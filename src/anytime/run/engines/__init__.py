"""Engines: the same model on different machinery, stage by stage.

`make_engine` makes one by name or chooses the quickest. Each engine is a module of its own, which loads what it needs late.
"""

from anytime.run.engines.base import Engine, Stages
from anytime.run.engines.choose import ENGINES, make_engine

__all__ = ["ENGINES", "Engine", "Stages", "make_engine"]
