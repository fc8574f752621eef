"""From a prompt to a request: its token budget and the whole of its sampling fields."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ebft_ds.config.sections import MethodSection, RolloutSection
from ebft_ds.errors import ConfigError
from ebft_ds.types import Prompt, RolloutRequest, SamplingSpec

_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids")


def token_budget(reference_length: int, *, maximum: int, floor: int, multiplier: float) -> int:
    """A prompt's own budget: min(maximum, max(floor, ceil(multiplier * reference_length))) (METHOD section 4)."""
    return min(maximum, max(floor, math.ceil(multiplier * reference_length)))


def sampling_spec(rollout: RolloutSection, *, stop_token_ids: list[int], seed: int) -> SamplingSpec:
    """All sampling fields of a run, `generation_kwargs` on top of the fields of the same name.

    `stop_token_ids` are the model's (generation configuration), used unless the recipe sets its own.

    Raises:
        ConfigError: an unknown field in generation_kwargs, or a value of the wrong type or range.
    """
    unknown = sorted(set(rollout.generation_kwargs) - set(_GENERATION_FIELDS))
    if unknown:
        raise ConfigError(f"generation_kwargs: unknown {', '.join(unknown)}; known are {', '.join(_GENERATION_FIELDS)}")
    fields: dict[str, Any] = {name: rollout.model_dump()[name] for name in _GENERATION_FIELDS} | rollout.generation_kwargs
    if fields["stop_token_ids"] is None:
        fields["stop_token_ids"] = stop_token_ids
    try:
        spec = msgspec.convert({**fields, "seed": seed}, SamplingSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"generation_kwargs: {error}") from error
    if not (spec.temperature > 0 and 0 < spec.top_p <= 1 and spec.top_k >= 0 and 0 <= spec.min_p < 1):
        raise ConfigError(f"sampling fields out of range (temperature > 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p < 1): {spec}")
    if not spec.stop_token_ids:
        raise ConfigError("no stop_token_ids: the model's generation configuration names no EOS; set stop_token_ids in the recipe")
    return spec


class RequestMaker:
    """Callable (prompt, attempt) -> RolloutRequest for the training feed."""

    def __init__(self, rollout: RolloutSection, method: MethodSection, sampling: SamplingSpec, *, num_samples: int | None = None) -> None:
        self._num_samples = rollout.num_generations if num_samples is None else num_samples
        self._maximum = rollout.max_completion_length
        self._floor = method.ebft_adaptive_min_tokens
        self._multiplier = method.ebft_gt_length_multiplier if method.ebft_adaptive_max_tokens else None
        self._sampling = sampling

    def __call__(self, prompt: Prompt, attempt: int = 0) -> RolloutRequest:
        budget = self._maximum
        if self._multiplier is not None:
            budget = token_budget(len(prompt.reference_ids), maximum=self._maximum, floor=self._floor, multiplier=self._multiplier)
        return RolloutRequest(prompt=prompt, num_samples=self._num_samples, max_new_tokens=budget, sampling=self._sampling, attempt=attempt)
