"""Runs over vLLM servers that come and go: one of two dies and is back, one is dead for good; and the adapter-only way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import VllmApi
from tests.integration.cli_runs import all_gone, end_tree, metrics, run, start, wait_for
from tests.integration.vllm_runs import assert_no_prompt_lost_or_twice, assert_pushed_and_probed, server_processes, vllm_settings
from tests.integration.vllm_server import KEY, started, tiny_plan

pytestmark = pytest.mark.timeout(1200)

Data = tuple[Path, Path]
RUN_SECONDS = 900.0


def test_two_servers_by_files_one_dies_and_comes_back(
    servable_model: Path, tiny_data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBFT_VLLM_API_KEY", KEY)
    output, steps = tmp_path / "run", 40
    plan = tiny_plan(servable_model, weight_transfer="ebft_disk")
    with started(plan, tmp_path / "one.log") as one, started(plan, tmp_path / "two.log") as two:
        urls = [one.address.url, two.address.url]
        fields = {"vllm_server_base_url": urls, "sync_transport": "disk", "sync_dir": tmp_path / "sync", "max_steps": steps}
        process = start(tmp_path / "recipe.yaml", vllm_settings(servable_model, tiny_data, output, **fields))
        try:
            wait_for(lambda: len(metrics(output)) >= 2, "two steps", RUN_SECONDS, process)
            os.killpg(two.pid() or 0, signal.SIGKILL)
            wait_for(lambda: not two.alive(), "the death of a server", 30.0)
            done = len(metrics(output))
            wait_for(lambda: len(metrics(output)) >= done + 2, "steps with one server", RUN_SECONDS, process)
            two.start()  # the same address, the checkpoint's weights
            two.wait_ready(RUN_SECONDS)
            text, _ = process.communicate(timeout=RUN_SECONDS)
            versions = [weight_version(server.address) for server in (one, two)]
        finally:
            end_tree(process.pid)
    assert process.returncode == 0, text[-4000:]
    assert_pushed_and_probed(output, steps)
    assert_no_prompt_lost_or_twice(output, steps)
    assert versions[0] == versions[1]
    assert versions[0].endswith(f":{steps}")
    assert not (tmp_path / "sync").exists() or not list((tmp_path / "sync").rglob("*.safetensors"))


def test_the_adapter_alone_with_a_server_of_the_run(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fields = {"vllm_launch": True, "sync_mode": "adapter", "vllm_lora_alias": "mine", "lora_r": 8, "max_steps": 4}
    finished = run(tmp_path / "recipe.yaml", vllm_settings(servable_model, tiny_data, output, **fields), RUN_SECONDS)
    assert finished.code == 0, finished.output[-4000:]
    assert_pushed_and_probed(output, 4)
    assert not server_processes(output)


def test_a_server_that_is_dead_for_good_ends_the_run_with_code_4(servable_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fields = {"vllm_launch": True, "vllm_server_restarts": 0, "max_steps": 200}
    process = start(tmp_path / "recipe.yaml", vllm_settings(servable_model, tiny_data, output, **fields))
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


def weight_version(address: ServerAddress) -> str:
    async def ask() -> str:
        api = VllmApi(address)
        try:
            return await api.weight_version()
        finally:
            await api.close()

    return asyncio.run(ask())
