"""Plans of packed rows, held against the rows that are built from them and against plain counting."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.errors import ConfigError
from ebft_ds.packing.cost import TokenCost
from ebft_ds.packing.packed import PackedLayout, packed_layout
from ebft_ds.packing.plan import Plan, PlannedSequence, plan_micro_batches
from ebft_ds.packing.rows import RowStyle

LONGEST = 40
PACKED: tuple[RowStyle, ...] = ("shared", "unshared")


@dataclass(frozen=True)
class Tokens:
    """A sequence with tokens: every group's prompt has its own."""

    group: int
    prompt_ids: list[int]
    completion_ids: list[int]


@st.composite
def sequences_of(draw: st.DrawFn) -> list[PlannedSequence]:
    """Up to eight groups of up to eight sequences, in any order."""
    sequences: list[PlannedSequence] = []
    for group in range(draw(st.integers(0, 8))):
        prompt, members = draw(st.integers(1, LONGEST // 2)), draw(st.integers(1, 8))
        branches = draw(st.lists(st.integers(0, LONGEST // 2), min_size=members, max_size=members))
        sequences += [PlannedSequence(group, prompt, branch) for branch in branches]
    return draw(st.permutations(sequences))


workloads = sequences_of()
ranks = st.integers(1, 5)
budgets = st.none() | st.integers(LONGEST, 2 * LONGEST) | st.integers(LONGEST, 6 * LONGEST)
tight_budgets = st.integers(1, LONGEST)
styles = st.sampled_from(PACKED)
costs = st.sampled_from([TokenCost(), TokenCost(0.05)])


def layout_of(sequences: list[PlannedSequence], batch: list[int], style: RowStyle) -> PackedLayout:
    made = [Tokens(s.group, [s.group] * s.prompt_length, [0] * s.branch_length) for s in (sequences[i] for i in batch)]
    return packed_layout(made, share=style == "shared")[0]


def cost_of(layout: PackedLayout, cost: TokenCost) -> float:
    """Every (query, key) pair counted: a token sees itself, what stands before it in its branch, and its prompt."""
    pairs = 0
    for group in layout.groups:
        pairs += sum(t + 1 for t in range(group.prompt_length))
        pairs += sum(group.prompt_length + t + 1 for length in group.branch_lengths for t in range(length))
    return layout.length + cost.per_pair * pairs


def whole_group_costs(sequences: list[PlannedSequence], style: RowStyle, cost: TokenCost) -> list[float]:
    members: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        members.setdefault(sequence.group, []).append(i)
    return [cost_of(layout_of(sequences, group, style), cost) for group in members.values()]


def longest_first(loads: list[float], world_size: int) -> float:
    """Largest load when each goes, largest first, to the least loaded rank."""
    totals = [0.0] * world_size
    for load in sorted(loads, reverse=True):
        totals[totals.index(min(totals))] += load
    return max(totals)


def ranks_of_groups(plan: Plan, sequences: list[PlannedSequence]) -> dict[int, set[int]]:
    where: dict[int, set[int]] = {}
    for i, rank in plan.owner_of().items():
        where.setdefault(sequences[i].group, set()).add(rank)
    return where


@given(workloads, ranks, budgets, styles, costs)
def test_every_sequence_once_in_lockstep_within_the_budget(
    sequences: list[PlannedSequence], world_size: int, budget: int | None, style: RowStyle, cost: TokenCost
) -> None:
    plan = plan_micro_batches(sequences, world_size, style=style, token_budget=budget, cost=cost)
    assert len(plan.ranks) == world_size
    assert {len(batches) for batches in plan.ranks} == {plan.micro_batches}
    batches = [batch for share in plan.ranks for batch in share]
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    layouts = [layout_of(sequences, batch, style) for batch in batches if batch]
    assert all(budget is None or layout.length <= budget for layout in layouts)
    assert plan.tokens == sum(layout.length for layout in layouts)
    assert plan.unshared_tokens == sum(s.length for s in sequences)


@given(workloads, ranks, budgets, styles, costs)
def test_costs_are_those_of_the_rows_and_costliest_micro_batches_meet(
    sequences: list[PlannedSequence], world_size: int, budget: int | None, style: RowStyle, cost: TokenCost
) -> None:
    plan = plan_micro_batches(sequences, world_size, style=style, token_budget=budget, cost=cost)
    for batches, estimated in zip(plan.ranks, plan.costs, strict=True):
        counted = [cost_of(layout_of(sequences, batch, style), cost) if batch else 0.0 for batch in batches]
        assert estimated == pytest.approx(counted, abs=len(sequences) / 256)
        assert estimated == sorted(estimated, reverse=True)
    assert plan.lockstep_cost == sum(max(share[m] for share in plan.costs) for m in range(plan.micro_batches))
    assert plan.lockstep_cost >= max(map(sum, plan.costs))


@given(workloads, ranks, budgets, costs)
def test_members_of_a_group_are_neighbours(sequences: list[PlannedSequence], world_size: int, budget: int | None, cost: TokenCost) -> None:
    plan = plan_micro_batches(sequences, world_size, style="shared", token_budget=budget, cost=cost)
    for batch in (b for batches in plan.ranks for b in batches):
        groups = [sequences[i].group for i in batch]
        assert sum(one != other for one, other in zip(groups, [None, *groups], strict=False)) == len(set(groups))


@given(workloads, ranks, styles, costs)
def test_no_rank_carries_more_than_whole_groups_would_make_it(
    sequences: list[PlannedSequence], world_size: int, style: RowStyle, cost: TokenCost
) -> None:
    """Largest first onto the least loaded rank is at most the mean and the costliest group; splits are made only where they save 2 %."""
    plan = plan_micro_batches(sequences, world_size, style=style, cost=cost)
    groups = whole_group_costs(sequences, style, cost)
    rounding = (len(sequences) + 1) / 256
    largest = max(map(sum, plan.costs))
    assert largest <= sum(groups) / world_size + max(groups, default=0.0) + rounding
    if any(len(where) > 1 for where in ranks_of_groups(plan, sequences).values()):
        assert largest <= 0.98 * longest_first(groups, world_size) + rounding


@given(workloads, ranks, st.integers(LONGEST, 6 * LONGEST), styles)
def test_a_group_on_one_rank_that_fits_the_budget_is_one_micro_batch(
    sequences: list[PlannedSequence], world_size: int, budget: int, style: RowStyle
) -> None:
    plan = plan_micro_batches(sequences, world_size, style=style, token_budget=budget)
    for group, where in ranks_of_groups(plan, sequences).items():
        members = [i for i, s in enumerate(sequences) if s.group == group]
        holding = [batch for batches in plan.ranks for batch in batches if set(members) & set(batch)]
        if len(where) == 1 and layout_of(sequences, members, style).length <= budget:
            assert len(holding) == 1


@given(workloads, ranks, budgets, styles, costs)
def test_the_plan_is_a_function_of_its_input(
    sequences: list[PlannedSequence], world_size: int, budget: int | None, style: RowStyle, cost: TokenCost
) -> None:
    copies = [PlannedSequence(s.group, s.prompt_length, s.branch_length) for s in sequences]
    first = plan_micro_batches(sequences, world_size, style=style, token_budget=budget, cost=cost)
    assert plan_micro_batches(copies, world_size, style=style, token_budget=budget, cost=TokenCost(cost.per_pair)) == first


@given(workloads, ranks, tight_budgets, styles)
def test_sequences_over_the_budget_are_refused_or_stay_alone(
    sequences: list[PlannedSequence], world_size: int, budget: int, style: RowStyle
) -> None:
    over = [i for i, s in enumerate(sequences) if s.length > budget]
    plan = plan_micro_batches(sequences, world_size, style=style, token_budget=budget, oversize="alone")
    batches = [batch for share in plan.ranks for batch in share]
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in batches:
        fits = not batch or layout_of(sequences, batch, style).length <= budget
        assert fits or len(batch) == 1
        assert len(batch) == 1 or not set(batch) & set(over)
    if over:
        expected = rf"sequence {over[0]} has {sequences[over[0]].length} tokens, over train_token_budget={budget} .*to at least"
        with pytest.raises(ConfigError, match=expected):
            plan_micro_batches(sequences, world_size, style=style, token_budget=budget, budget_name="train_token_budget")


@pytest.mark.parametrize("style", ["shared", "unshared", "padded"])
def test_the_number_of_micro_batches_is_rounded_up(style: RowStyle) -> None:
    plan = plan_micro_batches([PlannedSequence(g, 100, 500) for g in range(3)], 1, style=style, token_budget=1000)
    assert [len(batch) for batch in plan.ranks[0]] == [1, 1, 1]


@pytest.mark.parametrize("style", PACKED)
def test_the_last_micro_batch_is_as_full_as_the_others(style: RowStyle) -> None:
    plan = plan_micro_batches([PlannedSequence(g, 40, 60) for g in range(21)], 1, style=style, token_budget=1000)
    assert [len(batch) for batch in plan.ranks[0]] == [7, 7, 7]


def test_a_rank_that_needs_fewer_micro_batches_gets_empty_ones() -> None:
    plan = plan_micro_batches([PlannedSequence(g, 4, length) for g, length in enumerate([6, 2, 2])], 2, style="unshared", token_budget=10)
    assert plan.ranks == [[[0], []], [[1], [2]]]


def test_lengths_in_other_order_are_divided_anew_where_that_saves_a_micro_batch() -> None:
    """By falling cost and least load, 7, 3 and 1 would meet on one rank and exceed its single micro-batch."""
    sequences = [PlannedSequence(g, 0, length) for g, length in enumerate([3, 1, 9, 7])]
    plan = plan_micro_batches(sequences, 2, style="unshared", token_budget=10, cost=TokenCost(0.1))
    assert sorted(sorted(batch) for share in plan.ranks for batch in share) == [[0, 3], [1, 2]]


def group_of(count: int, prompt: int, branch: int, group: int) -> list[PlannedSequence]:
    return [PlannedSequence(group, prompt, branch)] * count


@pytest.mark.parametrize(
    ("groups", "world_size", "largest", "split"),
    [
        (3, 2, 768 + 256 + 4 * 64, 1),  # a group and half of the third
        (1, 4, 256 + 2 * 64, 1),
        (65, 8, 8 * 768 + 256 + 64, 1),  # only the 65th
        (64, 8, 8 * 768, 0),
    ],
)
def test_groups_are_split_where_that_takes_load_off_the_most_loaded_rank(groups: int, world_size: int, largest: int, split: int) -> None:
    sequences = [s for g in range(groups) for s in group_of(8, 256, 64, g)]
    plan = plan_micro_batches(sequences, world_size, style="shared")
    assert max(map(sum, plan.costs)) == largest
    assert sum(len(where) > 1 for where in ranks_of_groups(plan, sequences).values()) == split


def test_a_group_is_not_split_where_its_prompt_is_nearly_all_of_it() -> None:
    sequences = [s for g in range(3) for s in group_of(4, 1000, 2, g)]
    plan = plan_micro_batches(sequences, 2, style="shared")
    assert all(len(where) == 1 for where in ranks_of_groups(plan, sequences).values())


def test_groups_over_the_budget_keep_to_one_rank() -> None:
    sequences = [s for g in range(8) for s in group_of(8, 100, 100, g)]
    plan = plan_micro_batches(sequences, 4, style="shared", token_budget=500)
    assert all(len(where) == 1 for where in ranks_of_groups(plan, sequences).values())
    assert (plan.micro_batches, plan.imbalance) == (4, 0.0)
    assert plan.tokens == 8 * (8 * 100 + 2 * 100)


def test_a_group_that_outweighs_all_others_is_spread_over_ranks() -> None:
    sequences = [s for g in range(256) for s in group_of(2, 20, 10, g)] + group_of(64, 200, 100, 256)
    plan = plan_micro_batches(sequences, 8, style="shared", token_budget=700)
    assert plan.imbalance < 0.03


def test_sequences_of_other_prompt_lengths_do_not_share_a_prompt() -> None:
    sequences = [PlannedSequence(0, 10, 5), PlannedSequence(0, 12, 5), PlannedSequence(0, 10, 5)]
    plan = plan_micro_batches(sequences, 1, style="shared")
    assert plan.tokens == 10 + 5 + 5 + 12 + 5


def test_64_groups_a_rank_are_balanced() -> None:
    sequences = [PlannedSequence(g, 10 + 37 * g % 500, 1 + (g * 7919 + j * 104729) % 400) for g in range(512) for j in range(4)]
    plan = plan_micro_batches(sequences, 8, style="shared", token_budget=16384, cost=TokenCost(3e-4))
    assert plan.imbalance < 0.03
    assert all(len(where) == 1 for where in ranks_of_groups(plan, sequences).values())


def test_cost_of_a_model_weighs_attention_against_its_parameters() -> None:
    """One layer: 2 operations per parameter and token, 4 * 576 per pair."""
    cost = TokenCost.of_model(attention_width=576, layer_parameters=3_540_000)
    assert cost.per_pair == pytest.approx(4 * 576 / (2 * 3_540_000))
    with pytest.raises(ConfigError, match="must be finite and not negative"):
        TokenCost(-1.0)
    with pytest.raises(ConfigError, match="has no cost"):
        TokenCost.of_model(attention_width=576, layer_parameters=0)


def test_the_attention_term_moves_long_sequences_apart() -> None:
    """Two sequences of 64 tokens cost as many tokens as one of 128, but half its pairs."""
    sequences = [PlannedSequence(0, 0, 128), *(PlannedSequence(g, 0, 64) for g in range(1, 5))]
    by_tokens = plan_micro_batches(sequences, 3, style="unshared")
    with_pairs = plan_micro_batches(sequences, 3, style="unshared", cost=TokenCost(1.0))
    assert [sum(costs) for costs in by_tokens.costs] == [128.0] * 3
    assert max(map(sum, with_pairs.costs)) == 128 + 128 * 129 // 2
