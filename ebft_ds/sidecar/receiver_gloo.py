"""Tensors by broadcast over a gloo group that lives for one push and belongs to no default group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.tensors import DTYPES
from ebft_ds.sidecar.gloo_group import StoreErrors, broadcast_bytes, connect_store, join_group
from ebft_ds.sidecar.push_ops import Announce, GlooWay
from ebft_ds.sidecar.receiver_intake import Intake


class GlooIntake(Intake):
    """`rank`: of this worker in the group. For every bucket the store holds under `bucket/<k>` which of the announced tensors come."""

    def __init__(self, announced: Announce, prepare: Callable[[], object], rank: int) -> None:
        super().__init__(announced, prepare)
        self._rank = rank
        self._group: ProcessGroupGloo | None = None
        self._store: TCPStore | None = None

    def receive(self) -> None:
        way = self.announced.way
        assert isinstance(way, GlooWay)
        self._store = connect_store(way.host, way.port, self.left)
        self._group = join_group(self._store, self._rank, way.world_size, towards=way.host, timeout=self.left)
        specs = self.announced.manifest.tensors
        bucket = 0
        while len(self.tensors) < len(specs):
            for index in self._next_bucket(bucket):
                spec = specs[index]
                if spec.dtype not in DTYPES:
                    raise WeightSyncError(f"{spec.name} has dtype {spec.dtype!r}")
                tensor: Tensor = self.buffer(spec)
                broadcast_bytes(self._group, tensor, self.left)
                self.tensors[spec.name] = tensor
            bucket += 1

    def release(self) -> None:
        self._group = None
        self._store = None

    def _next_bucket(self, number: int) -> list[int]:
        assert self._store is not None
        key = f"bucket/{number}"
        try:
            self._store.wait([key], timedelta(seconds=self.left))
            return msgspec.json.decode(self._store.get(key), type=list[int])
        except StoreErrors as error:
            raise WeightSyncError(f"the sender fell silent before bucket {number} ({self.missing()}): {error}") from error
