"""A server transport that keeps the rollout process informed: which versions' tokens it may take, and which one is current."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.transport import Bucket, PushResult, WeightTransport


class AnnouncedTransport:
    """`inner`, with the rollout process told of a version before its first byte moves and after it was confirmed."""

    def __init__(self, inner: WeightTransport, client: RolloutClient) -> None:
        self._inner = inner
        self._client = client

    @property
    def probe_temperature(self) -> float | None:
        return self._inner.probe_temperature

    def stale(self, version: int) -> bool:
        return self._inner.stale(version)

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        self._client.expect_version(manifest.version)
        result = self._inner.push(manifest, buckets, timeout)
        self._client.confirm_version(manifest.version)
        return result

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        return self._inner.score(token_ids, temperature, timeout)

    def close(self) -> None:
        self._inner.close()
