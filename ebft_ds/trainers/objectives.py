"""Further objectives of a run: called on rank 0, the same rewards on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_ds.config import RecipeConfig
from ebft_ds.errors import ConfigError
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.rewards.functions import RewardFunction, call_reward_function, load_reward_function
from ebft_ds.trainers.assembly import RunParts
from ebft_ds.types import RolloutGroup


class FurtherObjectives:
    """Named reward functions from the recipe, then those given as objects."""

    def __init__(self, specs: Sequence[str], functions: Sequence[RewardFunction], config: RecipeConfig) -> None:
        self._functions = [(spec.rpartition(":")[2], load_reward_function(spec)) for spec in specs]
        self._functions += [(getattr(function, "__name__", type(function).__name__), function) for function in functions]
        self._last: list[Tensor] = []
        weights = config.loss.reward_weights
        if weights is not None and len(weights) != 1 + len(self._functions):
            count = len(self._functions)
            raise ConfigError(f"reward_weights has {len(weights)} entries; feature matching and {count} functions need {1 + count}")
        if self._functions and config.loss.advantage_estimator not in ("ebft_rloo", "group"):
            estimator = config.loss.advantage_estimator
            raise ConfigError(f"advantage_estimator={estimator} cannot be combined with reward functions: use ebft_rloo or group")

    def rewards(self, parts: RunParts, groups: Sequence[RolloutGroup]) -> list[Tensor]:
        """One [G, n] tensor per function, NaN where it had no opinion. Collective."""
        if not self._functions:
            return []
        values = parts.desk.on_main(lambda: self._call_all(parts, groups))
        known = parts.collectives.broadcast(values if parts.collectives.is_main else None, list[list[float]])
        self._last = [torch.tensor(column).view(len(groups), -1) for column in known]
        return self._last

    def _call_all(self, parts: RunParts, groups: Sequence[RolloutGroup]) -> list[list[float]]:
        pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
        decode = parts.tokenizer.decode
        texts = {
            "prompts": [decode(group.prompt.token_ids, skip_special_tokens=True) for group, _ in pairs],
            "completions": [decode(rollout.token_ids, skip_special_tokens=True) for _, rollout in pairs],
            "ground_truth": [decode(group.prompt.reference_ids, skip_special_tokens=True) for group, _ in pairs],
            "completion_ids": [rollout.token_ids for _, rollout in pairs],
        }
        return [call_reward_function(name, function, **texts) for name, function in self._functions]

    def log(self, metrics: MetricsAccumulator) -> None:
        """`rewards/<name>`: mean over completions that got one."""
        for (name, _), values in zip(self._functions, self._last, strict=False):
            known = values[~values.isnan()]
            if known.numel():
                metrics.mean(f"rewards/{name}", float(known.mean()), known.numel())
