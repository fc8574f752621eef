"""Pushes by CUDA IPC to a server on rank 0's own GPU, and that GPU's turns: the server sleeps while the trainer computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sync.transports.vllm_native import BUFFER_BYTES, Engine, NativeTransport
from ebft_ds.sync.transports.vllm_source import FanOutClient, ZeroWeightSource

KEEP_WEIGHTS = 1
"""vLLM's sleep level that moves the weights to host memory: a push of what training changes needs the others in place."""


class IpcTransport(NativeTransport):
    """WeightTransport for servers of one worker each on this GPU."""

    def make_engine(self, client: FanOutClient, source: ZeroWeightSource, servers: list[ServerAddress], workers: list[int]) -> Engine:
        if any(count != 1 for count in workers):
            raise WeightSyncError("sync_transport ipc reaches servers of one worker on the trainer's own GPU; use nccl for larger ones")
        if not all(server.is_local for server in servers):
            raise WeightSyncError("sync_transport ipc needs servers on this machine; use nccl, gloo or disk")
        engine: Any = RankZeroIpcEngine.trainer_init(
            IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=BUFFER_BYTES), client=client, source=source
        )
        return engine  # type: ignore[no-any-return]


class RankZeroIpcEngine(IPCTrainerWeightTransferEngine):
    """vLLM's engine gathers handles over the default process group, for trainers whose every rank has a server on its GPU. Here rank 0 is
    alone in it: the buckets are whole already, and the other ranks take no part."""

    def send_weights(self) -> None:
        assert isinstance(self.source, ZeroWeightSource)
        largest = max((math.prod(meta.shape) * meta.dtype.itemsize for meta in self.source.metadata()), default=0)
        self.packed_buffer_size_bytes = max(BUFFER_BYTES, largest)  # every tensor must fit
        super().send_weights()

    def _all_gather_and_merge_handles(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return handles

    @staticmethod
    def _post_send_sync() -> None:
        torch.cuda.ipc_collect()


class GpuTurns:
    """One GPU for trainer and servers: `rollouts_begin` before requests are sent, `rollouts_end` when all have been answered."""

    def __init__(self, addresses: Sequence[ServerAddress], control: ControlLoop, *, timeout: float) -> None:
        self._addresses = list(addresses)
        self._control = control
        self._timeout = timeout
        self.asleep = False

    def rollouts_begin(self) -> None:
        """Gives the GPU to the servers; pushes need this too. Errors: RolloutError."""
        if self.asleep:
            torch.cuda.empty_cache()  # what the trainer keeps cached is what the server needs
            self._all("wake up")
            self.asleep = False

    def rollouts_end(self) -> None:
        """Takes it back; requests in flight would be lost. Errors: RolloutError."""
        if not self.asleep:
            self._all("sleep")
            self.asleep = True

    def _all(self, what: str) -> None:
        def call(api: Any) -> Any:
            return api.sleep(KEEP_WEIGHTS, self._timeout) if what == "sleep" else api.wake_up(self._timeout)

        for address, outcome in zip(self._addresses, self._control.each(self._addresses, call), strict=True):
            if isinstance(outcome, BaseException):
                raise RolloutError(f"{address.url} did not {what}: {outcome}") from outcome
