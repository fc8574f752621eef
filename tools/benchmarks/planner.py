"""Plans of micro-batches, as every rank makes them in every step: how long they take, and how alike the ranks' loads are.

Needs no model. Sequences have lengths only; costs follow --pair-cost, what a pair of tokens costs beside a token in a layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ebft_ds.packing.attention import packed_attention
from ebft_ds.packing.cost import TOKENS_ONLY, TokenCost
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.plan import Plan
from tools.benchmarks.turns import Measurement, Report, in_turns, medians

PLAIN, BY_TOKENS, BY_COST = "plain: groups in turn", "ours: by tokens", "ours: with attention"
LONGEST = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=100_000, help="of the timed plan")
    parser.add_argument("--ranks", type=int, default=1024, help="of the timed plan")
    parser.add_argument("--balance-ranks", type=int, default=64, help="ranks on which balance is compared...")
    parser.add_argument("--groups-per-rank", type=int, default=64, help="...and groups for each")
    parser.add_argument("--generations", type=int, default=8, help="completions of a group, to which the reference comes")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--pair-cost", type=float, default=3.3e-4, help="default: of a layer of SmolLM2-135M")


@dataclass(frozen=True)
class Lengths:
    """A sequence as the planner meets it; token lists of one length are the same list."""

    group: int
    prompt_ids: list[int]
    completion_ids: list[int]


def run(model: Path, options: argparse.Namespace) -> Report:
    del model
    cost = TokenCost(options.pair_cost)
    many = make_sequences(options.groups, options.generations + 1, seed=0)
    some = make_sequences(options.groups_per_rank * options.balance_ranks, options.generations + 1, seed=1)
    ours, by_tokens = (RowPacker("shared", packed_attention("dense", device="cpu"), made_by) for made_by in (cost, TOKENS_ONLY))
    timed = f"ours: {options.groups} groups, {options.ranks} ranks"

    def measured(packer: RowPacker, sequences: Sequence[Lengths], ranks: int) -> Measurement:
        start = time.perf_counter()
        plan = packer.plan(sequences, ranks, token_budget=options.token_budget)
        seconds = time.perf_counter() - start
        return _figures(sequences, plan.ranks, cost) | {"plan_s": seconds, "groups_per_s": (sequences[-1].group + 1) / seconds}

    samples = in_turns(
        {
            PLAIN: lambda: _figures(some, groups_in_turn(some, options.balance_ranks, options.token_budget), cost),
            BY_TOKENS: lambda: measured(by_tokens, some, options.balance_ranks),
            BY_COST: lambda: measured(ours, some, options.balance_ranks),
            timed: lambda: measured(ours, many, options.ranks),
        },
        options.rounds,
    )
    settings: dict[str, str | int | float] = {
        "sequences a group": options.generations + 1,
        "groups a rank": options.groups_per_rank,
        "ranks": options.balance_ranks,
        "token budget": options.token_budget,
        "pair cost": options.pair_cost,
        "rounds": options.rounds,
    }
    return Report("planner", settings, medians(samples), samples)


def make_sequences(groups: int, members: int, *, seed: int) -> list[Lengths]:
    """Log-normal lengths: prompts around 200 tokens, completions around 100, at most 2048 together."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(5.3, 0.7, groups), 8, LONGEST // 2).astype(int).tolist()
    branches = np.clip(rng.lognormal(4.6, 0.8, (groups, members)), 1, LONGEST // 2).astype(int).tolist()
    lists = [[0] * length for length in range(LONGEST // 2 + 1)]
    return [Lengths(g, lists[prompts[g]], lists[length]) for g in range(groups) for length in branches[g]]


def groups_in_turn(sequences: Sequence[Lengths], ranks: int, token_budget: int) -> list[list[list[int]]]:
    """The plain way: groups go round the ranks, and each rank opens a new micro-batch when the budget is reached."""
    batches: list[list[list[int]]] = [[[]] for _ in range(ranks)]
    filled = [0] * ranks
    members: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        members.setdefault(sequence.group, []).append(i)
    for group, indices in members.items():
        rank = group % ranks
        tokens = len(sequences[indices[0]].prompt_ids) + sum(len(sequences[i].completion_ids) for i in indices)
        if filled[rank] and filled[rank] + tokens > token_budget:
            batches[rank].append([])
            filled[rank] = 0
        batches[rank][-1] += indices
        filled[rank] += tokens
    count = max(map(len, batches))
    return [share + [[] for _ in range(count - len(share))] for share in batches]


def _figures(sequences: Sequence[Lengths], ranks: list[list[list[int]]], cost: TokenCost) -> Measurement:
    """Balance under `cost`, whatever the plan was made by: largest rank over the mean, and what waiting for each other adds."""
    costs = [[_batch_cost(sequences, batch, cost) for batch in batches] for batches in ranks]
    found = Plan(ranks, costs=costs)
    mean = sum(map(sum, costs)) / len(costs)
    return {
        "imbalance_%": 100 * found.imbalance,
        "lockstep_%": 100 * (found.lockstep_cost / mean - 1),
        "micro_batches": found.micro_batches,
    }


def _batch_cost(sequences: Sequence[Lengths], batch: list[int], cost: TokenCost) -> float:
    """Counted here once more, from the lengths alone."""
    prompts = {sequences[i].group: len(sequences[i].prompt_ids) for i in batch}
    tokens, pairs = sum(prompts.values()), sum(p * (p + 1) // 2 for p in prompts.values())
    for i in batch:
        branch = len(sequences[i].completion_ids)
        tokens += branch
        pairs += branch * prompts[sequences[i].group] + branch * (branch + 1) // 2
    return tokens + cost.per_pair * pairs
