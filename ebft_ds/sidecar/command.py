"""The command line and the environment of one vLLM server: a pure function of a plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ebft_ds.sidecar.auth import KEY_VARIABLE

PLUGIN = "ebft_ds"
"""Our entry point in the group vllm.general_plugins."""
MODULE = "vllm.entrypoints.openai.api_server"
"""Run with -m: `vllm serve` does not start the CPU build, whose distribution has another name."""

WeightTransfer = Literal["nccl", "ipc", "ebft_gloo", "ebft_disk"]

RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    }
    | {"ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"}
)
"""What a launcher tells a trainer's rank; a server would take itself for one."""
FOREIGN_VARIABLES = frozenset({"VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT", "VLLM_DP_RANK", "VLLM_DP_SIZE", "PYTHONSAFEPATH"})
"""Would set what the plan sets, or what belongs to one server alone."""
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "EBFT_", "PMI_", "PMIX_", "OMPI_", "VLLM_DP_")


class AdapterPlan(msgspec.Struct, frozen=True):
    """Adapters loaded and unloaded at run time."""

    max_rank: int
    max_adapters: int = 2
    """At once: the current version and the one before it, whose requests are in flight."""


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as its recipe wants it."""

    model: str
    """Folder (absolute: the server has its own working directory) or hub name."""
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "float32"
    max_model_len: int
    seed: int = 0
    host: str = "127.0.0.1"
    port: int | None = None
    """None: a free one is chosen when the server starts."""
    advertise_host: str | None = None
    """Name in the URL where `host` is a wildcard."""
    api_key: str | None = None
    """Demanded on every route but /health; None on loopback only."""
    on_cpu: bool = False
    devices: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES; empty on CPU, or where all visible ones are the server's."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    weight_transfer: WeightTransfer | None = None
    """Engine that receives weights; None with adapters."""
    adapters: AdapterPlan | None = None
    sleep_mode: bool = False
    threads: int = 1
    """On CPU."""
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = {}


@dataclass(frozen=True)
class ServerCommand:
    """What to execute. The key is in the environment alone: every user of a machine can read command lines."""

    argv: list[str]
    env: dict[str, str]


def server_command(plan: ServerPlan, environ: Mapping[str, str] | None = None, *, python: str = sys.executable) -> ServerCommand:
    """The command for a plan whose port is chosen. `environ`: what the server inherits from; default this process's environment."""
    if plan.port is None:
        raise ValueError("the plan has no port yet")
    # -P: a file called like a module in the working directory must not hide that module.
    return ServerCommand([python, "-P", "-m", MODULE, *_arguments(plan)], _environment(plan, os.environ if environ is None else environ))


def _arguments(plan: ServerPlan) -> Iterator[str]:
    yield from ("--model", plan.model)
    if plan.revision:
        yield from ("--revision", plan.revision, "--tokenizer-revision", plan.revision)
    if plan.trust_remote_code:
        yield "--trust-remote-code"
    yield from ("--host", plan.host, "--port", str(plan.port))
    yield from ("--dtype", plan.dtype, "--max-model-len", str(plan.max_model_len), "--seed", str(plan.seed))
    yield from ("--tensor-parallel-size", str(plan.tensor_parallel_size))
    yield from ("--pipeline-parallel-size", str(plan.pipeline_parallel_size))
    yield from ("--data-parallel-size", str(plan.data_parallel_size))
    if plan.kv_cache_memory_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(plan.kv_cache_memory_bytes))
    if plan.kv_cache_memory_bytes is None or not plan.on_cpu:  # on a GPU vLLM checks the free memory against it in any case
        yield from ("--gpu-memory-utilization", f"{plan.gpu_memory_utilization:g}")
    if plan.max_num_seqs is not None:
        yield from ("--max-num-seqs", str(plan.max_num_seqs))
    yield "--enforce-eager" if plan.enforce_eager else "--no-enforce-eager"
    yield "--enable-prefix-caching" if plan.enable_prefix_caching else "--no-enable-prefix-caching"
    yield from ("--logprobs-mode", "processed_logprobs")  # of the distribution that is sampled from, temperature and filters included
    yield from ("--generation-config", "vllm")  # no sampling defaults from the checkpoint: requests state every field
    yield "--enable-scale-out"  # the token route
    yield "--disable-uvicorn-access-log"
    if plan.weight_transfer is not None:
        yield from ("--weight-transfer-config", json.dumps({"backend": plan.weight_transfer}))
    if plan.adapters is not None:
        yield from ("--enable-lora", "--max-lora-rank", str(plan.adapters.max_rank))
        yield from ("--max-loras", str(plan.adapters.max_adapters), "--max-cpu-loras", str(plan.adapters.max_adapters))
    if plan.sleep_mode:
        yield "--enable-sleep-mode"
    if plan.api_key is not None:
        yield from ("--middleware", "ebft_ds.sidecar.auth.RequireKey")
    yield from plan.extra_args


def _environment(plan: ServerPlan, environ: Mapping[str, str]) -> dict[str, str]:
    dropped = RANK_VARIABLES | FOREIGN_VARIABLES
    env = {name: value for name, value in environ.items() if name not in dropped and not name.startswith(LAUNCHER_PREFIXES)}
    env["PYTHONPATH"] = _python_path(env.get("PYTHONPATH", ""))
    env["VLLM_SERVER_DEV_MODE"] = "1"  # the control and weight routes
    env["VLLM_NO_USAGE_STATS"] = "1"
    if env.get("VLLM_PLUGINS") is not None and PLUGIN not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] = ",".join([*filter(None, env["VLLM_PLUGINS"].split(",")), PLUGIN])
    if plan.adapters is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if plan.weight_transfer == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA handles travel pickled; such a server is on loopback and has a key
    if plan.sleep_mode:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            env.pop(name, None)  # expandable segments, which trainers like, do not go with sleeping
    if plan.on_cpu:
        env |= _cpu_environment(plan)
    elif plan.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices)
    if plan.api_key is not None:
        env[KEY_VARIABLE] = plan.api_key
    return env | plan.extra_env


def _cpu_environment(plan: ServerPlan) -> dict[str, str]:
    return {
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(plan.threads),
        # Else vLLM pins the threads of every server to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _python_path(inherited: str) -> str:
    """With this package in it, wherever it was imported from: the server imports the middleware and the plugin."""
    home = str(Path(__file__).resolve().parent.parent.parent)
    paths = [path for path in inherited.split(os.pathsep) if path]
    return os.pathsep.join(paths if home in paths else [*paths, home])


def served_url(plan: ServerPlan, port: int) -> str:
    """The URL that clients use."""
    host = plan.advertise_host or plan.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def plan_facts(plan: ServerPlan) -> dict[str, Any]:
    """What a log may show of a plan."""
    return {key: value for key, value in msgspec.structs.asdict(plan).items() if key not in ("api_key", "extra_env")}
