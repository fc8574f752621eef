"""tools/bench.py runs and counts right; what it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
