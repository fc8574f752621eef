"""Weight pushes to the rollout engine: merge check, push, probe. Every method is collective.

All ranks gather a bucket, rank 0 sends it, then all agree whether that worked before anyone gathers the next one: a refused or
lost push raises on every rank at the same place, and no rank is left alone in a collective.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ebft_ds.collectives import Collectives
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import LogProbWork
from ebft_ds.errors import EbftError, PeerError, RolloutError, WeightSyncError
from ebft_ds.packing.padded import pad_rows
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.sync.source import MergedWeightSource

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest mean |trainer - engine| log-prob gap, in nats, by dtype; the coarser one counts. Measured gaps: float32 3e-5, bf16 0.03-0.08."""


ABORT_SECONDS = 5.0


@dataclass(frozen=True)
class SyncReport:
    """What one push did; zeros where none was needed."""

    bytes: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    """Seconds in which generation stood still."""
    probe_mean_gap: float | None = None
    probe_max_gap: float | None = None
    delta_survival: float | None = None


class WeightSync:
    """Keeps the rollout engine's weights at the trainer's version.

    Args:
        client: rank 0's client; None on the other ranks.
        interval: optimizer steps between merge checks.
        dtype: of the tensors as sent (the engine's). trainer_dtype: that the trainer computes in.
        probe_ids: fixed sequence that trainer and engine both score; None: no probe.
        probe_tolerance: largest mean log-prob gap; None: by the dtypes.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        source: MergedWeightSource,
        client: RolloutClient | None,
        collectives: Collectives,
        *,
        interval: int,
        dtype: str,
        trainer_dtype: str,
        timeout: float,
        probe_ids: Sequence[int] | None,
        probe_tolerance: float | None,
        temperature: float,
    ) -> None:
        self._engine = engine
        self._source = source
        self._client = client
        self._collectives = collectives
        self._interval = interval
        self._dtype = dtype
        self._timeout = timeout
        self._probe_ids = list(probe_ids) if probe_ids is not None else None
        self._tolerance = probe_tolerance if probe_tolerance is not None else max(PROBE_TOLERANCE[dtype], PROBE_TOLERANCE[trainer_dtype])
        self._temperature = temperature
        self.pushed_version = 0
        """Version that the engine has confirmed."""
        self._pushed_fingerprint: list[float] | None = None

    def merge_check(self, version: int, *, force: bool = False) -> SyncReport:
        """Push if `version` is a multiple of the interval (or `force`) and the engine does not hold these weights already."""
        if version == self.pushed_version or not (force or version % self._interval == 0):
            return SyncReport()
        fingerprint = self._fingerprint()
        changed = self._collectives.max_int(int(fingerprint != self._pushed_fingerprint))
        report = self._push(version, send_tensors=bool(changed))
        self.pushed_version = version
        self._pushed_fingerprint = fingerprint
        return report

    def remember_initial(self) -> None:
        """The engine loaded the very checkpoint that the trainer starts from: version 0 needs no push."""
        self._pushed_fingerprint = self._fingerprint()

    def _fingerprint(self) -> list[float]:
        """Sums over this rank's shards of the trained parameters: equal if and only if no parameter moved, for all practical purposes."""
        sums = []
        for parameter in self._engine.network.parameters():
            if parameter.requires_grad:
                shard = getattr(parameter, "ds_tensor", parameter).detach()
                sums += [float(shard.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(shard, dtype=torch.float64))]
        return sums

    def _push(self, version: int, *, send_tensors: bool) -> SyncReport:
        started = time.monotonic()
        pieces = self._source.pieces() if send_tensors else []
        manifest = WeightManifest(version, [TensorSpec(p.name, self._dtype, p.shape) for p in pieces], complete=False)
        client = self._client
        self._together(lambda: client.begin_update(manifest) if client else None, "announcing weights")
        if send_tensors:
            for bucket in self._source.buckets():
                self._together(lambda b=bucket: client.send_bucket(b) if client else None, "sending weights")  # type: ignore[misc]
        pause = time.monotonic()
        self._together(lambda: client.finish_update(self._timeout) if client else None, "confirming weights")
        done = time.monotonic()
        survival = self._source.loss.delta_survival if send_tensors else None
        if survival is not None and survival < 0.5:
            logger.warning("weight push %d: only %.0f %% of the update survives rounding to %s", version, 100 * survival, self._dtype)
        mean_gap, max_gap = self.probe(version)
        return SyncReport(manifest.num_bytes, done - started, done - pause, mean_gap, max_gap, survival)

    def _together(self, action: Callable[[], object], what: str) -> None:
        """Runs rank 0's part, then tells everybody how it went."""
        error: EbftError | None = None
        try:
            action()
        except EbftError as caught:
            error = caught
        code = 0 if error is None else (2 if isinstance(error, RolloutError) else 1)
        worst = self._collectives.max_int(code)
        if error is not None:
            if self._client is not None and not isinstance(error, RolloutError):
                with contextlib.suppress(EbftError):  # the push's own error is the one to report
                    self._client.abort_update(ABORT_SECONDS)
            raise error
        if worst:
            raise PeerError(f"rank 0 failed while {what}; its message names the cause")

    def probe(self, version: int) -> tuple[float | None, float | None]:
        """(mean, largest) |trainer - engine| log-prob gap on the fixed sequence, in nats; (None, None) without a probe.

        Raises:
            WeightSyncError: the mean gap is above tolerance, on every rank.
        """
        if self._probe_ids is None:
            return None, None
        own = self._trainer_log_probs(self._probe_ids)
        gaps = [0.0, 0.0]

        def compare() -> None:
            if self._client is None:
                return
            scored = self._client.score(self._probe_ids or [], self._temperature, self._timeout)
            difference = (own - torch.tensor(scored)).abs()
            gaps[:] = [float(difference.mean()), float(difference.max())]

        self._together(compare, "probing the engine")
        mean_gap, max_gap = self._collectives.broadcast(gaps, list[float])
        if not mean_gap <= self._tolerance:
            raise WeightSyncError(
                f"version {version}: engine and trainer disagree on a fixed sequence by {mean_gap:.3g} nats (at most {max_gap:.3g}), "
                f"above sync_probe_tolerance={self._tolerance:g}: the engine does not hold the trainer's weights, or computes otherwise"
            )
        return mean_gap, max_gap

    def _trainer_log_probs(self, ids: list[int]) -> torch.Tensor:
        device = self._engine.device
        count = len(ids) - 1
        work = LogProbWork(
            rows=pad_rows([ids], device=device),
            rows_index=torch.zeros(count, dtype=torch.int64, device=device),
            columns=torch.arange(count, device=device),
            targets=torch.tensor(ids[1:], dtype=torch.int64, device=device),
            inverse_temperature=torch.full((count,), 1.0 / self._temperature, device=device),
        )
        log_probs, _ = self._engine.frozen_log_probs(work)
        return log_probs.cpu()
