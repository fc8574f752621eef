"""Everything the rollout process needs to know, as one struct: rank 0 fills it, the process reads it from its first message."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ebft_ds.sidecar.address import ServerAddress


class VllmClientSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the rollout process talks to vLLM servers."""

    servers: list[ServerAddress]
    run_token: str
    """See ebft_ds.sidecar.versions: only tokens sampled by versions of this run are taken."""
    adapter_alias: str | None = None
    """Set in `sync_mode: adapter`: requests name the adapter `<alias>-v<version>`, which the servers have loaded."""
    request_timeout: float = 600.0
    request_retries: int = 5
    """Further attempts at a request that got no answer, or an answer from another version."""
    max_concurrency: int | None = None
    """Most requests in flight at one server; None: adaptive."""
    reconnect_timeout: float = 25.0
    """Seconds without any usable server, while work is pending, until the engine raises RolloutError."""


class RolloutProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the rollout process and what it loads."""

    model_name_or_path: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    attn_implementation: str = "sdpa"
    engine: Literal["transformers", "vllm"] = "transformers"
    vllm: VllmClientSpec | None = None
    """Required by engine `vllm`."""
    batch_size: int = 64
    """Most sequences decoded at once."""
    threads: int = 1
    """OMP_NUM_THREADS of the process."""
    seed: int = 0
    rollout_loop: str | None = None
    """`package.module:Class`; None: EBFTRolloutLoop."""
    rollout_loop_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    initial_version: int = 0
    """Policy version of the weights in `model_name_or_path`."""
    start_timeout: float = 300.0
    """Seconds until the engine must be ready."""
    timeout: float = 600.0
    """Seconds without a sign of progress, while work is pending, until the process counts as lost."""
    heartbeat_interval: float = 0.5
    """Seconds between two signs of life."""
    log_path: str
    """File that receives the process's standard output and error."""
