"""A clock that only advances by `sleep`, and engines with given stage times."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.run.engines.running import Joinable

PATIENCE = 20.0
"""Real seconds after which a test that hangs fails."""


class FakeClock:
    """Time stands still until `sleep`. A sleep past the end of a caller's wait lets the caller run first.

    Args:
        waited: Whether stages begin only once a caller waits for them, so that a test always takes the same path.
    """

    def __init__(self, *, waited: bool = False) -> None:
        self.time = 1000.0
        self.waits: list[float | None] = []
        self._waited = waited
        self._until: float | None = None
        self._waiting = threading.Event()
        self._crossed = threading.Event()
        self._resumed = threading.Event()

    def now(self) -> float:
        return self.time

    def wait(self, gate: Any, seconds: float | None) -> bool:
        self.waits.append(seconds)
        self._until = None if seconds is None else self.time + seconds
        self._crossed.clear()
        self._waiting.set()
        try:
            while not gate.acquire(timeout=0.001):
                if self._crossed.is_set() or (self._until is not None and self.time >= self._until):
                    return False
            gate.release()
            return True
        finally:
            self._waiting.clear()

    def sleep(self, seconds: float) -> None:
        """Advance the time, as a stage does."""
        if self._waited:
            assert self._waiting.wait(PATIENCE)
        target = self.time + seconds
        if self._waiting.is_set() and self._until is not None and self._until < target:
            self.time = self._until
            self._crossed.set()
            assert self._resumed.wait(PATIENCE)
            self._resumed.clear()
        self.time = max(self.time, target)

    def resume(self) -> None:
        """Let a stage that was given up run to its end."""
        self._resumed.set()


class FakeEngine:
    """Gives logits from a tensor `(exits, batch, classes)`.

    Args:
        logits: What the stages return; inputs are the row numbers, `(batch, 1)`.
        seconds: How long each stage takes.
        clock: The clock that they advance.
    """

    name = "fake"

    def __init__(self, logits: Tensor, seconds: Sequence[float] = (), clock: FakeClock | None = None) -> None:
        self.logits, self.seconds, self.clock = logits, list(seconds) or [0.0] * len(logits), clock
        self.num_exits = len(logits)
        self.begun: list[int] = []
        self.kept: list[list[int]] = []
        self.open = 0
        self.fail_at: int | None = None

    @property
    def rows(self) -> Tensor:
        """The inputs."""
        return torch.arange(self.logits.shape[1])[:, None]

    def begin(self, x: Tensor) -> FakeStages:
        self.open += 1
        return FakeStages(self, x)


class FakeStages:
    def __init__(self, engine: FakeEngine, x: Tensor) -> None:
        self._engine, self._rows, self._exit = engine, x[:, 0], 0

    def advance(self) -> Tensor:
        engine, exit = self._engine, self._exit
        engine.begun.append(exit)
        if engine.clock is not None:
            engine.clock.sleep(engine.seconds[exit])
        if engine.fail_at == exit:
            raise ArithmeticError("a stage that fails")
        self._exit += 1
        return engine.logits[exit, self._rows]

    def keep(self, rows: Tensor) -> None:
        self._engine.kept.append(self._rows[rows].tolist())
        self._rows = self._rows[rows]

    def close(self) -> None:
        self._engine.open -= 1


class JoiningEngine(FakeEngine):
    """As `FakeEngine`, with runs that share batches; a batch takes longer than one row, and less than rows one by one."""

    joins = True

    def __init__(self, logits: Tensor, seconds: Sequence[float] = (), clock: FakeClock | None = None) -> None:
        super().__init__(logits, seconds, clock)
        self.batches: list[tuple[int, int]] = []
        self.broken: set[int] = set()

    def begin(self, x: Tensor) -> JoinableStages:  # type: ignore[override]
        return JoinableStages(self, x)


class JoinableStages(Joinable[Tensor]):
    """Refuses rows that are broken, and notes each stage with its number of rows."""

    def __init__(self, engine: JoiningEngine, x: Tensor) -> None:
        super().__init__(engine.num_exits, len(x))
        self._engine, self._carry = engine, (x,)

    def _run(self, exit: int) -> Tensor:
        engine, rows = self._engine, self._carry[0][:, 0]
        engine.begun.append(exit)
        engine.batches.append((exit + 1, len(rows)))
        if engine.clock is not None:
            engine.clock.sleep(engine.seconds[exit] * (0.5 + 0.5 * len(rows)))
        if engine.fail_at == exit and engine.broken & set(rows.tolist()):
            raise ArithmeticError("a stage that fails")
        return engine.logits[exit, rows]
