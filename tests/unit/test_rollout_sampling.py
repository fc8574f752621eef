"""Filters and draws on plain tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.rollout.sampling import draw, sampling_logprobs, uniform
from ebft_ds.types import SamplingSpec


def spec(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> SamplingSpec:
    return SamplingSpec(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop_token_ids=[0], seed=0)


specs = st.builds(spec, st.floats(0.05, 5.0), st.floats(0.01, 1.0), st.integers(0, 12), st.floats(0.0, 0.99))


@given(st.lists(specs, min_size=1, max_size=4), st.integers(0, 10_000), st.integers(1, 9))
def test_rows_are_normalised_keep_the_likeliest_and_ignore_their_neighbours(rows: list[SamplingSpec], seed: int, vocab: int) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    logprobs = sampling_logprobs(logits, rows)
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(len(rows)), atol=1e-5)
    assert bool(torch.isfinite(logprobs.gather(1, logits.argmax(-1, keepdim=True))).all())
    for number, row in enumerate(rows):
        kept = torch.isfinite(logprobs[number])
        if row.top_k:
            assert int(kept.sum()) <= row.top_k
        assert torch.equal(logprobs[number], sampling_logprobs(logits[number : number + 1], [row])[0])


def test_each_filter_on_known_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def kept(**fields: float) -> list[float]:
        return [round(p, 4) for p in sampling_logprobs(logits, [spec(**fields)])[0].exp().tolist()]  # type: ignore[arg-type]

    assert kept() == [0.5, 0.3, 0.15, 0.05]
    assert kept(top_k=2) == [0.625, 0.375, 0.0, 0.0]
    assert kept(top_p=0.79) == [0.625, 0.375, 0.0, 0.0]
    assert kept(top_p=0.81) == [0.5263, 0.3158, 0.1579, 0.0]
    assert kept(min_p=0.29) == [0.5263, 0.3158, 0.1579, 0.0]
    assert kept(temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=1e-4)


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_min=True, exclude_max=True), st.integers(1, 5))
def test_a_filtered_token_is_never_drawn(seed: int, u: float, top_k: int) -> None:
    logprobs = sampling_logprobs(torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 30, [spec(top_k=top_k)])
    assert math.isfinite(float(logprobs[0, draw(logprobs, [u])[0]]))


def test_a_draw_inverts_the_distribution() -> None:
    logprobs = torch.log(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])).expand(4, 5)
    assert draw(logprobs, [1e-10, 0.2499, 0.2501, 1 - 1e-10]).tolist() == [1, 1, 3, 3]


@given(st.tuples(*[st.integers(-(2**40), 2**40)] * 5), st.integers(0, 4))
def test_every_coordinate_moves_the_random_number(place: tuple[int, int, int, int, int], changed: int) -> None:
    other = list(place)
    other[changed] += 1
    assert 0 < uniform(*place) < 1
    assert uniform(*place) == uniform(*place)
    assert uniform(*place) != uniform(*other)


def test_the_random_numbers_are_uniform() -> None:
    numbers = torch.tensor([uniform(42, index, 0, sample, t) for index in range(10) for sample in range(8) for t in range(100)])
    assert float(torch.histc(numbers, 10, 0, 1).sub(800).abs().max()) < 4 * math.sqrt(8000 * 0.09)
