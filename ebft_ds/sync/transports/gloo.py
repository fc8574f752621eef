"""Pushes by broadcast: for CPU servers, and hosts without a common NCCL fabric.

Every server has a TCP store and a gloo group of its own, made for one push and dropped after it: a server that dies takes no other one
along, and nothing is left of a broken group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import msgspec
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.gloo_group import broadcast_bytes, join_group, own_address, serve_store
from ebft_ds.sidecar.push_ops import GlooWay
from ebft_ds.sidecar.versions import VersionNames
from ebft_ds.sync.transport import Bucket
from ebft_ds.sync.transports.deadline import Deadline, in_thread
from ebft_ds.sync.transports.push_round import PushRound, new_push_id
from ebft_ds.sync.transports.servers import ServerTransport


class GlooTransport(ServerTransport):
    """`sync_host`: this machine's address as servers on other machines see it; None: found by routing to each of them."""

    def __init__(
        self, addresses: Sequence[ServerAddress], names: VersionNames, control: ControlLoop, *, sync_host: str | None = None
    ) -> None:
        super().__init__(addresses, names, control)
        self._sync_host = sync_host

    def move(
        self, manifest: WeightManifest, buckets: Iterable[Bucket], servers: list[ServerAddress], deadline: Deadline
    ) -> dict[str, float]:
        name = self.names.name(manifest.version)
        way = _GlooPush(manifest, self._sync_host)
        return PushRound(self.control, way, manifest, new_push_id(name), name, servers, deadline).run(buckets)


class _Line:
    """To one server: the store that it connects to, and the group once it has."""

    def __init__(self, store: TCPStore, way: GlooWay, server: ServerAddress) -> None:
        self._store = store
        self.way = way
        self._server = server
        self._group: ProcessGroupGloo | None = None
        self._bucket = 0

    def connect(self, timeout: float) -> None:
        self._group = join_group(self._store, 0, self.way.world_size, towards=self.way.host, timeout=timeout)

    def send(self, bucket: Bucket, indices: list[int], deadline: Deadline) -> None:
        group = self._group
        if group is None:
            raise WeightSyncError(f"{self._server.url} is not connected")
        try:
            self._store.set(f"bucket/{self._bucket}", msgspec.json.encode(indices).decode())
        except RuntimeError as error:
            raise WeightSyncError(f"the store of the push to {self._server.url} broke: {error}") from error
        self._bucket += 1
        for _, tensor in bucket:
            broadcast_bytes(group, tensor, deadline.left)


class _GlooPush:
    """The Way of one push."""

    def __init__(self, manifest: WeightManifest, sync_host: str | None) -> None:
        self._index = {spec.name: i for i, spec in enumerate(manifest.tensors)}
        self._sync_host = sync_host
        self._lines: dict[ServerAddress, _Line] = {}

    def open(self, server: ServerAddress, num_workers: int, deadline: Deadline) -> GlooWay:
        host = self._sync_host if self._sync_host is not None and not server.is_local else own_address(server.host)
        store = serve_store(host, deadline.left)
        line = _Line(store, GlooWay(host, store.port, 1 + num_workers), server)
        self._lines[server] = line
        return line.way

    def connect(self, server: ServerAddress, deadline: Deadline) -> Future[None]:
        line = self._lines[server]
        return in_thread(lambda: line.connect(deadline.share), "gloo-connect")

    def send(self, bucket: Bucket, servers: Iterable[ServerAddress], deadline: Deadline) -> dict[ServerAddress, Future[None]]:
        indices = [self._index[name] for name, _ in bucket]
        lines = {server: self._lines[server] for server in servers}
        return {server: _in_thread(line, bucket, indices, deadline) for server, line in lines.items()}

    def seal(self, servers: Iterable[ServerAddress], deadline: Deadline) -> dict[ServerAddress, Future[None]]:
        return {}  # receivers count

    def close(self) -> None:
        """Connections close with the last reference: a thread that still waits for a server keeps its own until it gives up."""
        self._lines.clear()


def _in_thread(line: _Line, bucket: Bucket, indices: list[int], deadline: Deadline) -> Future[None]:
    return in_thread(lambda: line.send(bucket, indices, deadline), "gloo-send")
