"""Seconds per part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """`with timer("score"): ...` adds to `time/score` of the current step. Parts may repeat and nest; each counts its own time.

    `synchronize` (torch.cuda.synchronize, say) makes the parts exact on an accelerator, at the price of waiting for it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._step_start = clock()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.add(part, self._now() - start)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`time/<part>` of the step, with `time/step` for all of it since the last call; the next step starts."""
        now = self._now()
        taken = {f"time/{part}": seconds for part, seconds in self._seconds.items()} | {"time/step": now - self._step_start}
        self._seconds, self._step_start = {}, now
        return taken

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()
