"""Whole training runs over real vLLM servers: started with the run, or already there. Further ones: tests/chaos."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli_runs import all_gone, end_tree, metrics, run, start, tree, wait_for
from tests.integration.vllm_runs import assert_no_prompt_lost_or_twice, assert_pushed_and_probed, server_processes, vllm_settings
from tests.integration.vllm_server import KEY

pytestmark = pytest.mark.timeout(900)

Data = tuple[Path, Path]
RUN_SECONDS = 600.0


def test_a_run_with_its_own_server_survives_the_death_of_the_engine_core(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    steps = 8
    output = tmp_path / "run"
    process = start(tmp_path / "recipe.yaml", vllm_settings(servable_model, tiny_data, output, vllm_launch=True, max_steps=steps))
    try:
        wait_for(lambda: len(metrics(output)) >= 2, "two steps", RUN_SECONDS, process)
        family = tree(process.pid)
        servers = server_processes(output)
        assert set(servers) >= {"api server", "engine core"}
        servers["engine core"].send_signal(signal.SIGKILL)
        text, _ = process.communicate(timeout=RUN_SECONDS)
    finally:
        end_tree(process.pid)
    assert process.returncode == 0, text[-4000:]
    assert "started again" in text
    assert_pushed_and_probed(output, steps)
    assert_no_prompt_lost_or_twice(output, steps)
    assert all_gone([*family, *servers.values()])
    assert not server_processes(output)
    assert [line["staleness/max"] for line in metrics(output) if "staleness/max" in line][-1] <= 1


def test_a_run_on_servers_that_are_there_leaves_them_running(
    servable_model: Path, tiny_data: Data, tmp_path: Path, vllm_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBFT_VLLM_API_KEY", KEY)
    output = tmp_path / "run"
    fields = {"vllm_server_base_url": vllm_server.address.url, "max_steps": 3, "use_peft": False}
    finished = run(tmp_path / "recipe.yaml", vllm_settings(servable_model, tiny_data, output, **fields), RUN_SECONDS)
    assert finished.code == 0, finished.output[-4000:]
    assert_pushed_and_probed(output, 3)
    assert KEY not in finished.output
    assert KEY not in (output / "config.resolved.yaml").read_text()
    assert vllm_server.alive()
