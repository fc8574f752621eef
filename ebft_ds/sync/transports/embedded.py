"""Pushes into the embedded engine, through the rollout process's own channel: staged there, switched to between two tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from ebft_ds.errors import EbftError, WeightSyncError
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.transport import Bucket, PushResult

ABORT_SECONDS = 5.0


class EmbeddedTransport:
    """WeightTransport over the rollout process."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    @property
    def probe_temperature(self) -> float | None:
        return None

    def stale(self, version: int) -> bool:
        """Never by itself: the engine lives and dies with its process."""
        return self._client.policy_version != version

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        try:
            self._client.begin_update(manifest)
            for bucket in buckets:
                self._client.send_bucket(bucket)
            pause = time.monotonic()
            self._client.finish_update(timeout)
        except WeightSyncError:
            with contextlib.suppress(EbftError):  # the push's own error is the one to report
                self._client.abort_update(ABORT_SECONDS)
            raise
        return PushResult(pause_seconds=time.monotonic() - pause, confirmed=1)

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        return [self._client.score(token_ids, temperature, timeout)]

    def close(self) -> None:
        pass
