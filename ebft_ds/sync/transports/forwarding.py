"""A transport around another one: everything is passed on, and subclasses add what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.transport import Bucket, PushResult, WeightTransport


class ForwardingTransport:
    """WeightTransport that asks `inner`."""

    def __init__(self, inner: WeightTransport) -> None:
        self.inner = inner

    @property
    def probe_temperature(self) -> float | None:
        return self.inner.probe_temperature

    def stale(self, version: int) -> bool:
        return self.inner.stale(version)

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        return self.inner.push(manifest, buckets, timeout)

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        return self.inner.score(token_ids, temperature, timeout)

    def close(self) -> None:
        self.inner.close()
