"""Advantages from several rewards per completion (METHOD section 3), as TRL's GRPO defines them.

Statistics are over whole groups, so a caller passes all groups of a step, of all ranks. NaN means that a reward function gave no
value: it is left out of its sums and statistics. A completion without any value gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ebft_ds.errors import ConfigError, NumericsError
from ebft_ds.rewards.statistics import STD_EPS, is_flat, masked_mean, masked_std

AggregationMode = Literal["sum_then_normalize", "normalize_then_sum"]
ScaleRewards = Literal["none", "group", "batch"]


def aggregate_objectives(
    rewards: Float[Tensor, "rows k"],
    group_size: int,
    *,
    weights: Sequence[float] | Float[Tensor, " k"] | None = None,
    mode: AggregationMode | str = "sum_then_normalize",
    scale_rewards: ScaleRewards | str = "group",
    mask: Bool[Tensor, " rows"] | None = None,
) -> Float[Tensor, " rows"]:
    """Group-normalised advantages of N = G * group_size completions under K objectives.

    `sum_then_normalize`: r = sum_k w_k r_k, A = r - mean_group(r), divided by std + 1e-4 of the group or the batch
    (`scale_rewards`; `none`: not divided). `normalize_then_sum` (GDPO): z_k = (r_k - mean_group) / (std_group + 1e-4) per objective,
    s = sum_k w_k z_k, A = (s - mean_batch(s)) / (std_batch(s) + 1e-4); it scales by construction and does not read `scale_rewards`.
    Standard deviations are Bessel-corrected. Source: TRL 1.16 `GRPOTrainer`.

    Args:
        rewards: rows of one group are adjacent. NaN: no value.
        weights: one per objective, default 1.
        mask: valid completions; the others are treated as having no value.

    Returns:
        Advantages in the dtype of `rewards` (computed in float64). Exactly 0 for a completion without value, for a group with fewer
        than two scored completions and for a group whose rewards do not vary.

    Raises:
        ConfigError: rows that are no multiple of group_size, a wrong number of weights, an unknown mode or scale.
        NumericsError: an infinite reward of a valid completion; names row and objective.
    """
    rows, objectives = rewards.shape
    if group_size < 1 or rows % group_size:
        raise ConfigError(f"{rows} rewards do not split into groups of {group_size}: pass whole groups")
    if mode not in ("sum_then_normalize", "normalize_then_sum"):
        raise ConfigError(f"multi_objective_aggregation is {mode!r}; use sum_then_normalize or normalize_then_sum")
    if scale_rewards not in ("none", "group", "batch"):
        raise ConfigError(f"scale_rewards is {scale_rewards!r}; use none, group or batch")
    weight = _weights(weights, objectives, rewards.device)
    valid = torch.ones(rows, dtype=torch.bool, device=rewards.device) if mask is None else mask.bool()
    scored = valid[:, None] & ~rewards.isnan()
    _check_not_infinite(rewards, scored)
    values = rewards.double().masked_fill(~scored, 0.0).view(-1, group_size, objectives)
    scored = scored.view(-1, group_size, objectives)
    combine = _sum_then_normalize if mode == "sum_then_normalize" else _normalize_then_sum
    return combine(values, scored, weight, scale_rewards).view(-1).to(rewards.dtype)


def _sum_then_normalize(
    values: Float[Tensor, "g n k"], scored: Bool[Tensor, "g n k"], weight: Float[Tensor, " k"], scale_rewards: str
) -> Float[Tensor, "g n"]:
    total, any_scored = values @ weight, scored.any(dim=2)
    centred = total - masked_mean(total, any_scored)
    zero = ~any_scored | is_flat(total, any_scored)
    if scale_rewards == "group":
        centred = centred / (masked_std(total, any_scored) + STD_EPS)
    elif scale_rewards == "batch":
        centred = centred / (masked_std(total.view(1, -1), any_scored.view(1, -1)) + STD_EPS)
    return centred.masked_fill(zero, 0.0)


def _normalize_then_sum(
    values: Float[Tensor, "g n k"], scored: Bool[Tensor, "g n k"], weight: Float[Tensor, " k"], scale_rewards: str
) -> Float[Tensor, "g n"]:
    columns, column_scored = values.transpose(1, 2), scored.transpose(1, 2)
    z = (columns - masked_mean(columns, column_scored)) / (masked_std(columns, column_scored) + STD_EPS)
    z = z.masked_fill(~column_scored | is_flat(columns, column_scored), 0.0)
    total, any_scored = z.transpose(1, 2) @ weight, scored.any(dim=2)
    batch, batch_scored = total.view(1, -1), any_scored.view(1, -1)
    # Every column's z sums to 0 in its group, so the batch mean is 0 up to rounding: a group without signal stays at exactly 0.
    advantages = (total - masked_mean(batch, batch_scored)) / (masked_std(batch, batch_scored) + STD_EPS)
    silent = (z == 0.0).all(dim=2).all(dim=1, keepdim=True)
    return advantages.masked_fill(~any_scored | silent, 0.0)


def _weights(weights: Sequence[float] | Tensor | None, objectives: int, device: torch.device) -> Float[Tensor, " k"]:
    if weights is None:
        return torch.ones(objectives, dtype=torch.float64, device=device)
    weight = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if weight.shape != (objectives,):
        raise ConfigError(f"reward_weights has shape {tuple(weight.shape)} for {objectives} objectives: give one weight per objective")
    return weight


def _check_not_infinite(rewards: Float[Tensor, "rows k"], scored: Bool[Tensor, "rows k"]) -> None:
    infinite = scored & rewards.isinf()
    if bool(infinite.any()):
        row, objective = (int(index) for index in infinite.nonzero()[0])
        raise NumericsError(f"infinite reward of completion {row}, objective {objective}: return NaN for a completion that has no value")
