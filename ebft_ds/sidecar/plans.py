"""From a recipe to the plans of the servers that it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ebft_ds.config.engine_choice import Transport, devices_of_one_server, transport_of
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.address import is_loopback
from ebft_ds.sidecar.command import AdapterPlan, ServerPlan, WeightTransfer
from ebft_ds.sidecar.endpoints import advertised_host
from ebft_ds.sidecar.extra_arguments import check_extra_arguments, check_extra_environment
from ebft_ds.sidecar.keys import given_key, new_key

CPU_CACHE_BYTES = 256 * 2**20
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM can be told to hold."""
BACKENDS: dict[Transport, WeightTransfer | None] = {
    "nccl": "nccl",
    "ipc": "ipc",
    "gloo": "ebft_gloo",
    "disk": "ebft_disk",
    "adapter": None,
}


def server_plans(
    config: RecipeConfig,
    *,
    on_cpu: bool,
    environ: Mapping[str, str],
    visible_devices: Sequence[str] = (),
    always_key: bool = True,
) -> list[ServerPlan]:
    """One plan a server.

    `visible_devices`: divided among the servers where the recipe names none. `always_key`: make a key for loopback servers too, which
    keeps other users and other runs of this machine out; without, only the servers that other machines reach get one.

    Errors: ConfigError for devices that do not suffice, and for `vllm_server_args` or `vllm_server_env` that contradict other fields.
    """
    vllm, model = config.vllm, config.model
    if model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set")
    check_extra_arguments(vllm.vllm_server_args)
    check_extra_environment(vllm.vllm_server_env)
    check_rank_devices(config, environ)
    key = given_key(vllm.vllm_api_key_file, environ)
    transport = transport_of(config, on_cpu=on_cpu)
    if key is None and (always_key or transport == "ipc" or not is_loopback(vllm.vllm_host)):
        key = new_key()
    shares = [()] * vllm.vllm_num_servers if on_cpu or vllm.vllm_colocate else _device_shares(config, visible_devices)
    folder = Path(model.model_name_or_path)
    advertised = advertised_host(vllm.vllm_host, vllm.vllm_advertise_host)
    return [
        ServerPlan(
            model=str(folder.resolve()) if folder.is_dir() else model.model_name_or_path,
            revision=model.model_revision,
            trust_remote_code=model.trust_remote_code,
            dtype=config.rollout.rollout_dtype or model.dtype,
            max_model_len=vllm.vllm_max_model_len or config.data.max_seq_length,
            seed=config.run.seed,
            host=vllm.vllm_host,
            port=vllm.vllm_port + index if vllm.vllm_port is not None else None,
            advertise_host=advertised if advertised != vllm.vllm_host else None,
            api_key=key,
            on_cpu=on_cpu,
            devices=tuple(devices),
            tensor_parallel_size=vllm.vllm_tensor_parallel_size,
            pipeline_parallel_size=vllm.vllm_pipeline_parallel_size,
            data_parallel_size=vllm.vllm_data_parallel_size,
            gpu_memory_utilization=vllm.vllm_gpu_memory_utilization,
            kv_cache_memory_bytes=vllm.vllm_kv_cache_memory_bytes or (CPU_CACHE_BYTES if on_cpu else None),
            max_num_seqs=vllm.vllm_max_num_seqs,
            enforce_eager=on_cpu if vllm.vllm_enforce_eager is None else vllm.vllm_enforce_eager,
            enable_prefix_caching=vllm.vllm_enable_prefix_caching,
            weight_transfer=BACKENDS[transport],
            adapters=_adapters(config) if transport == "adapter" else None,
            sleep_mode=vllm.vllm_colocate,
            threads=config.rollout.rollout_threads or 1,
            extra_args=tuple(vllm.vllm_server_args),
            extra_env=dict(vllm.vllm_server_env),
        )
        for index, devices in enumerate(shares)
    ]


def _device_shares(config: RecipeConfig, visible: Sequence[str]) -> list[tuple[str, ...]]:
    each, servers = devices_of_one_server(config), config.vllm.vllm_num_servers
    named = config.vllm.vllm_devices
    devices = [str(number) for number in named] if named is not None else list(visible)
    if len(devices) < each * servers:
        where = "vllm_devices names" if named is not None else "this machine offers"
        raise ConfigError(f"{where} {len(devices)} GPU(s), and {servers} server(s) of {each} need {each * servers}")
    return [tuple(devices[index * each : (index + 1) * each]) for index in range(servers)]


def check_rank_devices(config: RecipeConfig, environ: Mapping[str, str]) -> None:
    """In a rank: are its node's ranks on other GPUs than the servers? Errors: ConfigError."""
    ranks = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")
    if ranks is None or not config.vllm.vllm_devices or config.vllm.vllm_colocate:
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    used = [str(number) for number in range(int(ranks))] if visible is None else visible.replace(" ", "").split(",")[: int(ranks)]
    shared = [number for number in config.vllm.vllm_devices if str(number) in used]
    if shared:
        raise ConfigError(
            f"vllm_devices {shared} are GPUs of this node's ranks as well; give the ranks others (deepspeed --include localhost:0,1,...; "
            "`ebft-ds train` does it by itself)"
        )


def _adapters(config: RecipeConfig) -> AdapterPlan:
    fitting = [rank for rank in LORA_RANKS if rank >= config.peft.lora_r]
    if not fitting:
        raise ConfigError(f"sync_mode: adapter: vLLM serves ranks up to {LORA_RANKS[-1]}, and lora_r is {config.peft.lora_r}")
    # Requests in flight may still use the adapters of as many steps ago as staleness allows, beside the current and the incoming one.
    return AdapterPlan(max_rank=fitting[0], max_adapters=config.rollout.max_staleness + 2)
