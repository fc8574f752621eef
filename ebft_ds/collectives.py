"""The few collectives the package needs beside ZeRO-3's own, over a CPU (gloo) group of all ranks.

They carry control data (flags, plans, token arrays, rewards), never gradients. Every call is collective: all ranks, same order.
With one process no group is needed and every call is local.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Collectives:
    """This rank's place in the job, and the CPU group that control data travels on."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def from_default_group(cls, timeout_seconds: float) -> Collectives:
        """Builds an own gloo group beside the default group, so that waits on it never run into the accelerator's timeout."""
        if not dist.is_initialized():
            return cls()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def max_int(self, value: int) -> int:
        """Largest of the ranks' values."""
        return self.max_ints([value])[0]

    def max_ints(self, values: list[int]) -> list[int]:
        """Element-wise largest of the ranks' values."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(v) for v in tensor.tolist()]

    def sum_floats(self, values: list[float]) -> list[float]:
        """Element-wise sums over ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        return [float(v) for v in tensor.tolist()]

    def broadcast_bytes(self, payload: bytes | None, source: int = 0) -> bytes:
        """Rank `source`'s bytes on every rank."""
        if self.world_size == 1:
            assert payload is not None
            return payload
        size = torch.tensor([len(payload) if self.rank == source and payload is not None else 0], dtype=torch.int64)
        dist.broadcast(size, src=source, group=self.group)
        if self.rank == source and payload is not None:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        else:
            buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if buffer.numel():
            dist.broadcast(buffer, src=source, group=self.group)
        return bytes(buffer.numpy().tobytes())

    def broadcast(self, value: T | None, kind: type[T], source: int = 0) -> T:
        """A msgspec-encodable value of rank `source` on every rank."""
        payload = msgspec.msgpack.encode(value) if self.rank == source else None
        return msgspec.msgpack.decode(self.broadcast_bytes(payload, source), type=kind)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's msgspec-encodable value, by rank. For small data: everything reaches every rank."""
        if self.world_size == 1:
            return [value]
        payload = msgspec.msgpack.encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64), group=self.group)
        longest = max(int(s.item()) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(buffers, padded, group=self.group)
        return [msgspec.msgpack.decode(b[: int(s.item())].numpy().tobytes()) for b, s in zip(buffers, sizes, strict=True)]

    def exchange_rows(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Rows from rank to rank, and to no other: the float32 CPU rows [sum of send_counts, D] are ordered by destination, and those
        that arrive, [sum of receive_counts, D], by source. Counts by rank; both sides know them."""
        if self.world_size == 1:
            return rows
        arrived = torch.empty(sum(receive_counts), rows.shape[1])
        dist.all_to_all_single(
            arrived, rows.contiguous(), output_split_sizes=receive_counts, input_split_sizes=send_counts, group=self.group
        )
        return arrived

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.group)
