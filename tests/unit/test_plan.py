"""Plans of micro-batches: what holds for every set of sequences, number of ranks and limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.errors import ConfigError
from ebft_ds.packing.plan import Plan, PlannedSequence, plan_micro_batches

LONGEST = 40


def planned(group: int, length: int) -> PlannedSequence:
    return PlannedSequence(group, length // 2, length - length // 2)


sequences_of = st.lists(st.builds(planned, st.integers(0, 7), st.integers(1, LONGEST)), max_size=40)
ranks = st.integers(1, 5)
budgets = st.none() | st.integers(LONGEST, 4 * LONGEST)
row_limits = st.none() | st.integers(1, 6)


def members_by_group(sequences: list[PlannedSequence]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.group, []).append(i)
    return groups


def tokens(sequences: list[PlannedSequence], indices: list[int]) -> int:
    return sum(sequences[i].length for i in indices)


def must_split(sequences: list[PlannedSequence], members: list[int], world_size: int) -> bool:
    """Fewer groups than ranks, or more tokens in this one than a rank's fair share and a half."""
    too_few = len(members_by_group(sequences)) < world_size
    return too_few or tokens(sequences, members) * world_size > 1.5 * tokens(sequences, list(range(len(sequences))))


def loads(plan: Plan, sequences: list[PlannedSequence]) -> list[int]:
    return [sum(tokens(sequences, batch) for batch in batches) for batches in plan.ranks]


@given(sequences_of, ranks, budgets, row_limits)
def test_every_sequence_once_in_lockstep_within_the_limits(
    sequences: list[PlannedSequence], world_size: int, budget: int | None, limit: int | None
) -> None:
    plan = plan_micro_batches(sequences, world_size, token_budget=budget, max_sequences=limit)
    assert len(plan.ranks) == world_size
    assert {len(batches) for batches in plan.ranks} == {plan.micro_batches}
    assert sorted(i for batches in plan.ranks for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in (b for batches in plan.ranks for b in batches if b):
        assert budget is None or len(batch) * max(sequences[i].length for i in batch) <= budget
        assert limit is None or len(batch) <= limit
    owners = plan.owner_of()
    assert all(i in [j for batch in plan.ranks[rank] for j in batch] for i, rank in owners.items())


@given(sequences_of, ranks)
def test_groups_stay_whole_unless_they_must_be_split(sequences: list[PlannedSequence], world_size: int) -> None:
    owners = plan_micro_batches(sequences, world_size).owner_of()
    for members in members_by_group(sequences).values():
        if not must_split(sequences, members, world_size):
            assert len({owners[i] for i in members}) == 1


@given(sequences_of, ranks)
def test_no_rank_carries_more_than_the_mean_and_one_unit(sequences: list[PlannedSequence], world_size: int) -> None:
    plan = plan_micro_batches(sequences, world_size)
    units = [
        max(sequences[i].length for i in members) if must_split(sequences, members, world_size) else tokens(sequences, members)
        for members in members_by_group(sequences).values()
    ]
    mean = sum(s.length for s in sequences) / world_size
    assert max(loads(plan, sequences)) <= mean + max(units, default=0)


@given(sequences_of, ranks, budgets, row_limits)
def test_the_plan_is_a_function_of_its_input(
    sequences: list[PlannedSequence], world_size: int, budget: int | None, limit: int | None
) -> None:
    copies = [PlannedSequence(s.group, s.prompt_length, s.branch_length) for s in sequences]
    first = plan_micro_batches(sequences, world_size, token_budget=budget, max_sequences=limit)
    assert plan_micro_batches(copies, world_size, token_budget=budget, max_sequences=limit) == first


@given(ranks)
def test_one_group_is_spread_over_all_ranks(world_size: int) -> None:
    plan = plan_micro_batches([planned(0, 10)] * (2 * world_size), world_size)
    assert loads(plan, [planned(0, 10)] * (2 * world_size)) == [20] * world_size


@given(ranks)
def test_nothing_to_do_is_one_empty_micro_batch_on_every_rank(world_size: int) -> None:
    assert plan_micro_batches([], world_size, token_budget=8, max_sequences=2).ranks == [[[]]] * world_size


def test_a_sequence_over_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence 1 has 9 tokens, over scoring_token_budget=8"):
        plan_micro_batches([planned(0, 8), planned(0, 9)], 2, token_budget=8)


@given(sequences_of, ranks, st.integers(1, LONGEST), row_limits)
def test_a_sequence_over_the_budget_may_have_a_micro_batch_of_its_own(
    sequences: list[PlannedSequence], world_size: int, budget: int, limit: int | None
) -> None:
    plan = plan_micro_batches(sequences, world_size, token_budget=budget, max_sequences=limit, oversize="alone")
    batches = [batch for share in plan.ranks for batch in share]
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in filter(None, batches):
        padded = len(batch) * max(sequences[i].length for i in batch)
        assert padded <= budget or len(batch) == 1
    assert plan.tokens == sum(len(batch) * max(sequences[i].length for i in batch) for batch in batches if batch)
    assert plan.unshared_tokens == sum(s.length for s in sequences)
    assert sum(map(sum, plan.costs)) == plan.tokens
