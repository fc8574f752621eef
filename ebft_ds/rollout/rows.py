"""Sequences being generated, and the groups that they complete."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ebft_ds.rollout.sampling import uniform
from ebft_ds.types import FinishReason, Rollout, RolloutGroup, RolloutRequest, TokenSpan


@dataclass(eq=False)
class Row:
    """Sample `sample` of one request, as far as it has come."""

    request: RolloutRequest
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Per token: policy version that it was drawn with."""
    finish_reason: FinishReason | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.request.prompt.token_ids, *self.token_ids)

    def next_uniform(self) -> float:
        """Random number for the token to be drawn now."""
        request = self.request
        return uniform(request.sampling.seed, request.prompt.index, request.attempt, self.sample, len(self.token_ids))

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add a drawn token; a stop id is kept and ends the row."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.request.max_new_tokens:
            self.finish_reason = "length"

    def rollout(self) -> Rollout:
        """The finished row as a rollout."""
        assert self.finish_reason is not None
        return Rollout(token_ids=self.token_ids, logprobs=self.logprobs, spans=spans(self.versions), finish_reason=self.finish_reason)


def spans(versions: list[int]) -> list[TokenSpan]:
    """Runs of equal versions as spans."""
    found: list[TokenSpan] = []
    start = 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            found.append(TokenSpan(start=start, end=end, policy_version=versions[start]))
            start = end
    return found


class PendingGroup:
    """The rows of one request; complete when all have finished."""

    def __init__(self, request: RolloutRequest) -> None:
        self.request = request
        self.rows = [Row(request, sample) for sample in range(request.num_samples)]
        self.started: float | None = None

    def start_clock(self) -> None:
        """Generation time counts from the first row that enters a batch."""
        if self.started is None:
            self.started = time.monotonic()

    @property
    def complete(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    def group(self) -> RolloutGroup:
        """The finished group."""
        assert self.started is not None
        return RolloutGroup(
            prompt=self.request.prompt,
            rollouts=[row.rollout() for row in self.rows],
            attempt=self.request.attempt,
            generation_seconds=time.monotonic() - self.started,
        )
