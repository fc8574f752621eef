"""Which GPUs of this machine the ranks get when servers of the run take some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebft_ds.cli.hardware import default_world_size, visible_devices
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.engine_choice import rollout_engine_of, starts_servers
from ebft_ds.errors import ConfigError


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


def plan_ranks(config: AsyncEBFTConfig, visible: Sequence[str] | None = None) -> RankPlan:
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


def training_devices(config: AsyncEBFTConfig, visible: Sequence[str]) -> list[str]:
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


def _server_devices(config: AsyncEBFTConfig) -> list[str]:
    started = rollout_engine_of(config) == "vllm" and starts_servers(config) and not config.vllm.vllm_colocate
    return [str(number) for number in config.vllm.vllm_devices or []] if started else []
