"""Properties of the group reward: permutation, masks, zero vectors, NaN, weights, dtypes."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, jaxtyped
from torch import Tensor

from ebft_ds import rewards
from ebft_ds.errors import NumericsError
from ebft_ds.features import unit_normalize
from ebft_ds.policy import group_advantages

group_feature_rewards = jaxtyped(typechecker=beartype)(rewards.group_feature_rewards)
WHITENINGS = [None, "feature", "sample"]
seeds = st.integers(0, 2**31)


def batch(seed: int, g: int = 3, n: int = 4, d: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    completions = unit_normalize(torch.randn(g, n, d, generator=generator, dtype=torch.float64))
    references = unit_normalize(torch.randn(g, d, generator=generator, dtype=torch.float64))
    return completions.to(dtype), references.to(dtype)


@pytest.mark.parametrize("whitening", WHITENINGS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_permuting_a_group_permutes_results(whitening: str | None, seed: int) -> None:
    completions, references = batch(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    plain = group_feature_rewards(completions, references, whitening=whitening)
    mixed = group_feature_rewards(completions[:, order], references, whitening=whitening)
    close = {"rtol": 0.0, "atol": 1e-7}
    torch.testing.assert_close(mixed.reward, plain.reward[:, order], **close)
    torch.testing.assert_close(mixed.fm_loss_unbiased, plain.fm_loss_unbiased, **close)
    torch.testing.assert_close(mixed.cfm_loss, plain.cfm_loss, **close)
    torch.testing.assert_close(group_advantages(mixed), group_advantages(plain)[:, order], **close)


@pytest.mark.parametrize("whitening", WHITENINGS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_groups_do_not_see_each_other(whitening: str | None, seed: int) -> None:
    """So any division of groups over ranks gives the same rewards."""
    completions, references = batch(seed)
    together = group_feature_rewards(completions, references, whitening=whitening)
    for g in range(3):
        alone = group_feature_rewards(completions[g : g + 1], references[g : g + 1], whitening=whitening)
        torch.testing.assert_close(alone.reward, together.reward[g : g + 1], rtol=0, atol=1e-9)
        torch.testing.assert_close(group_advantages(alone), group_advantages(together)[g : g + 1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("whitening", WHITENINGS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds, keep=st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
def test_masked_completions_equal_removed_ones(whitening: str | None, seed: int, keep: list[bool]) -> None:
    completions, references = batch(seed, g=1)
    row = torch.tensor(keep)
    dirty = completions.clone()
    dirty[:, ~row] = torch.nan
    masked = group_feature_rewards(dirty, references, whitening=whitening, mask=row[None])
    fewer = group_feature_rewards(completions[:, row], references, whitening=whitening)
    for name in ("reward", "alignment", "diversity"):
        values = getattr(masked, name)
        assert values[0, ~row].eq(0).all()
        torch.testing.assert_close(values[:, row], getattr(fewer, name), rtol=0, atol=1e-7)
    torch.testing.assert_close(masked.cfm_loss, fewer.cfm_loss, equal_nan=True)
    torch.testing.assert_close(masked.fm_loss_unbiased, fewer.fm_loss_unbiased, equal_nan=True)
    torch.testing.assert_close(group_advantages(masked)[:, row], group_advantages(fewer), rtol=0, atol=1e-7)
    assert masked.valid_count.item() == sum(keep)


def test_fewer_than_two_valid() -> None:
    completions, references = batch(0, g=3)
    references[2] = torch.nan  # nothing of group 2 is valid, so nobody needs its reference
    mask = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    scored = group_feature_rewards(completions, references, mask=mask)
    assert scored.fm_loss_unbiased.isnan().tolist() == [False, True, True]
    assert scored.cfm_loss.isnan().tolist() == [False, False, True]
    assert scored.reward.isfinite().all()
    assert scored.diversity[1].eq(0).all()
    for estimator in ("ebft_rloo", "rloo", "group", "reinforce"):
        advantages = group_advantages(scored, estimator=estimator)
        assert advantages[1:].eq(0).all()
        assert advantages[0].ne(0).all()


def test_lengths_zero_one_and_five() -> None:
    """A completion without tokens is masked and its pooled zeros have no influence; one that is only EOS takes part."""
    completions, references = batch(1, g=1)
    completions[0, 0] = 0.0
    mask = torch.tensor([[False, True, True, True]])
    scored = group_feature_rewards(completions, references, mask=mask, whitening="feature")
    advantages = group_advantages(scored)
    assert advantages[0, 0].item() == 0.0
    assert advantages[0, 1:].ne(0).all()
    assert scored.gram_identity.tolist() == [True]


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_duplicates_get_equal_rewards_and_diversity(whitening: str | None) -> None:
    completions, references = batch(2, g=1)
    completions[0, 1] = completions[0, 0]
    scored = group_feature_rewards(completions, references, whitening=whitening)
    torch.testing.assert_close(scored.reward[0, 0], scored.reward[0, 1], rtol=0, atol=1e-9)
    if whitening:
        torch.testing.assert_close(scored.diversity[0], torch.tensor([1 / 3, 1 / 3, 0, 0], dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("whitening", WHITENINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 4, 8])
def test_identical_completions_give_exactly_zero(whitening: str | None, dtype: torch.dtype, n: int) -> None:
    completions, references = batch(3, g=2, dtype=dtype)
    scored = group_feature_rewards(completions[:, :1].expand(-1, n, -1).contiguous(), references, whitening=whitening)
    for estimator in ("ebft_rloo", "rloo", "group"):
        assert group_advantages(scored, estimator=estimator).eq(0).all()


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_zero_vectors_align_with_nothing(whitening: str | None) -> None:
    completions, references = batch(4, g=2)
    completions[0, 0] = 0.0
    references[1] = 0.0
    scored = group_feature_rewards(completions, references, whitening=whitening)
    assert scored.alignment[0, 0].item() == 0.0
    assert scored.diversity[0, 0].item() == pytest.approx(0.0, abs=1e-12)
    assert scored.alignment[1].eq(0).all()
    assert scored.reward.isfinite().all()


def test_coefficients_act_after_the_factor_two() -> None:
    completions, references = batch(5)
    scored = group_feature_rewards(completions, references, alignment_coef=0.7, diversity_coef=0.2)
    torch.testing.assert_close(scored.reward, 0.7 * scored.alignment - 0.2 * scored.diversity)
    torch.testing.assert_close(scored.alignment[0, 0], 2 * completions[0, 0] @ references[0])
    assert (scored.alignment_coef, scored.diversity_coef) == (0.7, 0.2)


def test_non_finite_features_are_named() -> None:
    completions, references = batch(6)
    completions[2, 1, 3] = torch.inf
    with pytest.raises(NumericsError, match=r"group 2, completion 1 \(1 of 12"):
        group_feature_rewards(completions, references)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 1] = False
    assert group_feature_rewards(completions, references, mask=mask).reward.isfinite().all()
    references[1, 0] = torch.nan
    with pytest.raises(NumericsError, match="reference of group 1"):
        group_feature_rewards(completions, references, mask=mask)


def test_completion_weights() -> None:
    completions, references = batch(7, g=1, n=3)
    weights = torch.tensor([[0.5, 2.0, 1.0]], dtype=torch.float64)
    scored = group_feature_rewards(completions, references, completion_weights=weights)
    gram = completions[0] @ completions[0].T
    torch.testing.assert_close(scored.diversity[0, 0], 2.0 * gram[0, 1] + 1.0 * gram[0, 2])
    torch.testing.assert_close(scored.diversity_to_siblings[0, 0], 0.5 * (gram[0, 1] + gram[0, 2]))
    ones = group_feature_rewards(completions, references, completion_weights=torch.ones_like(weights))
    plain = group_feature_rewards(completions, references)
    torch.testing.assert_close(ones.diversity, plain.diversity)
    torch.testing.assert_close(ones.diversity_to_siblings, plain.diversity)
    weights[0, 2] = torch.nan
    with pytest.raises(NumericsError, match="completion_weights of group 0, completion 2"):
        group_feature_rewards(completions, references, completion_weights=weights)


@pytest.mark.parametrize("whitening", WHITENINGS)
def test_float32_features_are_accumulated_in_float64(whitening: str | None) -> None:
    completions, references = batch(8, d=512, dtype=torch.float32)
    narrow = group_feature_rewards(completions, references, whitening=whitening)
    wide = group_feature_rewards(completions.double(), references.double(), whitening=whitening)
    assert narrow.reward.dtype == torch.float32
    torch.testing.assert_close(narrow.reward, wide.reward.float(), rtol=0, atol=1e-7)


def test_half_precision_features_take_the_coarse_cutoff() -> None:
    completions, references = batch(9, g=1, d=64)
    completions[0, 1] = completions[0, 0] + 1e-3 * references[0]
    half = group_feature_rewards(completions.bfloat16(), references.bfloat16(), whitening="feature")
    assert half.reward.dtype == torch.float32
    assert half.gram_identity.tolist() == [False]
    widened = group_feature_rewards(completions.float(), references.float(), whitening="feature")
    assert widened.gram_identity.tolist() == [True]
    coarse = group_feature_rewards(completions.float(), references.float(), whitening="feature", whitening_rtol=1e-2)
    assert coarse.gram_identity.tolist() == [False]


def test_without_whitening_nothing_is_reported_about_it() -> None:
    scored = group_feature_rewards(*batch(10))
    assert not scored.gram_identity.any()
    assert scored.whitening_kept_ratio.isnan().all()


def test_shapes_are_checked_in_tests() -> None:
    completions, references = batch(11)
    with pytest.raises(TypeCheckError):
        group_feature_rewards(completions, references[:2])
