"""Token budgets and sampling fields of requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.config.sections import MethodSection, RolloutSection
from ebft_ds.errors import ConfigError
from ebft_ds.rollout.requests import RequestMaker, sampling_spec, token_budget
from ebft_ds.types import Prompt


def prompt(reference_length: int) -> Prompt:
    return Prompt(prompt_id=0, index=0, epoch=0, token_ids=[1], reference_ids=[5] * reference_length)


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 300), st.floats(0.1, 4))
def test_a_budget_lies_between_the_floor_and_the_maximum(reference: int, maximum: int, floor: int, multiplier: float) -> None:
    budget = token_budget(reference, maximum=maximum, floor=floor, multiplier=multiplier)
    assert min(floor, maximum) <= budget <= maximum
    assert budget == maximum or budget >= multiplier * reference


def test_each_prompt_has_its_own_budget() -> None:
    rollout = RolloutSection(max_completion_length=256, num_generations=3)
    sampling = sampling_spec(rollout, stop_token_ids=[2], seed=7)
    maker = RequestMaker(rollout, MethodSection(), sampling)
    assert [maker(prompt(n), 0).max_new_tokens for n in (10, 43, 101, 400)] == [64, 65, 152, 256]
    assert RequestMaker(rollout, MethodSection(ebft_adaptive_max_tokens=False), sampling)(prompt(10), 0).max_new_tokens == 256
    small = RolloutSection(max_completion_length=32)
    assert RequestMaker(small, MethodSection(), sampling)(prompt(1), 0).max_new_tokens == 32
    assert maker(prompt(1), 4).attempt == 4
    assert maker(prompt(1), 0).num_samples == 3
    assert RequestMaker(rollout, MethodSection(), sampling, num_samples=8)(prompt(1)).num_samples == 8


def test_sampling_fields_are_whole_and_generation_kwargs_win() -> None:
    spec = sampling_spec(RolloutSection(temperature=0.6, generation_kwargs={"top_k": 5, "min_p": 0.1}), stop_token_ids=[2, 3], seed=7)
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p, spec.stop_token_ids, spec.seed) == (0.6, 1.0, 5, 0.1, [2, 3], 7)
    assert sampling_spec(RolloutSection(stop_token_ids=[9]), stop_token_ids=[2], seed=7).stop_token_ids == [9]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"repetition_penalty": 1.1}, "unknown repetition_penalty"),
        ({"top_k": "many"}, "top_k"),
        ({"top_p": 0.0}, "out of range"),
        ({"temperature": -1.0}, "out of range"),
        ({"stop_token_ids": []}, "no stop_token_ids"),
    ],
)
def test_fields_that_cannot_work_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sampling_spec(RolloutSection(generation_kwargs=kwargs), stop_token_ids=[2], seed=0)
