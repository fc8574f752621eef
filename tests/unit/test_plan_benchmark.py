"""tools/bench.py planner counts right; what it measures is not judged here."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ebft_ds.packing.cost import TokenCost
from ebft_ds.packing.plan import PlannedSequence, plan_micro_batches
from tools.benchmarks import planner


def test_planner_counts_each_plan_on_its_own(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    planner.add_arguments(parser)
    options = parser.parse_args(["--groups", "60", "--ranks", "4", "--balance-ranks", "3", "--groups-per-rank", "8"])
    options.rounds = 1
    report = planner.run(tmp_path, options)
    sequences = planner.make_sequences(24, 9, seed=1)
    planned = [PlannedSequence(s.group, len(s.prompt_ids), len(s.completion_ids)) for s in sequences]
    plan = plan_micro_batches(planned, 3, style="shared", token_budget=options.token_budget, cost=TokenCost(options.pair_cost))
    found = report.medians[planner.BY_COST]
    assert found["imbalance_%"] == pytest.approx(100 * plan.imbalance, abs=0.1)
    assert found["micro_batches"] == plan.micro_batches
    assert report.medians[planner.PLAIN]["imbalance_%"] > found["imbalance_%"]
    assert len(report.medians) == 4


def test_the_plain_way_keeps_the_budget_too() -> None:
    sequences = planner.make_sequences(20, 3, seed=0)
    batches = [batch for share in planner.groups_in_turn(sequences, 2, 3000) for batch in share]
    assert sorted(i for batch in batches for i in batch) == list(range(60))
    for batch in filter(None, batches):
        prompts = {sequences[i].group: len(sequences[i].prompt_ids) for i in batch}
        tokens = sum(prompts.values()) + sum(len(sequences[i].completion_ids) for i in batch)
        assert tokens <= 3000 or len(prompts) == 1
