"""A transport to a server on the trainer's own GPU, which sleeps while the trainer computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.transport import Bucket, PushResult, WeightTransport
from ebft_ds.sync.transports.forwarding import ForwardingTransport


class Turns(Protocol):
    """One GPU for the trainer and its server: who has it."""

    def rollouts_begin(self) -> None: ...
    def rollouts_end(self) -> None: ...


class ColocatedTransport(ForwardingTransport):
    """`inner`, with the server woken for what needs its memory."""

    def __init__(self, inner: WeightTransport, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        self._turns.rollouts_begin()
        return self.inner.push(manifest, buckets, timeout)

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        self._turns.rollouts_begin()
        return self.inner.score(token_ids, temperature, timeout)
