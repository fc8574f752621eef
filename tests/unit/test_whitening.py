"""Whitening in sample space against the D x D definition, its invariances, and its edges."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import Tensor

from ebft_ds import features
from ebft_ds.errors import ConfigError
from ebft_ds.features import default_whitening_rtol, unit_normalize, whitening_kind
from ebft_ds.features.whitening import WhitenedGroups

whiten_groups = jaxtyped(typechecker=beartype)(features.whiten_groups)
KINDS = ["feature", "sample"]
seeds = st.integers(0, 2**31)


def group(seed: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = unit_normalize(torch.randn(1, n, d, generator=generator, dtype=torch.float64))
    return x, unit_normalize(torch.randn(1, d, generator=generator, dtype=torch.float64))


def whiten(x: Tensor, y: Tensor, kind: str, *, mask: Tensor | None = None, rtol: float = 1e-5) -> WhitenedGroups:
    return whiten_groups(x, y, kind, mask=torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask, rtol=rtol)


def explicit(x: Tensor, y: Tensor, kind: str, rtol: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Cosines and Gram matrix of one group by the definition: (X'X)^(-1/2) as a D x D matrix, (XX')^(-1/2) as an n x n one."""

    def inverse_root(square: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(square)
        kept = values > rtol**2 * values.max()
        return vectors[:, kept] @ torch.diag(values[kept].rsqrt()) @ vectors[:, kept].mT

    white = x @ inverse_root(x.mT @ x)
    scalars = inverse_root(x @ x.mT).sum(1)
    scalars = scalars.where(scalars.abs() > 1e-9, 0.0)  # sums that cancel have no sign
    target = (inverse_root(x.mT @ x) @ y).expand_as(white) if kind == "feature" else scalars[:, None] * y
    return torch.cosine_similarity(white, target, dim=1), white @ white.mT


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=st.integers(1, 6), d=st.integers(1, 9))
def test_sample_space_equals_the_definition(kind: str, seed: int, n: int, d: int) -> None:
    x, y = group(seed, n, d)
    singular = torch.linalg.svdvals(x[0])
    if singular[-1] / singular[0] < 1e-3:
        return  # the definition itself squares the condition number
    found = whiten(x, y, kind)
    cosine, gram = explicit(x[0], y[0], kind)
    torch.testing.assert_close(found.cosine[0], cosine, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.gram[0], gram, rtol=0, atol=1e-8)
    assert int(found.rank) == min(n, d)
    assert bool(found.gram_identity) == (n <= d)
    torch.testing.assert_close(found.kept_ratio[0], singular[-1] / singular[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds, scale=st.floats(1e-3, 1e3))
def test_rotation_and_scale_invariance(kind: str, seed: int, scale: float) -> None:
    x, y = group(seed, 4, 7)
    rotation = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)).Q
    plain, moved = whiten(x, y, kind), whiten(scale * x @ rotation, y @ rotation, kind)
    torch.testing.assert_close(moved.cosine, plain.cosine, rtol=0, atol=1e-7)
    torch.testing.assert_close(moved.gram, plain.gram, rtol=0, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_feature_kind_does_not_see_an_invertible_map_of_feature_space(seed: int) -> None:
    """Only `feature` has this: with y inside the span, whitened inner products are those of coordinates in the completions."""
    x, _ = group(seed, 4, 4)
    if torch.linalg.cond(x[0]) > 1e2:
        return
    shear = torch.eye(4, dtype=torch.float64) + torch.triu(0.5 * torch.ones(4, 4, dtype=torch.float64), 1)
    torch.testing.assert_close(whiten(x @ shear, x[:, 0] @ shear, "feature").gram, whiten(x, x[:, 0], "feature").gram, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_permutation_and_left_out_rows(kind: str, seed: int) -> None:
    x, y = group(seed, 5, 8)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    plain, mixed = whiten(x, y, kind), whiten(x[:, order], y, kind)
    torch.testing.assert_close(mixed.cosine, plain.cosine[:, order], rtol=0, atol=1e-8)
    torch.testing.assert_close(mixed.gram, plain.gram[:, order][:, :, order], rtol=0, atol=1e-8)

    mask = torch.tensor([[True, False, True, True, False]])
    fewer, masked = whiten(x[:, mask[0]], y, kind), whiten(x, y, kind, mask=mask)
    torch.testing.assert_close(masked.cosine[:, mask[0]], fewer.cosine, rtol=0, atol=1e-8)
    torch.testing.assert_close(masked.kept_ratio, fewer.kept_ratio)
    assert masked.gram_identity.tolist() == [True]
    assert masked.cosine[~mask].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_share_their_whitened_vector(kind: str) -> None:
    x, y = group(3, 4, 8)
    x[0, 1] = x[0, 0]
    found = whiten(x, y, kind)
    assert not bool(found.gram_identity)
    assert int(found.rank) == 3
    torch.testing.assert_close(found.gram[0, :2, :2], torch.full((2, 2), 0.5, dtype=torch.float64))
    torch.testing.assert_close(found.cosine[0, 0], found.cosine[0, 1], rtol=0, atol=1e-10)


def test_cutoff_drops_what_rounding_made_independent() -> None:
    x, y = group(3, 4, 8)
    x[0, 1] = x[0, 0] + 1e-7 * y[0]
    assert not bool(whiten(x, y, "feature", rtol=1e-5).gram_identity)
    fine = whiten(x, y, "feature", rtol=1e-9)
    assert bool(fine.gram_identity)
    assert float(fine.kept_ratio) < 1e-6
    # A float32 or a float64 Gram matrix of these features would not see singular values this small; the factored SVD does.
    torch.testing.assert_close(fine.gram[0], torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_vectors_stay_zero(kind: str) -> None:
    x, y = group(5, 4, 8)
    x[0, 2] = 0.0
    found = whiten(x, y, kind)
    assert found.cosine[0, 2].item() == 0.0
    assert found.gram[0, 2].eq(0).all()
    assert int(found.rank) == 3
    nothing = whiten(torch.zeros_like(x), y, kind)
    assert nothing.cosine.eq(0).all()
    assert nothing.kept_ratio.isnan().all()
    assert not bool(nothing.gram_identity)
    assert whiten(x, torch.zeros_like(y), kind).cosine.eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reference_outside_the_span_has_no_alignment(kind: str) -> None:
    x = torch.eye(6, dtype=torch.float64)[None, :3]
    y = torch.tensor([[0.0, 0.0, 0.0, 0.6, 0.8, 0.0]], dtype=torch.float64)
    assert whiten(x, y, kind).cosine.eq(0).all()


def test_settings() -> None:
    assert [whitening_kind(value) for value in (True, False, None, "feature", "sample")] == ["feature", None, None, "feature", "sample"]
    assert default_whitening_rtol(torch.bfloat16) == 1e-2
    assert default_whitening_rtol(torch.float32) == 1e-5
    with pytest.raises(ConfigError, match="zca"):
        whitening_kind("zca")
    x, y = group(0, 2, 3)
    with pytest.raises(ConfigError, match="zca"):
        features.whiten_groups(x, y, "zca", mask=torch.ones(1, 2, dtype=torch.bool), rtol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rtol"):
        whiten(x, y, "feature", rtol=1.0)
