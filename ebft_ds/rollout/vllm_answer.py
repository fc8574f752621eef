"""From a server's answer to rollouts. What is not a whole, finite, labelled completion is a lost request: never a completion."""

from __future__ import annotations

import math
from collections.abc import Callable

from ebft_ds.errors import RolloutError
from ebft_ds.sidecar.api import Choice, GenerateAnswer, VersionSpan
from ebft_ds.types import FinishReason, Rollout, RolloutRequest, TokenSpan

MISSING_LOGPROB = -9999.0
"""vLLM writes this where a log-prob is NaN, -inf or not there: finite, and made up."""


class UnusableAnswer(RolloutError):
    """An answer that is no completion: cut, aborted, damaged. The request may be sent again."""


class ForeignVersion(UnusableAnswer):
    """Tokens sampled by weights that are not ours, or older than the request."""


def to_rollouts(answer: GenerateAnswer, request: RolloutRequest, *, vocab_size: int, version_of: Callable[[str], int]) -> list[Rollout]:
    """The answer's completions, in the order of their seeds.

    Args:
        version_of: a span's version name -> policy version; raises ForeignVersion for one that is not to be taken.

    Raises:
        UnusableAnswer: names sample and reason.
    """
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(request.num_samples)):
        raise UnusableAnswer(f"samples {[choice.index for choice in choices]} came back instead of {request.num_samples}")
    return [_rollout(choice, request, vocab_size, version_of) for choice in choices]


def _rollout(choice: Choice, request: RolloutRequest, vocab_size: int, version_of: Callable[[str], int]) -> Rollout:
    where = f"sample {choice.index}"
    tokens = choice.token_ids
    finish_reason = _finish_reason(choice, request, where)
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UnusableAnswer(f"{where}: token id {outside} is outside the vocabulary of {vocab_size}")
    return Rollout(
        token_ids=tokens,
        logprobs=_logprobs(choice, where),
        spans=_spans(choice.weight_versions, len(tokens), version_of, where),
        finish_reason=finish_reason,
    )


def _finish_reason(choice: Choice, request: RolloutRequest, where: str) -> FinishReason:
    """The reason given must be the one that the tokens show: a server that was cut short says "stop" as well."""
    tokens, stops = choice.token_ids, set(request.sampling.stop_token_ids)
    shown: FinishReason | None = None
    if tokens and tokens[-1] in stops:
        shown = "stop"
    elif len(tokens) == request.max_new_tokens:
        shown = "length"
    if choice.finish_reason != shown or len(tokens) > request.max_new_tokens or stops.intersection(tokens[:-1]):
        raise UnusableAnswer(
            f"{where}: finish reason {choice.finish_reason!r} after {len(tokens)} of at most {request.max_new_tokens} tokens, "
            f"of which the last is {'a' if shown == 'stop' else 'no'} stop id"
        )
    return shown


def _logprobs(choice: Choice, where: str) -> list[float]:
    content = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise UnusableAnswer(f"{where}: {len(content)} log-probs that do not go with its {len(choice.token_ids)} tokens")
    logprobs = [entry.logprob for entry in content]
    for position, value in enumerate(logprobs):
        if not math.isfinite(value) or value <= MISSING_LOGPROB:
            raise UnusableAnswer(f"{where}: log-prob {value} at position {position}")
    return logprobs


def _spans(found: list[VersionSpan] | None, length: int, version_of: Callable[[str], int], where: str) -> list[TokenSpan]:
    """Neighbours of one version become one span."""
    spans: list[TokenSpan] = []
    end = 0
    for span in found or []:
        if span.start != end or span.end < span.start:
            raise UnusableAnswer(f"{where}: version span [{span.start}, {span.end}) does not continue at {end}")
        end = span.end
        version = version_of(span.version)
        if spans and spans[-1].policy_version == version:
            spans[-1] = TokenSpan(spans[-1].start, span.end, version)
        elif span.end > span.start:
            spans.append(TokenSpan(span.start, span.end, version))
    if end != length:
        raise UnusableAnswer(f"{where}: version spans cover {end} of {length} tokens")
    return spans
