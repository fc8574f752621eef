"""Recipes with a vLLM sidecar: what is refused and why, which engine and transport follow, and which GPUs the ranks keep."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from ebft_ds.cli.devices import plan_ranks, training_devices
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.check_context import Surroundings
from ebft_ds.config.checks import check_config
from ebft_ds.config.engine_choice import rollout_engine_of, transport_of
from ebft_ds.config.model_facts import facts_from_config
from ebft_ds.errors import ConfigError, RolloutError
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.supported import (
    Installed,
    check_installed,
    check_model,
    check_server,
    is_tested,
    missing_routes,
)

FACTS = facts_from_config({"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "num_hidden_layers": 4})


def problems(accelerators: int | None = 8, world_size: int | None = None, **fields: Any) -> str:
    config = AsyncEBFTConfig(**({"model_name_or_path": "m"} | fields))
    return "\n".join(check_config(config, Surroundings(world_size, accelerators, FACTS)).problems)


GPU_LAUNCH: dict[str, Any] = {"vllm_launch": True, "vllm_devices": [7]}
CPU_LAUNCH: dict[str, Any] = {"vllm_launch": True, "dtype": "float32"}


def test_sound_recipes_pass() -> None:
    assert problems(**GPU_LAUNCH) == ""
    assert problems(0, **CPU_LAUNCH) == ""
    assert problems(vllm_server_base_url="http://127.0.0.1:1") == ""
    assert problems(vllm_colocate=True, world_size=1, max_staleness=0) == ""
    assert problems(0, **CPU_LAUNCH, use_peft=True, sync_mode="adapter") == ""


@pytest.mark.parametrize(
    ("fields", "accelerators", "reason"),
    [
        ({**GPU_LAUNCH, "vllm_server_base_url": "http://a:1"}, 8, "vllm_launch starts servers and vllm_server_base_url names running ones"),
        ({"vllm_colocate": True, "vllm_server_base_url": "http://a:1"}, 8, "vllm_colocate starts servers"),
        ({"rollout_engine": "vllm"}, 8, "rollout_engine: vllm needs a server"),
        ({**GPU_LAUNCH, "rollout_engine": "transformers"}, 8, "contradicts vllm_launch"),
        ({"vllm_server_base_url": [], "rollout_device": "cpu"}, 8, "empty list"),
        ({"sync_mode": "adapter", "rollout_device": "cpu"}, 8, "needs the vllm engine"),
        ({"sync_transport": "disk", "rollout_device": "cpu"}, 8, "the embedded engine has its own"),
        ({**GPU_LAUNCH, "vllm_max_model_len": 100}, 8, "vllm_max_model_len 100 is below max_seq_length 2048"),
        ({**GPU_LAUNCH, "vllm_max_model_len": 5000}, 8, "exceeds the model's context of 4096"),
        ({**GPU_LAUNCH, "vllm_max_num_seqs": 3}, 8, "vllm_max_num_seqs 3 is below num_generations 4"),
        ({"vllm_launch": True}, 8, "vllm_devices is needed"),
        ({**GPU_LAUNCH, "vllm_devices": []}, 8, "distinct GPU numbers"),
        ({**GPU_LAUNCH, "vllm_devices": [7, 7]}, 8, "distinct GPU numbers"),
        ({**GPU_LAUNCH, "vllm_tensor_parallel_size": 2}, 8, r"names 1 GPU\(s\); vllm_num_servers 1 x parallel sizes 2 needs 2"),
        ({**CPU_LAUNCH, "vllm_devices": [0]}, 0, "no GPU"),
        ({**CPU_LAUNCH, "vllm_tensor_parallel_size": 2}, 0, "need GPUs"),
        ({**CPU_LAUNCH, "sync_transport": "nccl"}, 0, "sync_transport: nccl moves weights between GPUs"),
        ({**CPU_LAUNCH, "sync_transport": "ipc"}, 0, "sync_transport: ipc moves weights between GPUs"),
        ({"vllm_colocate": True, "dtype": "float32"}, 0, "vllm_colocate shares a GPU"),
        ({"vllm_colocate": True, "vllm_devices": [1]}, 8, "the trainer's own GPU"),
        ({"vllm_colocate": True, "vllm_num_servers": 2}, 8, "one server on one GPU"),
        ({"vllm_colocate": True}, 1, "set max_staleness: 0"),
        ({**CPU_LAUNCH, "temperature": 3.0}, 0, "vLLM samples between"),
        ({**CPU_LAUNCH, "generation_kwargs": {"temperature": 0.001}}, 0, "vLLM samples between"),
        ({**CPU_LAUNCH, "vllm_server_start_timeout": 7200.0}, 0, "raise ddp_timeout"),
        ({**CPU_LAUNCH, "vllm_advertise_host": "node7"}, 0, "set vllm_host"),
        ({**CPU_LAUNCH, "vllm_num_servers": 2, "vllm_port": 65535}, 0, "ports end at 65535"),
        ({**CPU_LAUNCH, "sync_mode": "adapter"}, 0, "use_peft is false"),
        ({**CPU_LAUNCH, "sync_mode": "adapter", "use_peft": True, "use_dora": True}, 0, "does not serve DoRA"),
        ({**CPU_LAUNCH, "sync_mode": "adapter", "use_peft": True, "lora_modules_to_save": ["lm_head"]}, 0, "lora_modules_to_save"),
        ({**CPU_LAUNCH, "sync_mode": "adapter", "use_peft": True, "lora_r": 1024}, 0, "ranks up to 512"),
        ({**CPU_LAUNCH, "sync_mode": "adapter", "use_peft": True, "sync_transport": "gloo"}, 0, "has no meaning"),
    ],
)
def test_contradictions_are_refused_with_the_reason(fields: dict[str, Any], accelerators: int, reason: str) -> None:
    assert re.search(reason, problems(accelerators, **fields))


def test_a_colocated_run_has_one_rank() -> None:
    assert "there are 2 ranks" in problems(world_size=2, vllm_colocate=True, per_device_train_batch_size=8)


def test_the_embedded_engine_alone_needs_a_device() -> None:
    assert "rollout_device is needed" in problems()
    assert "rollout_device" not in problems(**GPU_LAUNCH)


def test_fields_without_effect_are_noted() -> None:
    config = AsyncEBFTConfig(vllm_gpu_memory_utilization=0.5)
    assert any("vllm_gpu_memory_utilization: no effect" in note for note in check_config(config).notes)


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({}, "transformers"),
        ({"vllm_launch": True}, "vllm"),
        ({"vllm_colocate": True}, "vllm"),
        ({"vllm_server_base_url": "http://a:1"}, "vllm"),
        ({"rollout_engine": "vllm"}, "vllm"),
        ({"rollout_engine": "transformers"}, "transformers"),
    ],
)
def test_the_engine_follows(fields: dict[str, Any], engine: str) -> None:
    assert rollout_engine_of(AsyncEBFTConfig(**fields)) == engine


@pytest.mark.parametrize(
    ("fields", "on_cpu", "transport"),
    [
        ({}, True, "gloo"),
        ({}, False, "nccl"),
        ({"vllm_colocate": True}, False, "ipc"),
        ({"sync_transport": "disk"}, False, "disk"),
        ({"sync_mode": "adapter"}, True, "adapter"),
    ],
)
def test_the_transport_follows(fields: dict[str, Any], on_cpu: bool, transport: str) -> None:
    assert transport_of(AsyncEBFTConfig(**fields), on_cpu=on_cpu) == transport


def test_the_ranks_get_the_gpus_that_are_left() -> None:
    config = AsyncEBFTConfig(vllm_launch=True, vllm_devices=[6, 7])
    visible = [str(number) for number in range(8)]
    assert training_devices(config, visible) == ["0", "1", "2", "3", "4", "5"]
    plan = plan_ranks(config, visible)
    assert (plan.world_size, plan.accelerators, plan.environment) == (6, 6, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"})
    assert plan_ranks(config.replace(num_processes=2), visible).world_size == 2
    assert training_devices(config, ["4", "6", "7"]) == ["4"]  # limited from outside
    served = config.replace(vllm_launch=False, vllm_server_base_url="http://127.0.0.1:8000")
    assert training_devices(served, visible) == ["0", "1", "2", "3", "4", "5"]  # `ebft-ds serve` of the same recipe has them
    elsewhere = config.replace(vllm_launch=False, vllm_server_base_url=["http://127.0.0.1:8000", "http://node7:8000"])
    assert training_devices(elsewhere, visible) == visible


def test_servers_and_ranks_must_fit() -> None:
    config = AsyncEBFTConfig(vllm_launch=True, vllm_devices=[6, 7])
    with pytest.raises(ConfigError, match=r"GPU 6, 7 is none of those that this run may use \(0, 1\)"):
        plan_ranks(config, ["0", "1"])
    with pytest.raises(ConfigError, match="leaves none for the ranks"):
        plan_ranks(config, ["6", "7"])
    with pytest.raises(ConfigError, match="num_processes 3 needs as many GPUs"):
        plan_ranks(config.replace(num_processes=3), ["4", "5", "6", "7"])


def test_without_servers_of_ours_all_gpus_are_the_ranks() -> None:
    visible = ["0", "1"]
    for fields in ({}, {"vllm_colocate": True}, {"vllm_server_base_url": "http://a:1"}):
        assert training_devices(AsyncEBFTConfig(**fields), visible) == visible
    assert plan_ranks(AsyncEBFTConfig(vllm_launch=True), []).environment == {}


def test_versions() -> None:
    assert is_tested("0.32.0")
    assert is_tested("0.32.1+cpu")
    assert not is_tested("0.33.0")
    assert not is_tested("0.3.2")
    assert not is_tested("0.320.0")


@pytest.mark.parametrize(
    ("found", "on_cpu", "reason"),
    [
        (None, False, r"not installed.*pip install 'ebft_ds\[vllm\]'"),
        (None, True, "not installed.*install_vllm_cpu"),
        (Installed("vllm", "9.9.0", True), False, r"vllm 9.9.0 is installed, and this package is tested with 0.32"),
        (Installed("vllm", "0.32.0", True), True, "the GPU build"),
        (Installed("vllm-cpu", "0.32.0", True), False, "the CPU build"),
        (Installed("vllm-cpu", "0.32.0", False), True, "entry point"),
    ],
)
def test_an_installation_that_cannot_serve_is_refused(found: Installed | None, on_cpu: bool, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_installed(on_cpu=on_cpu, found=found)


def test_fitting_installations_pass() -> None:
    check_installed(on_cpu=True, found=Installed("vllm-cpu", "0.32.0", True))
    check_installed(on_cpu=False, found=Installed("vllm", "0.32.1", True))


def test_heads_that_the_cpu_server_dies_of_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads have 16 dimensions"):
        check_model(FACTS, on_cpu=True)
    check_model(FACTS, on_cpu=False)
    check_model(facts_from_config({"hidden_size": 64, "num_attention_heads": 2}), on_cpu=True)
    check_model(None, on_cpu=True)


class StubServer:
    """Answers of a server of another version."""

    class address:
        url = "http://127.0.0.1:1"

    def __init__(self, version: str, routes: set[str], length: int) -> None:
        self._version, self._routes, self._length = version, routes, length

    async def vllm_version(self) -> str:
        return self._version

    async def routes(self) -> set[str]:
        return self._routes

    async def models(self) -> dict[str, int | None]:
        return {"m": self._length}


def checked(version: str, routes: set[str], length: int = 4096) -> None:
    server: Any = StubServer(version, routes, length)
    api: VllmApi = server
    asyncio.run(check_server(api, "gloo", context_length=2048))


def test_a_server_of_another_version_is_refused_by_name() -> None:
    everything = set(missing_routes([], "gloo"))
    checked("0.32.0", everything)
    with pytest.raises(RolloutError, match=r"it is vLLM 9.9, and this package is tested with 0.32"):
        checked("9.9", everything)
    with pytest.raises(RolloutError, match=r"it lacks /collective_rpc, /pause: start it with `ebft-ds serve`"):
        checked("0.32.0", everything - {"/collective_rpc", "/pause"})
    with pytest.raises(RolloutError, match="its --max-model-len is 512, and max_seq_length is 2048"):
        checked("0.32.0", everything, 512)


def test_each_transport_has_its_routes() -> None:
    assert "/v1/load_lora_adapter" in missing_routes([], "adapter")
    assert "/update_weights" in missing_routes([], "nccl")
    assert "/sleep" in missing_routes([], "ipc")
    assert "/collective_rpc" in missing_routes([], "disk")
