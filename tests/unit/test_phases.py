"""Which steps train on what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.derived import derive
from ebft_ds.trainers.phases import Coefficients, Phases


def phases(**fields: object) -> Phases:
    config = AsyncEBFTConfig(**fields)
    return Phases(config.loss, config.method)


def test_warm_start_then_completions() -> None:
    config = AsyncEBFTConfig(warm_start_steps=2, warm_start_batch_size=5, ebft_ce_coef=0.5, ce_decay_steps=2)
    found = Phases(config.loss, config.method)
    assert [found.rolls_out(step) for step in range(4)] == [False, False, True, True]
    assert [found.coefficients(step) for step in (1, 2, 3)] == [Coefficients(0.0, 1.0), Coefficients(1.0, 0.5), Coefficients(1.0, 0.25)]
    assert found.reference_count(1, derive(config, 1)) == 5


def test_references_alone_take_a_steps_prompts() -> None:
    config = AsyncEBFTConfig(ebft_rl_coef=0.0, ebft_ce_coef=1.0, num_generations=4, per_device_train_batch_size=8)
    found = Phases(config.loss, config.method)
    assert not found.rolls_out(7)
    assert found.reference_count(7, derive(config, 2)) == 4


@given(warm=st.integers(0, 5), iterations=st.integers(1, 4), resumed_at=st.integers(0, 30))
def test_batches_begin_at_fixed_steps_whatever_step_a_run_resumes_at(warm: int, iterations: int, resumed_at: int) -> None:
    found = phases(warm_start_steps=warm, num_iterations=iterations)
    step = max(warm, resumed_at)
    end = found.batch_end(step)
    assert step < end <= step + iterations
    assert (end - warm) % iterations == 0
    assert found.batch_end(end) == end + iterations
