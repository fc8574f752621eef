"""kill -9 of every process of the rollout side, at idle, during generation and during a push.

The run recovers (its servers are started again) or ends with the documented code within 30 seconds of the kill; nothing is left
behind, no prompt is lost or trained twice, and every push that was logged was probed.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.cli_runs import all_gone, end_tree, metrics, overrides, rollout_process, start, tree, wait_for
from tests.integration.vllm_runs import assert_no_prompt_lost_or_twice, assert_pushed_and_probed, server_processes

pytestmark = pytest.mark.timeout(1200)

Data = tuple[Path, Path]
RUN_SECONDS = 900.0
STEPS = 8
VICTIMS = ("engine core", "worker", "api server", "rollout process")
MOMENTS = ("generation", "push", "idle")


def launch(model: Path, data: Data, folder: Path, moment: str) -> subprocess.Popen[str]:
    fields: dict[str, Any] = {
        "vllm_launch": True,
        "vllm_max_num_seqs": 16,
        "vllm_kv_cache_memory_bytes": 2**26,
        "max_steps": STEPS,
        "save_steps": 1,
        "log_level": "debug",
    }
    if moment == "push":
        fields["sync_bucket_mb"] = 0.002  # hundreds of buckets: a push takes long enough to be hit
    if moment == "idle":
        fields |= {"max_staleness": 0, "per_device_train_batch_size": 64, "num_generations": 64, "vllm_max_num_seqs": 64}  # long training
    return start(folder / "recipe.yaml", overrides(model, data, folder / "run", **fields))


def moment_of(moment: str, output: Path) -> Callable[[], bool]:
    """True when the run is in that moment, at some step after the first."""
    log = output / "logs" / "rank_0.log"

    def pushing() -> bool:
        text = log.read_text(errors="replace") if log.exists() else ""
        begun, done = (len(re.findall(pattern, text)) for pattern in (r"weight push \d+ begins", r"weight push \d+ is confirmed"))
        return len(metrics(output)) >= 1 and begun > done

    def between() -> bool:
        return len(metrics(output)) >= 2

    return pushing if moment == "push" else between


def victim_of(victim: str, process: subprocess.Popen[str], output: Path) -> psutil.Process | None:
    if victim == "rollout process":
        return rollout_process(process.pid)
    return server_processes(output).get(victim)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill(victim: str, moment: str, servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = launch(servable_model, tiny_data, tmp_path, moment)
    try:
        wait_for(moment_of(moment, output), moment, RUN_SECONDS, process)
        target = victim_of(victim, process, output)
        if target is None:
            pytest.skip(f"this server has no {victim} of its own")
        family = [*tree(process.pid), *server_processes(output).values()]
        target.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        text, _ = process.communicate(timeout=RUN_SECONDS)
        seconds = time.monotonic() - killed
    finally:
        end_tree(process.pid)
    assert all_gone(family)
    assert not server_processes(output)
    if victim == "rollout process":
        assert process.returncode == 4, text[-4000:]
        assert seconds < 30
        return
    assert process.returncode == 0, text[-4000:]
    assert "started again" in text
    assert_pushed_and_probed(output, STEPS)
    if moment != "idle":
        assert_no_prompt_lost_or_twice(output, STEPS)


def test_two_runs_on_one_machine_at_once(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    processes = []
    try:
        for folder in folders:
            folder.mkdir()
            processes.append(launch(servable_model, tiny_data, folder, "generation"))
        texts = [process.communicate(timeout=RUN_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            end_tree(process.pid)
    for process, folder, text in zip(processes, folders, texts, strict=True):
        assert process.returncode == 0, text[-4000:]
        assert_pushed_and_probed(folder / "run", STEPS)
        assert_no_prompt_lost_or_twice(folder / "run", STEPS)
