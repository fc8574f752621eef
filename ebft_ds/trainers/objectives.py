"""Further objectives of a run, in the order of reward_weights: reward models, then reward functions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_ds.config import RecipeConfig
from ebft_ds.config.sections import LossSection
from ebft_ds.errors import ConfigError
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.rewards.functions import CompletionTexts, RewardFunction, call_reward_function, function_name, is_of_a_module
from ebft_ds.rewards.workers import RewardFunctionPool
from ebft_ds.trainers.assembly import RunParts
from ebft_ds.trainers.reward_objective import RewardModelObjective, read_reward_source
from ebft_ds.types import RolloutGroup

logger = logging.getLogger(__name__)


class FurtherObjectives:
    """Reward models and functions of the recipe, and functions given as objects."""

    def __init__(self, config: RecipeConfig, functions: Sequence[RewardFunction]) -> None:
        """Reads what says whether the recipe can work. Errors: ModelError, ConfigError, on every rank."""
        self._config = config
        self._sources = [read_reward_source(model, config) for model in config.loss.reward_models]
        self._functions = FunctionObjectives(config.loss, functions)
        self.names = distinct_names([*(source.name for source in self._sources), *self._functions.names])
        self._models: list[RewardModelObjective] = []
        self._last: list[Tensor] = []
        _check_estimator(config.loss, len(self._sources), len(self._functions.names))

    def check(self) -> None:
        """Not collective: load the functions, and let go of them again. Errors: ConfigError for one that cannot be loaded."""
        try:
            self._functions.start()
        finally:
            self._functions.close()

    def start(self, parts: RunParts) -> None:
        """Collective: load the models, start the functions' processes. Errors: ModelError; ConfigError on rank 0, elsewhere PeerError."""
        if not self._models:
            self._models = [
                RewardModelObjective.load(
                    source,
                    self._config,
                    parts.derived,
                    parts.collectives,
                    prompts=parts.data.train,
                    policy_tokenizer=parts.tokenizer,
                )
                for source in self._sources
            ]
        parts.desk.on_main(self._functions.start)

    def rewards(self, parts: RunParts, groups: Sequence[RolloutGroup]) -> list[Tensor]:
        """One [G, n] tensor per objective, NaN where it has no reward. Collective."""
        self._last = [model.rewards(groups) for model in self._models]
        if self._functions.names:
            values = parts.desk.on_main(lambda: self._functions.call(_texts(parts, groups), len(groups[0].rollouts)))
            known = parts.collectives.broadcast(values if parts.collectives.is_main else None, list[list[float]])
            self._last += [torch.tensor(column).view(len(groups), -1) for column in known]
        return self._last

    def log(self, metrics: MetricsAccumulator) -> None:
        """`rewards/<name>` and `rewards/<name>/std`: over the completions that got one."""
        for name, values in zip(self.names, self._last, strict=False):
            known = values[~values.isnan()]
            if known.numel():
                metrics.mean(f"rewards/{name}", float(known.mean()), known.numel())
            if known.numel() > 1:
                metrics.mean(f"rewards/{name}/std", float(known.std()), known.numel())

    def close(self) -> None:
        """End the functions' processes."""
        self._functions.close()


class FunctionObjectives:
    """Rank 0's reward functions: in worker processes those that the recipe names, objects that are plain functions of a module, and with
    several workers all. Other objects are called in this process, where they keep their state and may be anything, but have no deadline."""

    def __init__(self, loss: LossSection, functions: Sequence[RewardFunction]) -> None:
        everything: list[str | RewardFunction] = [*loss.reward_funcs, *functions]
        several = loss.reward_num_workers > 1
        self._in_pool = [several or isinstance(function, str) or is_of_a_module(function) for function in everything]
        pooled = [function for function, inside in zip(everything, self._in_pool, strict=True) if inside]
        self._inside = [(function_name(f), f) for f in everything if not isinstance(f, str) and not several and not is_of_a_module(f)]
        self._pool = RewardFunctionPool(pooled, loss.reward_num_workers, loss.reward_timeout) if pooled else None
        self.names = [function_name(function) for function in everything]

    def start(self) -> None:
        """Rank 0. ConfigError: a function that cannot be loaded."""
        if self._pool is not None:
            self._pool.close()
            self._pool.start()
        if self._inside:
            names = ", ".join(name for name, _ in self._inside)
            logger.info("called in this process, without reward_timeout, since they are no plain functions of a module: %s", names)

    def call(self, texts: CompletionTexts, group_size: int) -> list[list[float]]:
        """Rank 0: N rewards per function. DataError: one that failed, hung or died."""
        pooled = iter(self._pool.call(texts, group_size=group_size) if self._pool is not None else [])
        inside = (call_reward_function(name, function, texts) for name, function in self._inside)
        return [next(pooled if in_pool else inside) for in_pool in self._in_pool]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def distinct_names(names: Sequence[str]) -> list[str]:
    """The second `length` becomes `length_2`: each objective has metrics of its own."""
    seen: list[str] = []
    for name in names:
        count, new = 1, name
        while new in seen:
            count, new = count + 1, f"{name}_{count + 1}"
        seen.append(new)
    return seen


def _check_estimator(loss: LossSection, models: int, functions: int) -> None:
    """Functions given as objects are not known to the checks of a recipe alone."""
    if loss.reward_weights is not None and len(loss.reward_weights) != 1 + models + functions:
        raise ConfigError(
            f"reward_weights has {len(loss.reward_weights)} entries; feature matching, {models} reward models and {functions} functions "
            f"need {1 + models + functions}"
        )
    if models + functions and loss.advantage_estimator not in ("ebft_rloo", "group"):
        raise ConfigError(
            f"advantage_estimator={loss.advantage_estimator} cannot be combined with further objectives: use ebft_rloo or group"
        )


def _texts(parts: RunParts, groups: Sequence[RolloutGroup]) -> CompletionTexts:
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    decode = parts.tokenizer.decode
    return CompletionTexts(
        prompts=[decode(group.prompt.token_ids, skip_special_tokens=True) for group, _ in pairs],
        completions=[decode(rollout.token_ids, skip_special_tokens=True) for _, rollout in pairs],
        ground_truth=[decode(group.prompt.reference_ids, skip_special_tokens=True) for group, _ in pairs],
        completion_ids=[rollout.token_ids for _, rollout in pairs],
    )
