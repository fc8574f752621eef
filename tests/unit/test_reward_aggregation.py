"""Several objectives: the numbers of TRL, and what masks, constants and bad input do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from ebft_ds.errors import ConfigError, NumericsError
from ebft_ds.rewards import aggregate_objectives as unchecked_aggregate

aggregate_objectives = jaxtyped(typechecker=beartype)(unchecked_aggregate)

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "aggregation_vectors.json").read_text())["cases"]
NAN = float("nan")


def tensor(rows: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([[NAN if v == "nan" else v for v in row] for row in rows], dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']}-{c['mode']}-{c['scale_rewards']}")
def test_trl_cases(case: dict[str, Any]) -> None:
    def run(dtype: torch.dtype) -> torch.Tensor:
        return aggregate_objectives(
            tensor(case["rewards_per_func"], dtype),
            case["num_generations"],
            weights=case["weights"],
            mode=case["mode"],
            scale_rewards=case["scale_rewards"],
        )

    torch.testing.assert_close(run(torch.float64), torch.tensor(case["float64_ref_advantages"], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(run(torch.float32), torch.tensor(case["advantages"]), rtol=0, atol=1e-5)


def test_all_cases_are_there() -> None:
    assert len(CASES) == 60


@pytest.mark.parametrize("mode", ["sum_then_normalize", "normalize_then_sum"])
def test_masked_completion_equals_one_without_values(mode: str) -> None:
    rewards = torch.rand(8, 2, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True] * 2)
    blank = rewards.clone()
    blank[~mask] = NAN
    torch.testing.assert_close(
        aggregate_objectives(rewards, 4, mode=mode, mask=mask), aggregate_objectives(blank, 4, mode=mode), rtol=0, atol=0
    )
    assert aggregate_objectives(rewards, 4, mode=mode, mask=mask)[~mask].eq(0).all()


@pytest.mark.parametrize("mode", ["sum_then_normalize", "normalize_then_sum"])
def test_group_without_variance_is_exactly_zero_beside_another(mode: str) -> None:
    rewards = torch.cat([torch.tensor([[0.1, 0.7]] * 4), torch.rand(4, 2)]).double()
    advantages = aggregate_objectives(rewards, 4, mode=mode)
    assert advantages[:4].eq(0).all()
    assert advantages[4:].abs().min() > 0


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(["sum_then_normalize", "normalize_then_sum"]))
def test_permuting_groups_and_completions_permutes_advantages(seed: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(3, 4, 2, generator=generator, dtype=torch.float64)
    groups, rows = torch.randperm(3, generator=generator), torch.randperm(4, generator=generator)
    straight = aggregate_objectives(rewards.flatten(0, 1), 4, mode=mode, scale_rewards="batch").view(3, 4)
    mixed = aggregate_objectives(rewards[groups][:, rows].flatten(0, 1), 4, mode=mode, scale_rewards="batch").view(3, 4)
    torch.testing.assert_close(mixed, straight[groups][:, rows], rtol=0, atol=1e-10)


def test_refusals() -> None:
    rewards = torch.rand(6, 2)
    with pytest.raises(ConfigError, match="groups of 4"):
        aggregate_objectives(rewards, 4)
    with pytest.raises(ConfigError, match="2 objectives"):
        aggregate_objectives(rewards, 3, weights=[1.0])
    with pytest.raises(ConfigError, match="multi_objective_aggregation"):
        aggregate_objectives(rewards, 3, mode="mean")
    with pytest.raises(ConfigError, match="scale_rewards"):
        aggregate_objectives(rewards, 3, scale_rewards="global")
    rewards[4, 1] = float("inf")
    with pytest.raises(NumericsError, match="completion 4, objective 1"):
        aggregate_objectives(rewards, 3)
    aggregate_objectives(rewards, 3, mask=torch.arange(6) != 4)
