"""Which completion tokens a feature is taken from: does a terminal EOS count, and what stands in for a completion that is only EOS."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from ebft_ds.errors import ConfigError

FeatureEos = Literal["include", "exclude"]


def resolve_feature_eos(method: str, setting: Literal["auto", "include", "exclude"] = "auto") -> FeatureEos:
    """`ebft_feature_eos` for a pooling method: `auto` is `exclude` for `last_token`, otherwise `include`.

    The state at EOS is nearly the same after every text, so last-token features that contain it are matched by ending early
    (METHOD section 2); the mean poolings need EOS to see that a completion ended.

    Raises:
        ConfigError: an unknown setting.
    """
    if setting == "auto":
        return "exclude" if method == "last_token" else "include"
    if setting not in ("include", "exclude"):
        raise ConfigError(f"ebft_feature_eos is {setting!r}; use auto, include or exclude")
    return setting


def feature_length(completion_ids: Sequence[int], eos_ids: Collection[int], which: FeatureEos) -> int:
    """Number of leading completion tokens that count for the feature.

    `include`: all of them. `exclude`: without the terminal EOS. A reference may close with two end tokens (end-of-turn and
    EOS) where a sampled completion stops at the first, so the whole run of end tokens at the end is left out; an end token
    further inside stays. Completion and reference go through this same function. 0 under `exclude`: only EOS, or no token.
    """
    length = len(completion_ids)
    if which == "exclude":
        while length > 0 and completion_ids[length - 1] in eos_ids:
            length -= 1
    return length


def feature_span(prompt_length: int, completion_ids: Sequence[int], eos_ids: Collection[int], which: FeatureEos) -> tuple[int, int] | None:
    """(start, length) of the feature's tokens in prompt + completion, or None for a completion to be left out of its group.

    None: no token at all, so the completion is invalid and is counted (METHOD section 2). A completion that is only EOS stays
    in the group: under `exclude` its feature is taken at the last prompt token, (prompt_length - 1, 1). Without any prompt
    token there is nothing to take it from, and the answer is None as well.
    """
    if not completion_ids:
        return None
    length = feature_length(completion_ids, eos_ids, which)
    if length > 0:
        return prompt_length, length
    return (prompt_length - 1, 1) if prompt_length > 0 else None
