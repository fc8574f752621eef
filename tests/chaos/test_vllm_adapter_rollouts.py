"""Rollouts in adapter mode from a real vLLM server on the CPU: every completion is the named adapter's, never the base model's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.spec import RolloutProcessSpec, VllmClientSpec
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.command import AdapterPlan
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.versions import adapter_name
from tests.integration.test_vllm_rollouts import check_genuine, collect, request, wait_until
from tests.integration.vllm_server import started, tiny_plan

pytestmark = pytest.mark.timeout(900)

ALIAS = "policy-of-a-run"


@pytest.fixture(scope="module")
def server(servable_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    plan = tiny_plan(servable_model, weight_transfer=None, adapters=AdapterPlan(max_rank=8))
    with started(plan, tmp_path_factory.mktemp("server") / "server.log") as process:
        yield process


@pytest.fixture(scope="module")
def adapters(servable_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters that move the model far, in folders named as the trainer names them."""
    folder = tmp_path_factory.mktemp("adapters")
    for version in range(2):
        torch.manual_seed(version)
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(base(servable_model), config).save_pretrained(folder / adapter_name(ALIAS, version))
    return [folder / adapter_name(ALIAS, version) for version in range(2)]


def base(model: Path) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return found


def on_server(server: ServerProcess, work: Callable[[VllmApi], Awaitable[None]]) -> None:
    async def run() -> None:
        api = VllmApi(server.address)
        try:
            await work(api)
        finally:
            await api.close()

    asyncio.run(run())


def test_requests_are_answered_by_the_adapter_of_their_version(
    server: ServerProcess, adapters: list[Path], servable_model: Path, tmp_path: Path
) -> None:
    """A version that the server has not loaded waits. After a push, requests in flight end with the adapter that they began with."""
    models = [PeftModel.from_pretrained(base(servable_model), path).merge_and_unload() for path in adapters]
    vllm = VllmClientSpec(servers=[server.address], run_token="ebft-adapters", adapter_alias=ALIAS)
    spec = RolloutProcessSpec(model_name_or_path=str(servable_model), engine="vllm", vllm=vllm, log_path=str(tmp_path / "rollout.log"))
    client = RolloutClient(spec)
    try:
        client.start()
        requests = [request(i, n=2, budget=12) for i in range(6)]
        client.submit(requests)
        wait_until(lambda: (counts := client.servers()) is not None and counts.stale == 1)
        assert client.poll(1.0) == []
        on_server(server, lambda api: api.load_adapter(adapters[0].name, str(adapters[0]), 60.0))
        check_genuine(models[0], requests, collect(client, 6))

        long = [request(10 + i, n=4, budget=220, stop=()) for i in range(3)]
        client.submit(long)
        wait_until(lambda: (counts := client.servers()) is not None and counts.outstanding == 3)
        client.expect_version(1)
        on_server(server, lambda api: api.load_adapter(adapters[1].name, str(adapters[1]), 60.0))
        client.confirm_version(1)
        client.submit(requests)
        found = collect(client, 9)
        check_genuine(models[0], long, {index: found.pop(index) for index in (10, 11, 12)})
        check_genuine(models[1], requests, found)
        assert {span.policy_version for group in found.values() for rollout in group.rollouts for span in rollout.spans} == {1}
    finally:
        client.stop()
