"""Which sequences a step scores, and where their features are brought together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.errors import DataError
from ebft_ds.features.placement import group_owners
from ebft_ds.features.scoring_layout import ScoringLayout, scoring_layout
from ebft_ds.types import Prompt, Rollout, RolloutGroup

EOS, END = 1, 2
PROMPT = [7, 8, 9]


def group(reference: list[int], *completions: list[int]) -> RolloutGroup:
    rollouts = [Rollout(ids, [0.0] * len(ids), [], "stop") for ids in completions]
    return RolloutGroup(Prompt(4, 0, 0, PROMPT, reference), rollouts)


def layout(*groups: RolloutGroup, which: str = "include") -> ScoringLayout:
    return scoring_layout(groups, [EOS, END], which)  # type: ignore[arg-type]


def test_equal_completions_and_one_equal_to_the_reference_are_one_sequence() -> None:
    found = layout(group([5, EOS], [5, 6], [5, EOS], [], [5, 6]), group([5, EOS], [5, 6]))
    assert [s.completion_ids for s in found.sequences] == [[5, EOS], [5, 6], [5, EOS], [5, 6]]
    assert found.reference == [0, 2]
    assert found.completion == [[1, 0, None, 1], [3]]
    assert [list(found.members(g)) for g in (0, 1)] == [[0, 1], [2, 3]]


def test_what_an_excluded_end_token_alone_tells_apart_is_one_sequence() -> None:
    kinds = group([5, 6, EOS, END], [5, 6], [5, 6, EOS], [EOS], [END, EOS], [5, EOS, 6])
    excluded = layout(kinds, which="exclude")
    assert [s.completion_ids for s in excluded.sequences] == [[5, 6], [EOS], [5, EOS, 6]]
    assert excluded.completion == [[0, 0, 1, 1, 2]]
    spans = [(s.tokens.start, s.tokens.length) for s in excluded.sequences]
    assert spans == [(3, 2), (2, 1), (3, 3)], "of an end token alone, the prompt's last token counts"
    assert len(layout(kinds).sequences) == 6


def test_an_empty_reference_is_named() -> None:
    with pytest.raises(DataError, match="prompt 4 has an empty reference"):
        layout(group([], [5]))


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=12))
def test_a_group_is_rewarded_where_most_of_it_is(world_size: int, wanted: list[list[int]]) -> None:
    """`wanted`: the rank of each group's sequences; the first of every other group is a cached reference."""
    found = layout(*(group([5, EOS], *([10 + j] for j in range(len(ranks) - 1))) for ranks in wanted))
    ranks = [rank % world_size for chosen in wanted for rank in chosen]
    cached = {i: ranks[i] for g, i in enumerate(found.reference) if g % 2}
    forwarded = {i: rank for i, rank in enumerate(ranks) if i not in cached}
    for g, owner in enumerate(group_owners(found, forwarded, cached, world_size)):
        members = list(found.members(g))
        counts = Counter(forwarded[i] for i in members if i in forwarded)
        if counts:
            assert counts[owner] == max(counts.values())
        else:
            assert owner == cached[members[0]], "nothing was forwarded: the cached reference need not travel"


def test_evenly_split_groups_do_not_all_end_on_one_rank() -> None:
    found = layout(*(group([5, EOS], [6], [7]) for _ in range(6)))
    forwarded = {i: i % 3 for i in range(len(found.sequences))}
    assert Counter(group_owners(found, forwarded, {}, 3)) == {0: 2, 1: 2, 2: 2}
