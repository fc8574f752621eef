"""Which GPUs of this machine the ranks get when servers of the run take some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebft_ds.cli.hardware import default_world_size, visible_devices
from ebft_ds.config import RecipeConfig
from ebft_ds.config.engine_choice import rollout_engine_of, starts_servers
from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.address import ServerAddress, is_loopback
from ebft_ds.sidecar.endpoints import FILE_PREFIX, normalised_url, read_endpoints


@dataclass(frozen=True)
class RankPlan:
    """Ranks of one machine."""

    world_size: int
    devices: list[str]
    """Their GPUs, as CUDA_VISIBLE_DEVICES names them; empty on the CPU."""

    @property
    def accelerators(self) -> int:
        return len(self.devices)

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks' environment gets."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}


def plan_ranks(config: RecipeConfig, visible: Sequence[str] | None = None) -> RankPlan:
    """As many ranks as the recipe asks for, else one per GPU that no server takes, else one. `visible`: default what the machine has.

    Errors: ConfigError if servers and ranks do not fit on the GPUs.
    """
    devices = training_devices(config, visible_devices() if visible is None else visible)
    ranks = default_world_size(config.run.num_processes, len(devices))
    if _server_devices(config) and devices and ranks > len(devices):
        raise ConfigError(
            f"num_processes {ranks} needs as many GPUs, and vllm_devices {_server_devices(config)} leaves {len(devices)} "
            f"({', '.join(devices)}); lower the one or the other"
        )
    return RankPlan(ranks, devices)


def training_devices(config: RecipeConfig, visible: Sequence[str]) -> list[str]:
    """`visible` without `vllm_devices`. Errors: ConfigError for servers' GPUs that are not there, or that leave none for the ranks."""
    taken = _server_devices(config)
    if not visible or not taken:
        return list(visible)
    absent = [name for name in taken if name not in visible]
    if absent:
        raise ConfigError(f"vllm_devices: GPU {', '.join(absent)} is none of those that this run may use ({', '.join(visible)})")
    left = [name for name in visible if name not in taken]
    if not left:
        raise ConfigError(f"vllm_devices takes all GPUs ({', '.join(visible)}) and leaves none for the ranks")
    return left


def _server_devices(config: RecipeConfig) -> list[str]:
    """GPUs of this machine that the recipe's servers have: started with the run, or by `ebft-ds serve` of the same recipe here."""
    if rollout_engine_of(config) != "vllm" or config.vllm.vllm_colocate or not (starts_servers(config) or _served_here(config)):
        return []
    return [str(number) for number in config.vllm.vllm_devices or []]


def _served_here(config: RecipeConfig) -> bool:
    """Are all named servers on this machine? Unusable names are reported where they are resolved."""
    named = config.vllm.vllm_server_base_url
    try:
        hosts = [host for entry in ([named] if isinstance(named, str) else named or []) for host in _hosts(entry)]
    except ConfigError:
        return False
    return bool(hosts) and all(is_loopback(host) for host in hosts)


def _hosts(entry: str) -> list[str]:
    if entry.startswith(FILE_PREFIX):
        return [server.host for server in read_endpoints(Path(entry.removeprefix(FILE_PREFIX)))]
    return [ServerAddress(normalised_url(entry)).host]
