"""tools/bench.py runs and counts right; what it measures is not judged here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import main
from tools.benchmarks.comparison import Way, compare

ROOT = Path(__file__).resolve().parent.parent.parent


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    target = folder / "report.json"
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), *arguments, "--rounds", "1", "--json", str(target)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(target.read_text())
    assert all(len(samples) == 1 for samples in found["samples"].values())
    return found


def test_sync_counts_the_bytes_of_whole_and_touched_models(tmp_path: Path, tiny_model: Path) -> None:
    found = bench(tmp_path, "sync", "--model", str(tiny_model), "--target-modules", "q_proj")
    whole = found["medians"]["plain: one gather, one state dict"]
    ours = found["medians"]["ours: all weights"]
    touched = found["medians"]["ours: touched modules"]
    # the plain state dict brings the tied embedding once as well
    assert ours["sent_mb"] == whole["sent_mb"]
    width, kv_width, layers = 64, 32, 4
    assert touched["sent_mb"] == layers * 2 * (width * width + width * kv_width) * 4 / 1e6
    assert all(value > 0 for value in found["ratios"].values())


def test_overlap_runs_both_ways(tmp_path: Path, tiny_model: Path) -> None:
    quick = ["--steps", "4", "--skip", "1", "--rollout-seconds", "0.2", "--train-seconds", "0.1"]
    found = bench(tmp_path, "overlap", "--model", str(tiny_model), *quick)
    for measured in found["medians"].values():
        assert measured["rollout_s"] == 0.2
        assert measured["step_s"] >= measured["train_s"] > 0.1
    # without staleness a step waits for its own rollouts from beginning to end
    assert found["medians"]["max_staleness 0"]["wait_s"] > 0.15


SMALL = ["--prompt", "24", "--n", "3", "--min-completion", "4", "--max-completion", "12"]


def bench_here(folder: Path, *arguments: str) -> dict[str, Any]:
    """In this process: these benchmarks start no ranks."""
    target = folder / "report.json"
    main([*arguments, "--threads", "1", "--rounds", "1", "--json", str(target)])
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_scoring_counts_tokens_and_checks_the_numbers(tmp_path: Path, tiny_model: Path) -> None:
    found = bench_here(tmp_path, "scoring", "--model", str(tiny_model), "--groups", "2", *SMALL)
    plain, ours = found["medians"]["plain: padded, all layers"], found["medians"]["ours"]
    assert plain["tokens"] == 2 * 4 * (24 + 12)  # with the reference, padded to the longest
    assert ours["tokens"] == 2 * (24 + 4 + 8 + 12 + 8)
    assert plain["gflop"] > ours["gflop"] > 0
    assert 0 < found["ratios"]["largest relative difference of the numbers"] < 1e-4


def test_policy_counts_tokens_and_checks_the_gradients(tmp_path: Path, tiny_model: Path) -> None:
    found = bench_here(tmp_path, "policy", "--model", str(tiny_model), "--plain-rows", "2", *SMALL)
    plain, ours = found["medians"]["plain: padded, full logits"], found["medians"]["ours"]
    assert plain["tokens"] in (2 * (24 + 12) + 24 + 4, 2 * (24 + 12) + 24 + 8, 2 * (24 + 8) + 24 + 12)  # by which one is alone
    assert ours["tokens"] == 24 + 4 + 8 + 12
    assert 0 < found["ratios"]["largest relative difference of the numbers"] < 1e-4


def test_logprobs_runs_both_heads(tmp_path: Path, tiny_model: Path) -> None:
    found = bench_here(tmp_path, "logprobs", "--model", str(tiny_model), "--positions", "96", "--chunk", "32")
    assert set(found["medians"]) == {f"{way}, {head} head" for way in ("plain", "ours") for head in ("frozen", "trained")}
    assert all(value < 1e-4 for name, value in found["ratios"].items() if "difference" in name)


def test_a_wrong_way_fails_the_benchmark() -> None:
    one, other = (Way(name, lambda value=value: {"features": torch.tensor([1.0, value])}, {}) for name, value in (("a", 1.0), ("b", 1.01)))
    with pytest.raises(SystemExit, match="b: features differs from a"):
        compare("scoring", {}, [(one, other)], argparse.Namespace(threads=1, dtype="float32", device="cpu", rounds=1, profile=False))
