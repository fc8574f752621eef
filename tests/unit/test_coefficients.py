"""Coefficient schedules over warm start, policy warm-up and cross-entropy decay."""

from __future__ import annotations

import pytest

from ebft_ds.policy import ce_coefficient, in_warm_start, rl_coefficient


def test_rl_coefficient_rises_after_the_warm_start() -> None:
    values = [rl_coefficient(step, warm_start_steps=2, ebft_rl_coef=2.0, rl_warmup_start=0.5, rl_warmup_steps=4) for step in range(8)]
    assert values == pytest.approx([0.0, 0.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0])


def test_rl_coefficient_without_warmup_is_constant() -> None:
    assert rl_coefficient(0, warm_start_steps=0, ebft_rl_coef=0.7, rl_warmup_start=0.0, rl_warmup_steps=0) == 0.7


def test_ce_coefficient_is_one_in_the_warm_start_then_decays() -> None:
    values = [ce_coefficient(step, warm_start_steps=2, ebft_ce_coef=0.1, ce_decay_steps=4) for step in range(8)]
    assert values == pytest.approx([1.0, 1.0, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0])
    assert ce_coefficient(50, warm_start_steps=2, ebft_ce_coef=0.1, ce_decay_steps=0) == 0.1


def test_warm_start_ends_at_its_step() -> None:
    assert [in_warm_start(step, warm_start_steps=2) for step in range(3)] == [True, True, False]
