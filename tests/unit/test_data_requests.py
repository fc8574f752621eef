"""Token budgets and rollout requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.config.sections import DataSection, MethodSection, RolloutSection
from ebft_ds.data import completion_budget, rollout_request, sampling_spec
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.types import Prompt


@pytest.mark.parametrize(
    ("reference", "adaptive", "floor", "expected"),
    [(100, True, 64, 150), (10, True, 64, 64), (101, True, 64, 152), (400, True, 64, 256), (10, False, 64, 256), (10, True, 999, 256)],
)
def test_budget_of_the_method(reference: int, adaptive: bool, floor: int, expected: int) -> None:
    budget = completion_budget(
        reference, max_completion_length=256, adaptive=adaptive, multiplier=1.5, floor=floor, prompt_length=10, max_seq_length=2048
    )
    assert budget == expected


def test_budget_ignores_floating_point_dust() -> None:
    assert 1.1 * 50 > 55
    limits = {"max_completion_length": 99, "adaptive": True, "floor": 1, "prompt_length": 1, "max_seq_length": 999}
    assert completion_budget(50, multiplier=1.1, **limits) == 55


@given(
    reference=st.integers(1, 500),
    limit=st.integers(1, 300),
    adaptive=st.booleans(),
    multiplier=st.floats(0.1, 4),
    floor=st.integers(1, 400),
    prompt=st.integers(1, 300),
    room=st.integers(1, 300),
)
def test_budget_stays_within_every_limit(
    reference: int, limit: int, adaptive: bool, multiplier: float, floor: int, prompt: int, room: int
) -> None:
    budget = completion_budget(
        reference,
        max_completion_length=limit,
        adaptive=adaptive,
        multiplier=multiplier,
        floor=floor,
        prompt_length=prompt,
        max_seq_length=prompt + room,
    )
    assert 1 <= budget <= min(limit, room)
    assert budget >= min(floor, limit, room)


def test_prompt_without_room_is_an_error() -> None:
    with pytest.raises(DataError, match="leaves no room"):
        completion_budget(1, max_completion_length=9, adaptive=False, multiplier=1, floor=1, prompt_length=8, max_seq_length=8)


def test_request_carries_the_prompts_own_budget_and_every_sampling_field() -> None:
    rollout = RolloutSection(max_completion_length=100, temperature=0.7, generation_kwargs={"top_k": 5})
    sampling = sampling_spec(rollout, stop_token_ids=[3, 2, 3], seed=9)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 1.0, 5, 0.0)
    assert (sampling.stop_token_ids, sampling.seed) == ([2, 3], 9)
    prompt = Prompt(prompt_id=1, index=4, epoch=0, token_ids=[1] * 10, reference_ids=[2] * 50)
    request = rollout_request(prompt, rollout=rollout, method=MethodSection(), data=DataSection(), sampling=sampling, attempt=2)
    assert (request.max_new_tokens, request.num_samples, request.attempt) == (75, 4, 2)


def test_stop_ids_of_the_recipe_win_and_unknown_sampling_fields_are_refused() -> None:
    assert sampling_spec(RolloutSection(stop_token_ids=[7]), stop_token_ids=[1], seed=0).stop_token_ids == [7]
    with pytest.raises(ConfigError, match="repetition_penalty is not a sampling field"):
        sampling_spec(RolloutSection(generation_kwargs={"repetition_penalty": 1.1}), stop_token_ids=[1], seed=0)
