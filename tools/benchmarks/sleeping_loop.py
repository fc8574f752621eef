"""A rollout loop with a chosen speed instead of a model: groups of random tokens, one after the other, each after a fixed time."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ebft_ds.rollout.loop import LoopContext, LoopHealth
from ebft_ds.types import Rollout, RolloutGroup, RolloutRequest, TokenSpan


class SleepingLoop:
    """An engine that is always busy while it has requests, and takes `seconds_per_group` for each."""

    def __init__(self, context: LoopContext, seconds_per_group: float) -> None:
        self._context = context
        self._seconds = seconds_per_group
        self._random = random.Random(context.seed)
        self._waiting: deque[tuple[float, int, RolloutRequest]] = deque()
        """(ready at, policy version, request)."""
        self._free_at = 0.0
        self._finished = 0

    def start(self) -> None:
        pass

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            self._free_at = max(self._free_at, time.monotonic()) + self._seconds
            self._waiting.append((self._free_at, self._context.engine.policy_version, request))

    def cancel(self, indices: Sequence[int]) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[2].prompt.index not in indices)

    def set_policy_version(self, version: int) -> None:
        pass

    def groups(self) -> list[RolloutGroup]:
        found = []
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, version, request = self._waiting.popleft()
            rollouts = [self._rollout(request.max_new_tokens, version) for _ in range(request.num_samples)]
            found.append(RolloutGroup(request.prompt, rollouts, request.attempt, self._seconds))
        self._finished += len(found)
        return found

    def health(self) -> LoopHealth:
        return LoopHealth(progress=self._finished, pending=len(self._waiting))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        self._waiting.clear()

    def _rollout(self, length: int, version: int) -> Rollout:
        ids = [self._random.randrange(self._context.vocab_size) for _ in range(length)]
        return Rollout(ids, [-3.0] * length, [TokenSpan(0, length, version)], "length")
