"""Further objectives: user functions `package.module:function` that score completions as text.

A function is called with keyword arguments prompts, completions, ground_truth (lists of N strings), completion_ids (N lists of
ids) and must return N floats, None (or NaN) where it has no opinion: that completion is left out of this objective alone.
"""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import msgspec

from ebft_ds.errors import ConfigError, DataError

RewardFunction = Callable[..., Sequence[float | None]]


class CompletionTexts(msgspec.Struct, frozen=True):
    """What reward functions are given: N completions, those of one prompt together."""

    prompts: list[str]
    completions: list[str]
    ground_truth: list[str]
    completion_ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.completions)

    def part(self, start: int, end: int) -> CompletionTexts:
        """Completions [start, end)."""
        return CompletionTexts(
            self.prompts[start:end], self.completions[start:end], self.ground_truth[start:end], self.completion_ids[start:end]
        )


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


def function_name(function: RewardFunction | str) -> str:
    """What it is called in messages and metrics."""
    if isinstance(function, str):
        return function.rpartition(":")[2]
    return getattr(function, "__name__", type(function).__name__)


def is_of_a_module(function: RewardFunction) -> bool:
    """Another process that imports its module gets the very same function."""
    if not isinstance(function, FunctionType) or function.__module__ == "__main__":
        return False
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


def pickled_function(function: RewardFunction) -> bytes:
    """For another process. ConfigError if that process could not make the function of it again."""
    name = function_name(function)
    try:
        content = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises for lambdas, closures, open files
        raise ConfigError(
            f"reward function {name} cannot be sent to a worker process ({error}): define it at the top of a module, or set "
            "reward_num_workers: 1, which calls function objects in the trainer's process"
        ) from error
    if b"__main__" in content:
        raise ConfigError(
            f"reward function {name} is defined in the script itself, which worker processes do not run: move it into a module, or set "
            "reward_num_workers: 1, which calls function objects in the trainer's process"
        )
    return content


def call_reward_function(name: str, function: RewardFunction, texts: CompletionTexts) -> list[float]:
    """N rewards, NaN where the function gave none. A function that raises, or returns something else, is a DataError naming it."""
    try:
        values = function(
            prompts=texts.prompts, completions=texts.completions, ground_truth=texts.ground_truth, completion_ids=texts.completion_ids
        )
        rewards = [math.nan if value is None else float(value) for value in values]
    except Exception as error:
        raise DataError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    if len(rewards) != len(texts):
        raise DataError(f"reward function {name} returned {len(rewards)} rewards for {len(texts)} completions")
    if any(math.isinf(value) for value in rewards):
        raise DataError(f"reward function {name} returned an infinite reward")
    return rewards
