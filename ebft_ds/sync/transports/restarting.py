"""A transport to servers that are started again when they die."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.transport import Bucket, PushResult, WeightTransport
from ebft_ds.sync.transports.forwarding import ForwardingTransport

logger = logging.getLogger(__name__)


class Restarts(Protocol):
    """Who starts them again."""

    def check(self) -> None:
        """Errors: RolloutError once a server is dead for good."""
        ...

    def wait_up(self) -> None:
        """Until a server answers again. Errors: RolloutError if none will."""
        ...


class RestartingTransport(ForwardingTransport):
    """`inner` over servers that are started again: a push that found none alive waits for them and may be tried again."""

    def __init__(self, inner: WeightTransport, restarts: Restarts) -> None:
        super().__init__(inner)
        self._restarts = restarts

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        try:
            return self.inner.push(manifest, buckets, timeout)
        except RolloutError as error:
            logger.warning("weight push %d found no server: %s", manifest.version, error)
            self._restarts.wait_up()
            raise WeightSyncError(f"weight push {manifest.version}: the servers had died and are up again: {error}") from error

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        """Empty where all servers have died since they confirmed: they are started again, and given the weights before a request."""
        try:
            return self.inner.score(token_ids, temperature, timeout)
        except RolloutError as error:
            self._restarts.check()
            logger.warning("the probe found no server: %s", error)
            return []
