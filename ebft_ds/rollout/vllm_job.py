"""One group on its way through the servers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from ebft_ds.rollout.vllm_server import Server
from ebft_ds.types import Rollout, RolloutGroup, RolloutRequest

RETRY_SECONDS = 0.25
"""Pause before a second attempt; doubled with each further one, up to RETRY_LIMIT_SECONDS."""
RETRY_LIMIT_SECONDS = 10.0
HOPELESS_FACTOR = 4


@dataclass(eq=False)
class Job:
    """A request and its attempts."""

    request: RolloutRequest
    started: float | None = None
    """When it was first sent."""
    sends: int = 0
    failures: int = 0
    failures_alone: int = 0
    """Failures in a row in which no request of the engine got an answer."""
    server: Server | None = None
    """Where it is now."""
    task: asyncio.Task[None] | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    """Of the attempt that succeeded."""
    dropped: bool = False
    """Cancelled by whoever asked."""
    _answers_seen: int = 0

    def enter(self, server: Server, task: asyncio.Task[None]) -> None:
        """It is sent to `server`."""
        self.server, self.task = server, task
        self.sends += 1
        self.started = self.started or time.monotonic()
        server.in_flight += 1
        server.samples += self.request.num_samples

    def leave(self) -> None:
        """The attempt is over."""
        assert self.server is not None
        self.server.in_flight -= 1
        self.server.samples -= self.request.num_samples
        self.server = self.task = None

    def failed(self, answers: int) -> None:
        """Count a failure. `answers`: good answers that the engine has had so far."""
        self.failures += 1
        self.failures_alone = self.failures_alone + 1 if self._answers_seen == answers else 1
        self._answers_seen = answers

    def hopeless(self, retries: int) -> bool:
        """`retries` attempts more than the first failed with nothing else getting through, or far more while others did."""
        return self.failures_alone > retries or self.failures > HOPELESS_FACTOR * (retries + 1)

    @property
    def pause(self) -> float:
        """Seconds until the next attempt."""
        return min(RETRY_LIMIT_SECONDS, RETRY_SECONDS * 2.0 ** (self.failures_alone - 1))

    def group(self) -> RolloutGroup:
        """The finished group."""
        assert self.started is not None
        return RolloutGroup(
            prompt=self.request.prompt,
            rollouts=self.rollouts,
            attempt=self.request.attempt,
            generation_seconds=time.monotonic() - self.started,
        )
