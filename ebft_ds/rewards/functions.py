"""Further objectives: user functions `package.module:function` that score completions as text.

A function is called with keyword arguments prompts, completions, ground_truth (lists of N strings), completion_ids (N lists of
ids) and must return N floats, None (or NaN) where it has no opinion: that completion is left out of this objective alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from ebft_ds.errors import ConfigError, DataError

RewardFunction = Callable[..., Sequence[float | None]]


def load_reward_function(spec: str) -> RewardFunction:
    """The function that `package.module:function` names; ConfigError if there is none."""
    module_name, _, name = spec.partition(":")
    try:
        function: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward_funcs: {spec!r} cannot be imported ({error}); give package.module:function") from error
    if not callable(function):
        raise ConfigError(f"reward_funcs: {spec!r} is not callable")
    return function  # type: ignore[no-any-return]


def call_reward_function(
    name: str,
    function: RewardFunction,
    *,
    prompts: list[str],
    completions: list[str],
    ground_truth: list[str],
    completion_ids: list[list[int]],
) -> list[float]:
    """N rewards, NaN where the function gave none. A function that raises, or returns something else, is a DataError naming it."""
    try:
        values = function(prompts=prompts, completions=completions, ground_truth=ground_truth, completion_ids=completion_ids)
    except Exception as error:  # user code may raise anything
        raise DataError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    if len(values) != len(completions):
        raise DataError(f"reward function {name} returned {len(values)} rewards for {len(completions)} completions")
    rewards = [math.nan if value is None else float(value) for value in values]
    if any(math.isinf(value) for value in rewards):
        raise DataError(f"reward function {name} returned an infinite reward")
    return rewards
