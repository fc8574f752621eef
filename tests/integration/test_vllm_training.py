"""Whole training runs over real vLLM servers: started with the run or already there, by every transport that runs on CPUs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli_runs import all_gone, end_tree, metrics, overrides, run, start, tree, wait_for
from tests.integration.vllm_runs import assert_no_prompt_lost_or_twice, assert_pushed_and_probed, server_processes
from tests.integration.vllm_server import KEY, started, tiny_plan

pytestmark = pytest.mark.timeout(900)

Data = tuple[Path, Path]
RUN_SECONDS = 600.0


def settings(model: Path, data: Data, output: Path, **fields: Any) -> list[str]:
    return overrides(model, data, output, **({"vllm_max_num_seqs": 16, "vllm_kv_cache_memory_bytes": 2**26} | fields))


def test_a_run_with_its_own_server_survives_the_death_of_the_engine_core(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    steps = 8
    output = tmp_path / "run"
    process = start(tmp_path / "recipe.yaml", settings(servable_model, tiny_data, output, vllm_launch=True, max_steps=steps))
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
    for name, fields in {"full": {"use_peft": False}, "lora": {"sync_transport": "gloo"}}.items():
        output = tmp_path / name
        url = {"vllm_server_base_url": vllm_server.address.url}
        finished = run(tmp_path / "recipe.yaml", settings(servable_model, tiny_data, output, max_steps=3, **url, **fields), RUN_SECONDS)
        assert finished.code == 0, finished.output[-4000:]
        assert_pushed_and_probed(output, 3)
        assert KEY not in finished.output
        assert KEY not in (output / "config.resolved.yaml").read_text()
    assert vllm_server.alive()


def test_two_servers_by_files_one_dies_and_comes_back(
    servable_model: Path, tiny_data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBFT_VLLM_API_KEY", KEY)
    output, steps = tmp_path / "run", 12
    plan = tiny_plan(servable_model, weight_transfer="ebft_disk")
    with started(plan, tmp_path / "one.log") as one, started(plan, tmp_path / "two.log") as two:
        urls = [one.address.url, two.address.url]
        fields = {"vllm_server_base_url": urls, "sync_transport": "disk", "sync_dir": tmp_path / "sync", "max_steps": steps}
        process = start(tmp_path / "recipe.yaml", settings(servable_model, tiny_data, output, **fields))
        try:
            wait_for(lambda: len(metrics(output)) >= 2, "two steps", RUN_SECONDS, process)
            two.stop()
            done = len(metrics(output))
            wait_for(lambda: len(metrics(output)) >= done + 2, "steps with one server", RUN_SECONDS, process)
            text, _ = process.communicate(timeout=RUN_SECONDS)
        finally:
            end_tree(process.pid)
    assert process.returncode == 0, text[-4000:]
    assert_pushed_and_probed(output, steps)
    assert_no_prompt_lost_or_twice(output, steps)
    assert not (tmp_path / "sync").exists() or not list((tmp_path / "sync").rglob("*.safetensors"))


def test_the_adapter_alone_with_a_server_of_the_run(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fields = {"vllm_launch": True, "sync_mode": "adapter", "vllm_lora_alias": "mine", "lora_r": 8, "max_steps": 4}
    finished = run(tmp_path / "recipe.yaml", settings(servable_model, tiny_data, output, **fields), RUN_SECONDS)
    assert finished.code == 0, finished.output[-4000:]
    assert_pushed_and_probed(output, 4)
    assert not server_processes(output)


def test_a_server_that_is_dead_for_good_ends_the_run_with_code_4(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fields = {"vllm_launch": True, "vllm_server_restarts": 0, "max_steps": 200}
    process = start(tmp_path / "recipe.yaml", settings(servable_model, tiny_data, output, **fields))
    try:
        wait_for(lambda: len(metrics(output)) >= 1, "a step", RUN_SECONDS, process)
        servers = server_processes(output)
        servers["api server"].send_signal(signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
    finally:
        end_tree(process.pid)
    assert process.returncode == 4, text[-4000:]
    assert "vllm_server_restarts" in text
    assert all_gone(list(servers.values()))
