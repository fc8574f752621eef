"""Is a group that came back the group that was asked for? A wrong one ends the run: no reward is ever made up for it."""

from __future__ import annotations

import math

from ebft_ds.errors import RolloutError
from ebft_ds.types import Rollout, RolloutGroup, RolloutRequest


def check_group(group: RolloutGroup, request: RolloutRequest, vocab_size: int) -> None:
    """Compare a group with its request. Raises RolloutError naming prompt, sample and what is wrong."""
    where = f"rollout group of prompt {request.prompt.prompt_id} (index {request.prompt.index}, attempt {request.attempt})"
    if group.attempt != request.attempt:
        raise RolloutError(f"{where}: came back as attempt {group.attempt}")
    if group.prompt != request.prompt:
        raise RolloutError(f"{where}: the prompt or its reference came back changed")
    if len(group.rollouts) != request.num_samples:
        raise RolloutError(f"{where}: {len(group.rollouts)} rollouts instead of {request.num_samples}")
    for sample, rollout in enumerate(group.rollouts):
        problem = _problem(rollout, vocab_size)
        if problem:
            raise RolloutError(f"{where}, sample {sample}: {problem}")


def _problem(rollout: Rollout, vocab_size: int) -> str | None:
    length = len(rollout.token_ids)
    if len(rollout.logprobs) != length:
        return f"{length} tokens but {len(rollout.logprobs)} log-probs"
    for position, (token, logprob) in enumerate(zip(rollout.token_ids, rollout.logprobs, strict=True)):
        if not 0 <= token < vocab_size:
            return f"token id {token} at position {position} is outside the vocabulary of {vocab_size}"
        if not math.isfinite(logprob):
            return f"log-prob {logprob} at position {position}"
    end = 0
    for span in rollout.spans:
        if span.start != end or span.end < span.start:
            return f"span [{span.start}, {span.end}) does not continue at {end}"
        end = span.end
    if end != length:
        return f"spans cover {end} of {length} tokens"
    return None
