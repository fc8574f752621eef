"""Mismatch weights: the four modes, the cap, masks."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from ebft_ds import policy
from ebft_ds.errors import ConfigError

importance_weights = jaxtyped(typechecker=beartype)(policy.importance_weights)
sequence_importance = jaxtyped(typechecker=beartype)(policy.sequence_importance)

RATIOS = torch.tensor([[0.5, 2.0, 8.0, 7.0], [0.5, 0.5, 2.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False], [True, True, True, True]])
SAMPLING = torch.full((2, 4), -3.0, dtype=torch.float64)
LOGP = SAMPLING + RATIOS.log()


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_truncate", [[0.5, 2.0, 3.0, 0.0], [0.5, 0.5, 2.0, 1.0]]),
        ("token_mask", [[0.5, 2.0, 0.0, 0.0], [0.5, 0.5, 2.0, 1.0]]),
        ("sequence_truncate", [[3.0, 3.0, 3.0, 0.0], [0.5, 0.5, 0.5, 0.5]]),
        ("sequence_mask", [[0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]),
        ("none", [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
    ],
)
def test_modes(mode: str, wanted: list[list[float]]) -> None:
    found = importance_weights(LOGP, SAMPLING, MASK, mode=mode)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_default_is_token_truncate_at_three() -> None:
    torch.testing.assert_close(
        importance_weights(LOGP, SAMPLING, MASK), importance_weights(LOGP, SAMPLING, MASK, mode="token_truncate", cap=3.0)
    )


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]))
def test_bounds_and_dirty_padding(seed: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logp, sampling = -3 * torch.rand(2, 3, 5, generator=generator)
    mask = torch.rand(3, 5, generator=generator) > 0.4
    weights = importance_weights(logp, sampling, mask, mode=mode, cap=2.0)
    assert (weights >= 0).all()
    assert (weights <= 2.0).all()
    assert weights[~mask].eq(0).all()
    logp[~mask], sampling[~mask] = torch.nan, -torch.inf
    torch.testing.assert_close(importance_weights(logp, sampling, mask, mode=mode, cap=2.0), weights, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_overflowing_ratios_stay_bounded(mode: str) -> None:
    weights = importance_weights(torch.zeros(1, 2), torch.full((1, 2), -500.0), torch.ones(1, 2, dtype=torch.bool), mode=mode)
    assert weights.tolist() == ([[3.0, 3.0]] if mode.endswith("truncate") else [[0.0, 0.0]])


def test_weights_carry_no_gradient() -> None:
    assert not importance_weights(LOGP.clone().requires_grad_(), SAMPLING, MASK).requires_grad


def test_sequence_importance() -> None:
    torch.testing.assert_close(sequence_importance(LOGP, SAMPLING, MASK, cap=100.0), torch.tensor([8.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(sequence_importance(LOGP, SAMPLING, MASK), torch.tensor([3.0, 0.5], dtype=torch.float64))
    assert sequence_importance(LOGP, SAMPLING, torch.zeros_like(MASK)).tolist() == [1.0, 1.0]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="vllm_importance_sampling_mode"):
        importance_weights(LOGP, SAMPLING, MASK, mode="clip")
    with pytest.raises(ConfigError, match="cap"):
        importance_weights(LOGP, SAMPLING, MASK, cap=0.0)
