"""Advantage estimators and the joining of further objectives."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from ebft_ds import policy
from ebft_ds.errors import ConfigError, NumericsError
from ebft_ds.features import unit_normalize
from ebft_ds.rewards import FeatureRewards, group_feature_rewards

group_advantages = jaxtyped(typechecker=beartype)(policy.group_advantages)
combine_advantages = jaxtyped(typechecker=beartype)(policy.combine_advantages)
zero_variance_groups = jaxtyped(typechecker=beartype)(policy.zero_variance_groups)
F64 = torch.float64


def scored(seed: int = 0, g: int = 3, n: int = 4, mask: torch.Tensor | None = None) -> FeatureRewards:
    generator = torch.Generator().manual_seed(seed)
    completions = unit_normalize(torch.randn(g, n, 6, generator=generator, dtype=F64))
    references = unit_normalize(torch.randn(g, 6, generator=generator, dtype=F64))
    return group_feature_rewards(completions, references, alignment_coef=1.5, diversity_coef=0.5, mask=mask)


def test_ebft_rloo_is_the_stated_formula() -> None:
    rewards = scored()
    a, d, n = 1.5 * rewards.alignment, 0.5 * rewards.diversity, 4
    total_a, total_d = a.sum(1, keepdim=True), d.sum(1, keepdim=True)
    wanted = (a - d) - ((total_a - a) / (n - 1) - (total_d - 2 * d) / (n - 2))
    torch.testing.assert_close(group_advantages(rewards), wanted, rtol=0, atol=1e-14)


def test_ebft_rloo_with_two_completions_has_no_diversity_baseline() -> None:
    rewards = scored(n=2)
    a, d = 1.5 * rewards.alignment, 0.5 * rewards.diversity
    torch.testing.assert_close(group_advantages(rewards), a - a.flip(1) - d, rtol=0, atol=1e-14)


def test_plain_estimators() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0]], dtype=F64)
    assert group_advantages(rewards, estimator="reinforce").tolist() == [[1.0, 2.0, 6.0]]
    assert group_advantages(rewards, estimator="group").tolist() == [[-2.0, -1.0, 3.0]]
    assert group_advantages(rewards, estimator="rloo").tolist() == [[-3.0, -1.5, 4.5]]


def test_scaling() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.1, 0.2]], dtype=F64)
    centred = rewards - rewards.mean(1, keepdim=True)
    by_group = group_advantages(rewards, estimator="group", scale_rewards="group")
    torch.testing.assert_close(by_group, centred / (rewards.std(1, keepdim=True) + 1e-4))
    torch.testing.assert_close(
        group_advantages(rewards, estimator="group", scale_rewards="batch"), centred / (rewards.flatten().std() + 1e-4)
    )


def test_scaling_counts_valid_completions_only() -> None:
    rewards = torch.tensor([[1.0, 2.0, torch.nan, 6.0], [torch.nan, 0.0, 0.1, 0.2]], dtype=F64)
    mask = ~rewards.isnan()
    plain = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.1, 0.2]], dtype=F64)
    for estimator in ("rloo", "group", "reinforce"):
        for scale in ("none", "group", "batch"):
            masked = group_advantages(rewards, estimator=estimator, scale_rewards=scale, mask=mask)
            wanted = group_advantages(plain, estimator=estimator, scale_rewards=scale)
            torch.testing.assert_close(masked[mask], wanted.flatten())
            assert masked[~mask].eq(0).all()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("estimator", ["rloo", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_zero_variance_groups_get_exactly_zero(estimator: str, scale: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([[0.1] * 3, [0.3, 0.2, 0.1]], dtype=dtype)
    rewards[0, 1] = torch.nextafter(rewards[0, 1], torch.tensor(1.0, dtype=dtype))  # rounding is no variance
    advantages = group_advantages(rewards, estimator=estimator, scale_rewards=scale)
    assert advantages[0].eq(0).all()
    assert advantages[1].abs().max() > 0
    assert zero_variance_groups(rewards).tolist() == [True, False]


def test_small_coefficients_are_not_taken_for_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    completions = unit_normalize(torch.randn(2, 4, 6, generator=generator))
    references = unit_normalize(torch.randn(2, 6, generator=generator))
    small = group_advantages(group_feature_rewards(completions, references, alignment_coef=1e-7, diversity_coef=1e-7))
    torch.testing.assert_close(1e7 * small, group_advantages(group_feature_rewards(completions, references)), rtol=1e-4, atol=1e-5)


def test_masks_of_zeros_and_ones() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0, torch.nan]])
    found = policy.group_advantages(rewards, estimator="group", mask=torch.tensor([[1, 1, 1, 0]]))
    assert found.tolist() == [[-2.0, -1.0, 3.0, 0.0]]


def test_reinforce_keeps_a_constant_reward_unless_it_is_scaled() -> None:
    rewards = torch.tensor([[0.5, 0.5], [0.1, 0.2]], dtype=F64)
    assert group_advantages(rewards, estimator="reinforce")[0].tolist() == [0.5, 0.5]
    assert group_advantages(rewards, estimator="reinforce", scale_rewards="group")[0].tolist() == [0.0, 0.0]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), estimator=st.sampled_from(["ebft_rloo", "rloo", "group", "reinforce"]))
def test_groups_are_independent_unless_scaled_by_batch(seed: int, estimator: str) -> None:
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) > 0.3
    rewards = scored(seed, mask=mask)
    together = group_advantages(rewards, estimator=estimator, scale_rewards="group")
    assert together[~mask].eq(0).all()
    assert together.isfinite().all()
    reward = rewards.reward
    if estimator != "ebft_rloo":
        parts = [group_advantages(reward[g : g + 1], estimator=estimator, scale_rewards="group", mask=mask[g : g + 1]) for g in range(3)]
        torch.testing.assert_close(torch.cat(parts), together)


def test_refusals() -> None:
    rewards = scored()
    with pytest.raises(ConfigError, match="ebft_rloo needs the FeatureRewards"):
        group_advantages(rewards.reward)
    with pytest.raises(ConfigError, match="advantage_estimator"):
        group_advantages(rewards, estimator="gae")
    with pytest.raises(ConfigError, match="scale_rewards"):
        group_advantages(rewards, scale_rewards="global")
    other = rewards.mask.clone()
    other[0, 0] = False
    with pytest.raises(ConfigError, match="mask differs"):
        group_advantages(rewards, mask=other)
    torch.testing.assert_close(group_advantages(rewards, mask=rewards.mask), group_advantages(rewards))
    broken = rewards.reward.clone()
    broken[1, 2] = torch.nan
    with pytest.raises(NumericsError, match="group 1, completion 2"):
        group_advantages(broken, estimator="rloo")


def test_combined_objectives() -> None:
    ebft = group_advantages(scored())
    first, second = torch.rand(3, 4, dtype=F64), torch.rand(3, 4, dtype=F64)
    wanted = 2.0 * ebft + 0.5 * group_advantages(first, estimator="rloo") - group_advantages(second, estimator="rloo")
    torch.testing.assert_close(combine_advantages(ebft, [first, second], [2.0, 0.5, -1.0]), wanted)
    torch.testing.assert_close(combine_advantages(ebft, [], [1.0]), ebft)
    with pytest.raises(ConfigError, match="give 3"):
        combine_advantages(ebft, [first, second], [1.0, 1.0])


def test_objective_without_value_leaves_the_others() -> None:
    ebft = group_advantages(scored())
    other = torch.rand(3, 4, dtype=F64)
    other[0, 1] = torch.nan
    combined = combine_advantages(ebft, [other], [1.0, 1.0])
    assert combined[0, 1] == ebft[0, 1]
    wanted = group_advantages(other[:1, [0, 2, 3]], estimator="rloo")
    torch.testing.assert_close(combined[:1, [0, 2, 3]] - ebft[:1, [0, 2, 3]], wanted)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2] = torch.tensor([True, False, False, False])
    assert combine_advantages(ebft, [other], [0.0, 1.0], mask=mask)[2].eq(0).all()
