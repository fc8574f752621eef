"""The cache of reference features on one rank: its bound, its order, its state, and what a key depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebft_ds.errors import CheckpointError
from ebft_ds.features.cached_references import feature_recipe, reference_key
from ebft_ds.features.forwards import Pooling
from ebft_ds.features.reference_cache import ReferenceCache
from ebft_ds.features.scoring_layout import FeatureSequence
from ebft_ds.features.spans import TokenRange

WIDTH = 8
THREE = 3 * WIDTH * 4 / 2**20
"""Room for three features, in MiB."""


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def feature(number: int, width: int = WIDTH) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(number))


def held(cache: ReferenceCache, numbers: range) -> list[int]:
    """Without counting as used."""
    stored = {bytes(row.numpy()) for row in cache.state_dict()["keys"]}
    return [number for number in numbers if key(number) in stored]


def test_a_kept_feature_comes_back_bit_for_bit_and_is_a_copy() -> None:
    cache = ReferenceCache(1.0)
    rows = torch.stack([feature(0), feature(1)])
    cache.put(key(0), rows[0])
    wanted = rows[0].clone()
    rows.zero_()
    assert cache.locate([key(0), key(1)]) == [0, None]
    assert torch.equal(cache.get(key(0)), wanted)
    assert cache.get(key(0)).untyped_storage().nbytes() == WIDTH * 4, "a view would keep its micro-batch alive"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_the_least_recently_used_go_first_and_the_bound_holds(actions: list[tuple[bool, int]]) -> None:
    cache, model = ReferenceCache(THREE), []
    for puts, number in actions:
        if puts:
            cache.put(key(number), feature(number))
        else:
            assert cache.locate([key(number)]) == [0 if number in model else None]
        if puts or number in model:
            model = [*(other for other in model if other != number), number][-3:]
        assert held(cache, range(10)) == sorted(model)
        assert cache.held_bytes == len(model) * WIDTH * 4 <= cache.limit_bytes
        assert all(torch.equal(cache.get(key(n)), feature(n)) for n in model)


def test_what_is_larger_than_the_limit_is_not_kept() -> None:
    cache = ReferenceCache(THREE)
    cache.put(key(0), feature(0))
    cache.put(key(1), feature(1, 3 * WIDTH + 1))
    assert held(cache, range(2)) == [0]
    assert cache.held_bytes == WIDTH * 4


def test_an_interrupted_step_leaves_no_trace() -> None:
    cache = ReferenceCache(THREE)
    for number in range(3):
        cache.put(key(number), feature(number))
    cache.mark()
    before = cache.state_dict()
    cache.locate([key(0)])
    cache.put(key(3), feature(3))
    cache.put(key(4), feature(4))
    assert held(cache, range(5)) == [0, 3, 4]
    cache.rewind()
    after = cache.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert cache.held_bytes == 3 * WIDTH * 4
    cache.put(key(5), feature(5))
    assert held(cache, range(6)) == [1, 2, 5]
    cache.mark()
    cache.rewind()
    assert held(cache, range(6)) == [1, 2, 5]


def test_state_holds_content_order_and_widths() -> None:
    cache = ReferenceCache(THREE)
    cache.put(key(0), feature(0))
    cache.put(key(1), feature(1, 2 * WIDTH))
    cache.locate([key(0)])
    other = ReferenceCache(THREE)
    other.put(key(7), feature(7))
    other.load_state_dict(cache.state_dict())
    assert held(other, range(10)) == [0, 1]
    assert torch.equal(other.get(key(1)), feature(1, 2 * WIDTH))
    for one in (cache, other):
        one.put(key(2), feature(2))
        assert held(one, range(10)) == [0, 2], "the one that was not used since goes"
    smaller = ReferenceCache(THREE / 3)
    smaller.load_state_dict(cache.state_dict())
    assert held(smaller, range(10)) == [2]


def test_an_empty_cache_has_a_state_too() -> None:
    cache = ReferenceCache(1.0)
    cache.load_state_dict(ReferenceCache(1.0).state_dict())
    assert len(cache) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("widths"),
        lambda state: state.update(extra=torch.zeros(1)),
        lambda state: state.update(values=state["values"][:-1]),
        lambda state: state.update(keys=state["keys"][:1]),
        lambda state: state.update(values=state["values"].double()),
        lambda state: state.update(widths=torch.tensor([2 * WIDTH, 0])),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: Any) -> None:
    cache = ReferenceCache(1.0)
    for number in range(2):
        cache.put(key(number), feature(number))
    state = cache.state_dict()
    damage(state)
    with pytest.raises(CheckpointError, match="cache of reference features does not fit"):
        cache.load_state_dict(state)
    assert held(cache, range(4)) == [0, 1]


def test_a_key_depends_on_everything_that_the_feature_does() -> None:
    pooling = Pooling([1, 2], "completion_mean", "pooled")
    sequence = FeatureSequence(3, [5, 6, 7], [8, 9], TokenRange(3, 2))
    recipes = [
        feature_recipe("network", pooling),
        feature_recipe("other", pooling),
        *(feature_recipe("network", replace(pooling, **change)) for change in ({"layers": [1]}, {"method": "concat"}, {"norm": "token"})),
    ]
    sequences = [
        sequence,
        replace(sequence, prompt_ids=[5, 6, 0]),
        replace(sequence, prompt_ids=[5, 6], completion_ids=[7, 8, 9]),
        replace(sequence, completion_ids=[8, 0]),
        replace(sequence, tokens=TokenRange(3, 1)),
        replace(sequence, tokens=TokenRange(3, 2, 1)),
    ]
    keys = {reference_key(recipe, s) for recipe in recipes for s in sequences}
    assert len(keys) == len(recipes) * len(sequences)
    assert reference_key(recipes[0], replace(sequence, group=8)) in keys, "the place in a step does not matter"
