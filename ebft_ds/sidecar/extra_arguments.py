"""A user's further arguments and variables of the server command: what they may not touch, and which field says it instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebft_ds.errors import ConfigError

_OURS = "it is set by the package"
OWNED_FLAGS: dict[str, str] = {
    "--model": "model_name_or_path",
    "--tokenizer": "the tokenizer is the model's",
    "--revision": "model_revision",
    "--tokenizer-revision": "model_revision",
    "--trust-remote-code": "trust_remote_code",
    "--host": "vllm_host",
    "--port": "vllm_port",
    "--uds": "vllm_host and vllm_port",
    "--dtype": "rollout_dtype",
    "--max-model-len": "vllm_max_model_len",
    "--seed": "seed",
    "--tensor-parallel-size": "vllm_tensor_parallel_size",
    "--pipeline-parallel-size": "vllm_pipeline_parallel_size",
    "--data-parallel-size": "vllm_data_parallel_size",
    "--gpu-memory-utilization": "vllm_gpu_memory_utilization",
    "--kv-cache-memory-bytes": "vllm_kv_cache_memory_bytes",
    "--max-num-seqs": "vllm_max_num_seqs",
    "--enforce-eager": "vllm_enforce_eager",
    "--enable-prefix-caching": "vllm_enable_prefix_caching",
    "--logprobs-mode": f"{_OURS}: log-probs must be those of the sampled distribution",
    "--generation-config": f"{_OURS}: requests state every sampling field",
    "--override-generation-config": "requests state every sampling field; see temperature, top_p, top_k, min_p",
    "--enable-scale-out": _OURS,
    "--weight-transfer-config": "sync_transport",
    "--enable-lora": "sync_mode: adapter",
    "--max-lora-rank": "lora_r",
    "--max-loras": "max_staleness",
    "--max-cpu-loras": "max_staleness",
    "--lora-modules": "sync_mode: adapter",
    "--enable-sleep-mode": "vllm_colocate",
    "--middleware": f"{_OURS}: it guards the control routes",
    "--api-key": "vllm_api_key_file: vLLM's own key leaves the control routes open",
    "--root-path": "routes must lie at the top",
    "--disable-fastapi-docs": "the server's routes are checked by its OpenAPI page",
    "--quantization": "quantised weights cannot be updated from the trainer's",
    "--load-format": "the server starts from the checkpoint's weights",
    "--runner": "the server generates",
    "--config": "put each argument into vllm_server_args",
    "--ssl-keyfile": "the package speaks plain HTTP; tunnel it where the network is not trusted",
    "--ssl-certfile": "the package speaks plain HTTP; tunnel it where the network is not trusted",
    "--headless": "a server needs its HTTP front",
}
"""Flag -> the field to use, or why not. Abbreviations are recognised, `--no-...` forms too."""
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size", "-q": "--quantization"}

OWNED_VARIABLES: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "vllm_devices",
    "VLLM_SERVER_DEV_MODE": _OURS,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "sync_mode: adapter",
    "VLLM_API_KEY": "vllm_api_key_file",
    "EBFT_VLLM_API_KEY": "vllm_api_key_file",
    "VLLM_PLUGINS": f"{_OURS}; set it where you start the run, the plugin ebft_ds is added",
    "VLLM_CPU_KVCACHE_SPACE": "vllm_kv_cache_memory_bytes",
    "PYTHONPATH": "set it where you start the run",
}


def check_extra_arguments(arguments: Sequence[str]) -> None:
    """Errors: ConfigError for every argument that a field of the recipe, or the package, sets already."""
    problems = []
    for argument in arguments:
        flag = _flag(argument)
        owner = _owner(flag) if flag is not None else None
        if owner is not None:
            problems.append(f"vllm_server_args: {argument.partition('=')[0]}: {_use(OWNED_FLAGS[owner])}")
    if arguments and not arguments[0].startswith("-"):
        problems.append(f"vllm_server_args: {arguments[0]!r} is no flag; write each flag and each value as an item of its own")
    if problems:
        raise ConfigError("\n".join(problems))


def check_extra_environment(variables: Mapping[str, str]) -> None:
    """Errors: ConfigError for every variable that is not the user's to set."""
    problems = [f"vllm_server_env: {name}: {_use(OWNED_VARIABLES[name])}" for name in variables if name in OWNED_VARIABLES]
    if problems:
        raise ConfigError("\n".join(problems))


def _flag(argument: str) -> str | None:
    """The flag in one argument, in its long form; None for a value."""
    written = argument.partition("=")[0]
    if written in _SHORT:
        return _SHORT[written]
    if not written.startswith("--"):
        return None
    flag = written.partition(".")[0].replace("_", "-")  # --flag.key is a key of the flag's mapping
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag


def _owner(flag: str) -> str | None:
    """The owned flag that this is, or abbreviates."""
    if flag in OWNED_FLAGS:
        return flag
    return next((owned for owned in OWNED_FLAGS if owned.startswith(flag) and len(flag) > 4), None)


def _use(reason: str) -> str:
    return f"use {reason}" if " " not in reason or reason.startswith("sync_mode: adapter") else reason
