"""A server transport that keeps the rollout process informed: which versions' tokens it may take, and which one is current."""

from __future__ import annotations

from collections.abc import Iterable

from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.transport import Bucket, PushResult, WeightTransport
from ebft_ds.sync.transports.forwarding import ForwardingTransport


class AnnouncedTransport(ForwardingTransport):
    """`inner`, with the rollout process told of a version before its first byte moves and after it was confirmed."""

    def __init__(self, inner: WeightTransport, client: RolloutClient) -> None:
        super().__init__(inner)
        self._client = client

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        self._client.expect_version(manifest.version)
        result = self.inner.push(manifest, buckets, timeout)
        self._client.confirm_version(manifest.version)
        return result
