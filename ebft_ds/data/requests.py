"""From a prompt of the stream to what is asked of the rollout engine."""

from __future__ import annotations

from typing import Any

from ebft_ds.config.sections import DataSection, MethodSection, RolloutSection
from ebft_ds.data.adaptive import completion_budget
from ebft_ds.errors import ConfigError
from ebft_ds.types import Prompt, RolloutRequest, SamplingSpec

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")


def sampling_spec(rollout: RolloutSection, *, stop_token_ids: list[int], seed: int) -> SamplingSpec:
    """Every sampling field, explicitly. `stop_token_ids` applies unless the recipe sets its own; `generation_kwargs` overrides by name.

    Raises `ConfigError` for a name in `generation_kwargs` that is no sampling field.
    """
    values: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
    }
    for name, value in rollout.generation_kwargs.items():
        if name not in SAMPLING_FIELDS:
            raise ConfigError(f"generation_kwargs: {name} is not a sampling field; known are {', '.join(SAMPLING_FIELDS)}.")
        values[name] = value
    stops = stop_token_ids if rollout.stop_token_ids is None else rollout.stop_token_ids
    return SamplingSpec(**values, stop_token_ids=sorted(set(stops)), seed=seed)


def rollout_request(
    prompt: Prompt,
    *,
    rollout: RolloutSection,
    method: MethodSection,
    data: DataSection,
    sampling: SamplingSpec,
    num_samples: int | None = None,
    attempt: int = 0,
) -> RolloutRequest:
    """The request for one prompt, with its own token budget. `num_samples` defaults to `num_generations`."""
    budget = completion_budget(
        len(prompt.reference_ids),
        max_completion_length=rollout.max_completion_length,
        adaptive=method.ebft_adaptive_max_tokens,
        multiplier=method.ebft_gt_length_multiplier,
        floor=method.ebft_adaptive_min_tokens,
        prompt_length=len(prompt.token_ids),
        max_seq_length=data.max_seq_length,
    )
    samples = rollout.num_generations if num_samples is None else num_samples
    return RolloutRequest(prompt=prompt, num_samples=samples, max_new_tokens=budget, sampling=sampling, attempt=attempt)
