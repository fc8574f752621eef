"""The server command: what stands in it, what does not, and what a recipe makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.auth import KEY_VARIABLE
from ebft_ds.sidecar.command import AdapterPlan, ServerPlan, served_url, server_command
from ebft_ds.sidecar.extra_arguments import OWNED_FLAGS, check_extra_arguments, check_extra_environment
from ebft_ds.sidecar.plans import server_plans

HOME = str(Path(__file__).resolve().parent.parent.parent)


def recipe(**fields: Any) -> AsyncEBFTConfig:
    return AsyncEBFTConfig(**({"model_name_or_path": "org/model", "dtype": "float32", "max_seq_length": 96, "vllm_launch": True} | fields))


def plans(config: AsyncEBFTConfig, *, on_cpu: bool = True, **more: Any) -> list[ServerPlan]:
    return server_plans(config, on_cpu=on_cpu, environ=more.pop("environ", {}), **more)


def test_the_command_of_a_cpu_server() -> None:
    plan = plans(recipe(vllm_port=8100, vllm_max_num_seqs=16), environ={KEY_VARIABLE: "secret"})[0]
    command = server_command(plan, {"PATH": "/bin"}, python="python")
    assert command.argv == [
        *("python", "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "org/model"),
        *("--host", "127.0.0.1", "--port", "8100"),
        *("--dtype", "float32", "--max-model-len", "96", "--seed", "42"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1", "--data-parallel-size", "1"),
        *("--kv-cache-memory-bytes", "268435456", "--max-num-seqs", "16"),
        *("--enforce-eager", "--enable-prefix-caching"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-scale-out", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", '{"backend": "ebft_gloo"}'),
        *("--middleware", "ebft_ds.sidecar.auth.RequireKey"),
    ]
    assert command.env == {
        "PATH": "/bin",
        "PYTHONPATH": HOME,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "CUDA_VISIBLE_DEVICES": "",
        KEY_VARIABLE: "secret",
    }


def test_the_commands_of_two_gpu_servers() -> None:
    config = recipe(
        model_revision="abc",
        trust_remote_code=True,
        dtype="bfloat16",
        vllm_num_servers=2,
        vllm_tensor_parallel_size=2,
        vllm_devices=[4, 5, 6, 7],
        vllm_port=8100,
        vllm_enforce_eager=True,
        vllm_enable_prefix_caching=False,
        vllm_gpu_memory_utilization=0.8,
        vllm_server_args=["--max-num-batched-tokens", "8192"],
        vllm_server_env={"NCCL_DEBUG": "INFO"},
    )
    first, second = (server_command(plan, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, python="python") for plan in plans(config, on_cpu=False))
    assert first.argv[4:] == [
        *("--model", "org/model", "--revision", "abc", "--tokenizer-revision", "abc", "--trust-remote-code"),
        *("--host", "127.0.0.1", "--port", "8100"),
        *("--dtype", "bfloat16", "--max-model-len", "96", "--seed", "42"),
        *("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1", "--data-parallel-size", "1"),
        *("--gpu-memory-utilization", "0.8", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-scale-out", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", '{"backend": "nccl"}'),
        *("--middleware", "ebft_ds.sidecar.auth.RequireKey"),
        *("--max-num-batched-tokens", "8192"),
    ]
    assert first.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert first.env["NCCL_DEBUG"] == "INFO"
    assert "TORCHDYNAMO_DISABLE" not in first.env
    assert second.env["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert second.argv[second.argv.index("--port") + 1] == "8101"
    assert first.env[KEY_VARIABLE] == second.env[KEY_VARIABLE]


def test_adapter_mode_serves_adapters_and_takes_no_weights() -> None:
    plan = plans(recipe(use_peft=True, lora_r=24, sync_mode="adapter", max_staleness=3))[0]
    assert plan.weight_transfer is None
    assert plan.adapters == AdapterPlan(max_rank=32, max_adapters=5)
    command = server_command(with_port(plan), {})
    start = command.argv.index("--enable-lora")
    assert command.argv[start : start + 7] == ["--enable-lora", "--max-lora-rank", "32", "--max-loras", "5", "--max-cpu-loras", "5"]
    assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--weight-transfer-config" not in command.argv


def test_a_colocated_server_sleeps_and_takes_handles() -> None:
    plan = plans(recipe(vllm_colocate=True, vllm_launch=False, vllm_gpu_memory_utilization=0.4), on_cpu=False)[0]
    command = server_command(with_port(plan), {"CUDA_VISIBLE_DEVICES": "3", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert "--enable-sleep-mode" in command.argv
    assert plan.weight_transfer == "ipc"
    assert command.env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in command.env


def with_port(plan: ServerPlan) -> ServerPlan:
    return replace(plan, port=8000)


def test_the_key_is_in_no_argument() -> None:
    plan = plans(recipe())[0]
    assert plan.api_key is not None
    assert len(plan.api_key) >= 32
    assert not any(plan.api_key in argument for argument in server_command(with_port(plan), {}).argv)
    assert plan.api_key != plans(recipe())[0].api_key  # a new one for every run


def test_a_loopback_server_may_have_none() -> None:
    plan = plans(recipe(), always_key=False)[0]
    command = server_command(with_port(plan), {})
    assert plan.api_key is None
    assert "--middleware" not in command.argv
    assert KEY_VARIABLE not in command.env
    assert plans(recipe(vllm_host="0.0.0.0", vllm_advertise_host="node7"), always_key=False)[0].api_key is not None


def test_a_trainers_rank_leaves_no_trace_in_the_environment() -> None:
    inherited = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "EBFT_DS_EXIT_RECORDS": "/tmp/x",
        "VLLM_API_KEY": "other",
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "VLLM_PORT": "9000",
        "OMP_NUM_THREADS": "8",
        "HF_HOME": "/cache",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "other",
        "PYTHONPATH": f"/somewhere{os.pathsep}{HOME}",
    }
    env = server_command(with_port(plans(recipe(), always_key=False)[0]), inherited).env
    assert not set(env) & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "EBFT_DS_EXIT_RECORDS"}
    assert not set(env) & {"VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT"}
    assert (env["HF_HOME"], env["HF_HUB_OFFLINE"], env["OMP_NUM_THREADS"]) == ("/cache", "1", "1")
    assert env["VLLM_PLUGINS"] == "other,ebft_ds"
    assert env["PYTHONPATH"] == inherited["PYTHONPATH"]


def test_model_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert plans(recipe(model_name_or_path="model"))[0].model == str(tmp_path / "model")


@pytest.mark.parametrize(("transport", "backend"), [("gloo", "ebft_gloo"), ("disk", "ebft_disk"), ("auto", "ebft_gloo")])
def test_transports_have_their_engines(transport: str, backend: str) -> None:
    assert plans(recipe(sync_transport=transport))[0].weight_transfer == backend


def test_devices_must_suffice() -> None:
    with pytest.raises(ConfigError, match=r"this machine offers 1 GPU\(s\), and 2 server\(s\) of 1 need 2"):
        plans(recipe(vllm_num_servers=2), on_cpu=False, visible_devices=["0"])


def test_a_launchers_ranks_may_not_sit_on_the_servers_gpus() -> None:
    config = recipe(vllm_devices=[1])
    for environ in ({"LOCAL_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "3,1"}):
        with pytest.raises(ConfigError, match=r"vllm_devices \[1\] are GPUs of this node's ranks as well"):
            plans(config, on_cpu=False, environ=environ)
    for environ in ({}, {"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,2,1"}):
        assert plans(config, on_cpu=False, environ=environ)[0].devices == ("1",)


def test_urls() -> None:
    plan = ServerPlan(model="m", max_model_len=8, host="::1")
    assert served_url(plan, 80) == "http://[::1]:80"
    assert served_url(plans(recipe(vllm_host="0.0.0.0", vllm_advertise_host="node7"))[0], 81) == "http://node7:81"
    with pytest.raises(ValueError, match="no port"):
        server_command(plan)


@pytest.mark.parametrize(
    "argument",
    [
        "--model",
        "--port=1",
        "--max_model_len",
        "--max-model",
        "--no-enable-prefix-caching",
        "-tp",
        "-tp=2",
        "--weight-transfer-config.x",
    ],
)
def test_arguments_that_contradict_the_recipe_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="vllm_server_args"):
        check_extra_arguments([argument])


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(ConfigError, match="--max-model-len: use vllm_max_model_len"):
        plans(recipe(vllm_server_args=["--max-model-len", "9"]))
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES: use vllm_devices"):
        plans(recipe(vllm_server_env={"CUDA_VISIBLE_DEVICES": "0"}))
    with pytest.raises(ConfigError, match="'8' is no flag"):
        check_extra_arguments(["8"])


def test_other_arguments_pass() -> None:
    check_extra_arguments(["--max-num-batched-tokens", "8192", "--block-size", "32", "--kv-cache-dtype=auto", "-O1", "--model-impl=vllm"])
    check_extra_environment({"NCCL_DEBUG": "INFO"})


def test_every_flag_of_ours_is_owned() -> None:
    everything = ServerPlan(
        model="m",
        revision="r",
        trust_remote_code=True,
        max_model_len=8,
        port=1,
        api_key="k",
        max_num_seqs=1,
        weight_transfer="nccl",
        adapters=AdapterPlan(8),
        sleep_mode=True,
    )
    flags = {argument for argument in server_command(everything, {}).argv[4:] if argument.startswith("--")}
    plain = {flag.replace("--no-", "--") for flag in flags} - {"--disable-uvicorn-access-log"}
    assert plain <= set(OWNED_FLAGS)
