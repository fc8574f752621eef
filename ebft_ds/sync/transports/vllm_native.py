"""Pushes by vLLM's own weight-transfer engines, nccl and ipc: between GPUs.

vLLM's receiving engines take a model apart when an update starts, so generation stands still for the whole transfer. A push that fails on
the way leaves a server paused, with a label that is no version, and it has to be started again: vLLM would count what it got before twice.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Literal

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from ebft_ds.errors import EbftError, RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.versions import VersionNames
from ebft_ds.sync.transport import Bucket
from ebft_ds.sync.transports.deadline import Deadline, in_thread
from ebft_ds.sync.transports.hand_over import HandOver
from ebft_ds.sync.transports.servers import BROKEN_SUFFIX, ServerTransport
from ebft_ds.sync.transports.vllm_source import FanOutClient, ZeroWeightSource

logger = logging.getLogger(__name__)

CLEAN_SECONDS = 20.0
BUFFER_BYTES = 64 * 2**20
"""Of the packed buffers on either side; vLLM's default is 1 GiB each."""

Engine = TrainerWeightTransferEngine[TrainerInitInfo]


class NativeTransport(ServerTransport):
    """Common part; `device`: the GPU of rank 0."""

    def __init__(self, addresses: Sequence[ServerAddress], names: VersionNames, control: ControlLoop, *, device: torch.device) -> None:
        super().__init__(addresses, names, control)
        self._device = device
        self._source = ZeroWeightSource(device)
        self._engine: Engine | None = None
        self._client: FanOutClient | None = None
        self._members: list[ServerAddress] = []
        """Servers that the engine was made for."""

    @abstractmethod
    def make_engine(self, client: FanOutClient, source: ZeroWeightSource, servers: list[ServerAddress], workers: list[int]) -> Engine:
        """The trainer's engine, connected to all workers. Runs in a thread of its own."""

    def move(
        self, manifest: WeightManifest, buckets: Iterable[Bucket], servers: list[ServerAddress], deadline: Deadline
    ) -> dict[str, float]:
        started = time.monotonic()
        try:
            self._run(lambda: self._connect(servers, deadline, manifest), deadline, "connecting").result()
            self._command(servers, lambda api: api.pause("keep", deadline.share), "pausing")
            started = time.monotonic()
            self._send(manifest, buckets, deadline)
        except BaseException as error:
            self._after_failure(servers)
            if isinstance(error, EbftError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"push {manifest.version}: {type(error).__name__}: {error}") from error
        self._command(servers, lambda api: api.resume(max(deadline.left, CLEAN_SECONDS)), "resuming")
        return {server.url: time.monotonic() - started for server in servers}

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            in_thread(engine.shutdown, "vllm-shutdown")  # may wait for a peer that is gone: nobody waits for it
            self.control.each(self._members, lambda api: api.shutdown_transfer(CLEAN_SECONDS))

    def _connect(self, servers: list[ServerAddress], deadline: Deadline, manifest: WeightManifest) -> None:
        if self._engine is not None and self._members != servers:
            self.close()
        if self._engine is None:
            counts = self.control.each(servers, lambda api: api.num_workers(deadline.share))
            workers = [count for count in counts if not isinstance(count, BaseException)]
            if len(workers) < len(servers):
                raise RolloutError(f"a server does not say how many workers it has: {counts}")
            self._client = FanOutClient(self.control, servers, workers)
            self._client.begin(deadline, "")
            self._engine = self.make_engine(self._client, self._source, servers, workers)
            self._members = list(servers)
        assert self._client is not None
        self._client.begin(deadline, self.names.name(manifest.version))

    def _send(self, manifest: WeightManifest, buckets: Iterable[Bucket], deadline: Deadline) -> None:
        """The engine sends in its thread; this one gathers for it."""
        engine = self._engine
        assert engine is not None
        hand_over = HandOver(deadline)
        self._source.begin(manifest, hand_over)

        def send() -> None:
            try:
                engine.send_weights()
            except BaseException as error:
                hand_over.fail(f"push {manifest.version}: {error}")
                raise

        sending = in_thread(lambda: self._on_device(send), "vllm-send")
        iterator = iter(buckets)
        try:
            for bucket in iterator:
                hand_over.put(bucket)
            hand_over.end()
        except BaseException as error:
            hand_over.fail(f"push {manifest.version} was given up: {error}")
            raise
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:  # the other ranks wait for rank 0 to go on or to give up
                close()
        self._result(sending, deadline, "sending")

    def _run(self, work: object, deadline: Deadline, what: str) -> Future[None]:
        assert callable(work)
        future: Future[None] = in_thread(lambda: self._on_device(work), "vllm-transfer")
        self._result(future, deadline, what)
        return future

    def _on_device(self, work: object) -> None:
        """A new thread starts with the first GPU as its current one."""
        assert callable(work)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        work()

    @staticmethod
    def _result(future: Future[None], deadline: Deadline, what: str) -> None:
        try:
            future.result(timeout=deadline.left)
        except TimeoutError as error:
            raise WeightSyncError(f"{what} was not done within {deadline.seconds:g} s: a server or its network stands still") from error

    def _command(self, servers: list[ServerAddress], call: object, what: str) -> None:
        assert callable(call)
        for server, outcome in zip(servers, self.control.each(servers, call), strict=True):
            if isinstance(outcome, BaseException):
                raise WeightSyncError(f"{what} {server.url}: {outcome}") from outcome

    def _after_failure(self, servers: list[ServerAddress]) -> None:
        """A new group for the next push. Servers whose models are whole go on; the others get a label that says that they are not."""
        torn = self._client is not None and self._client.started
        engine, self._engine = self._engine, None
        if engine is not None:
            in_thread(engine.shutdown, "vllm-shutdown")

        async def clean(api: VllmApi) -> None:
            if torn:
                await api.set_weight_version(f"{self.names.run_token}{BROKEN_SUFFIX}", CLEAN_SECONDS)
            else:
                await api.resume(CLEAN_SECONDS)

        for server, outcome in zip(servers, self.control.each(servers, clean), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("%s could not be cleaned up after a failed push: %s", server.url, outcome)


def native_transport(
    kind: Literal["nccl", "ipc"],
    addresses: Sequence[ServerAddress],
    names: VersionNames,
    control: ControlLoop,
    *,
    sync_host: str | None = None,
) -> NativeTransport:
    """The transport of that kind, for the current GPU."""
    if not torch.cuda.is_available():
        raise WeightSyncError(f"sync_transport {kind} needs a GPU in the trainer; use gloo or disk")
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "nccl":
        from ebft_ds.sync.transports.vllm_nccl import NcclTransport

        return NcclTransport(addresses, names, control, device=device, sync_host=sync_host)
    from ebft_ds.sync.transports.vllm_ipc import IpcTransport

    return IpcTransport(addresses, names, control, device=device)
