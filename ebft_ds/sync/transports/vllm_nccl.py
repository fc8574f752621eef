"""Pushes between GPUs by vLLM's nccl engine: one group of rank 0 and every worker of every server."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from ebft_ds.errors import WeightSyncError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.gloo_group import own_address
from ebft_ds.sidecar.versions import VersionNames
from ebft_ds.sync.transports.vllm_native import BUFFER_BYTES, Engine, NativeTransport
from ebft_ds.sync.transports.vllm_source import FanOutClient, ZeroWeightSource


class NcclTransport(NativeTransport):
    """`sync_host`: this machine's address as the servers see it; None: found by routing to the first server elsewhere."""

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        names: VersionNames,
        control: ControlLoop,
        *,
        device: torch.device,
        sync_host: str | None = None,
    ) -> None:
        super().__init__(addresses, names, control, device=device)
        self._sync_host = sync_host

    def make_engine(self, client: FanOutClient, source: ZeroWeightSource, servers: list[ServerAddress], workers: list[int]) -> Engine:
        host = rendezvous_host(servers, self._sync_host)
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=host,
            master_port=_free_port(host),
            world_size=1 + sum(workers),
            packed=True,
            packed_buffer_size_bytes=BUFFER_BYTES,
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def rendezvous_host(servers: Sequence[ServerAddress], sync_host: str | None) -> str:
    """One address of this machine that every server reaches."""
    elsewhere = [server for server in servers if not server.is_local]
    if not elsewhere:
        return "127.0.0.1"
    return sync_host if sync_host is not None else own_address(elsewhere[0].host)


def _free_port(host: str) -> int:
    """vLLM opens the port itself, so it can only be found free and let go of."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise WeightSyncError(f"no port can be opened on {host}: {error}; set sync_host to an address of this machine") from error
