"""tools/bench.py reward trains as TRL does; what it measures is not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_bench import bench_here

SMALL = ["--prompt", "24", "--response", "8", "--layers", "2", "--hidden", "64", "--pairs", "3"]


@pytest.mark.parametrize("options", [[], ["--gradient-checkpointing"]])
def test_losses_and_gradients_are_those_of_trl(tmp_path: Path, options: list[str]) -> None:
    pytest.importorskip("trl")
    found = bench_here(tmp_path, "reward", *SMALL, *options)
    plain, ours = found["medians"]["plain: TRL RewardTrainer"], found["medians"]["ours"]
    assert plain["tokens"] == 3 * 2 * (24 + 8)
    assert ours["tokens"] == 3 * (24 + 2 * 8)
    assert plain["gflop"] > ours["gflop"] > 0
    assert found["ratios"]["largest relative difference of the losses"] < 1e-5
    assert found["ratios"]["largest relative difference of the numbers"] < 1e-4
