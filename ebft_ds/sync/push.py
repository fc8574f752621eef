"""Weight pushes to the rollout engines: merge check, push, probe. Every method is collective.

All ranks gather a bucket, rank 0's transport sends it while the next one is gathered, and before each gather all agree that it still
goes well: a refused or lost push raises on every rank at the same place, and no rank is left alone in a collective.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ebft_ds.collectives import Collectives
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import LogProbWork
from ebft_ds.errors import EbftError, PeerError, RolloutError, WeightSyncError
from ebft_ds.packing.padded import pad_rows
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.sync.lockstep import Lockstep
from ebft_ds.sync.transport import PushResult, WeightTransport
from ebft_ds.sync.weight_source import WeightSource

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest mean |trainer - engine| log-prob gap, in nats, by dtype; the coarser one counts. Measured gaps: float32 3e-5, bf16 0.03-0.08."""


@dataclass(frozen=True)
class SyncReport:
    """What one push did; zeros where none was needed."""

    bytes: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    """Seconds in which generation stood still, on the engine where it did longest."""
    probe_mean_gap: float | None = None
    probe_max_gap: float | None = None
    delta_survival: float | None = None


@dataclass(frozen=True)
class SyncOptions:
    """How to push and how to check it.

    interval: optimizer steps between merge checks. timeout: seconds for one push. retries: further attempts at one that was refused.
    dtype: of the tensors as sent (the engines'). trainer_dtype: that the trainer computes in.
    probe_ids: fixed sequence that trainer and engines score; None: no probe. probe_tolerance: largest mean gap; None: by the dtypes.
    temperature: of the probe, where the transport lets us choose.
    """

    interval: int
    dtype: str
    trainer_dtype: str
    timeout: float
    retries: int
    probe_ids: Sequence[int] | None
    probe_tolerance: float | None
    temperature: float


class WeightSync:
    """Keeps the rollout engines' weights at the trainer's version. `transport`: rank 0's; None on the other ranks."""

    def __init__(
        self,
        engine: ZeroEngine,
        source: WeightSource,
        transport: WeightTransport | None,
        collectives: Collectives,
        options: SyncOptions,
    ) -> None:
        self._engine = engine
        self._source = source
        self._transport = transport
        self._collectives = collectives
        self._options = options
        tolerances = (PROBE_TOLERANCE[options.dtype], PROBE_TOLERANCE[options.trainer_dtype])
        self._tolerance = options.probe_tolerance if options.probe_tolerance is not None else max(tolerances)
        self.pushed_version = 0
        """Version that the engines have confirmed."""
        self._pushed_fingerprint: list[float] | None = None

    def merge_check(self, version: int, *, force: bool = False) -> SyncReport:
        """Push if `version` is a multiple of the interval (or `force`) and the engines do not hold these weights already.

        Raises:
            WeightSyncError (PeerError on other ranks): refused, also at the last attempt. RolloutError: no engine is left.
        """
        if version == self.pushed_version or not (force or version % self._options.interval == 0):
            return SyncReport()
        fingerprint = self._fingerprint()
        changed = bool(self._collectives.max_int(int(fingerprint != self._pushed_fingerprint)))
        stale = self._found_stale()  # an engine that came back with other weights needs all of them, not what has changed since
        return self._push(version, fingerprint, send_tensors=changed or stale, complete=stale)

    def repair(self, version: int) -> SyncReport | None:
        """Push everything if an engine is found that does not hold the pushed version (restarted, replaced); None if all is well."""
        if not self._found_stale():
            return None
        logger.warning("an engine does not hold the weights of version %d: pushing all of them", self.pushed_version)
        return self._push(version, self._fingerprint(), send_tensors=True, complete=True)

    def begin(self, version: int) -> SyncReport:
        """Before the first rollouts of a process: the engines must hold the trainer's weights, and the probe must agree."""
        self._source.pieces(complete=True)  # what cannot be pushed is refused now, on every rank, and not after the first step
        if self._found_stale():
            return self._push(version, self._fingerprint(), send_tensors=True, complete=True)
        if version != self.pushed_version:
            return self.merge_check(version, force=True)
        mean_gap, max_gap = self.probe(version)
        if mean_gap is not None:
            logger.info("probe at version %d: engine and trainer differ by %.2g nats in the mean, %.2g at most", version, mean_gap, max_gap)
        return SyncReport(probe_mean_gap=mean_gap, probe_max_gap=max_gap)

    def remember_initial(self) -> None:
        """The engines loaded the very checkpoint that the trainer starts from: version 0 needs no push."""
        self._pushed_fingerprint = self._fingerprint()

    def stale(self) -> bool:
        """Not collective, cheap; rank 0: an engine answers and does not hold the pushed version. False on the other ranks.

        Engines of which none answers are not stale: whether they are lost is for the rollout process to say, which waits for them.
        """
        if self._transport is None:
            return False
        try:
            return self._transport.stale(self.pushed_version)
        except RolloutError as error:
            logger.info("no engine says which weights it holds: %s", error)
            return False

    def close(self) -> None:
        """Not collective: lets go of connections and files."""
        if self._transport is not None:
            self._transport.close()

    def _found_stale(self) -> bool:
        found = [0]

        def look() -> None:
            found[0] = int(self.stale())

        self._together(look, "asking the engines for their version")
        return bool(self._collectives.max_int(found[0]))

    def _fingerprint(self) -> list[float]:
        """Sums over this rank's shards of the trained parameters: equal if and only if no parameter moved, for all practical purposes."""
        sums = []
        for parameter in self._engine.network.parameters():
            if parameter.requires_grad:
                shard = getattr(parameter, "ds_tensor", parameter).detach()
                sums += [float(shard.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(shard, dtype=torch.float64))]
        return sums

    def _push(self, version: int, fingerprint: list[float], *, send_tensors: bool, complete: bool) -> SyncReport:
        started = time.monotonic()
        manifest, result = self._attempts(self._manifest(version, send_tensors=send_tensors, complete=complete))
        send_tensors = bool(manifest.tensors)
        seconds = time.monotonic() - started
        logger.debug("weight push %d is confirmed after %.2f s", version, seconds)
        self.pushed_version = version
        self._pushed_fingerprint = fingerprint
        survival = self._source.loss.delta_survival if send_tensors else None
        if survival is not None and survival < 0.5:
            logger.warning(
                "weight push %d: only %.0f %% of the update survives rounding to %s", version, 100 * survival, self._options.dtype
            )
        if result is not None and result.lost:
            logger.warning("weight push %d: %d engine(s) not reached; they get no request until they are", version, result.lost)
        mean_gap, max_gap = self.probe(version)
        return SyncReport(manifest.num_bytes, seconds, result.pause_seconds if result else 0.0, mean_gap, max_gap, survival)

    def _manifest(self, version: int, *, send_tensors: bool, complete: bool) -> WeightManifest:
        pieces = self._source.pieces(complete=complete) if send_tensors else []
        return WeightManifest(version, [TensorSpec(p.name, self._options.dtype, list(p.shape)) for p in pieces], complete=complete)

    def _attempts(self, manifest: WeightManifest) -> tuple[WeightManifest, PushResult | None]:
        """What was sent at last, and the transport's result (None on other ranks), after as many attempts as it takes and are allowed."""
        for attempts_left in range(self._options.retries, -1, -1):
            logger.debug("weight push %d begins: %d tensors, %d bytes", manifest.version, len(manifest.tensors), manifest.num_bytes)
            try:
                return manifest, self._attempt(manifest)
            except EbftError as error:
                refused = isinstance(error, WeightSyncError)  # anything else would not be better next time
                if not self._collectives.max_int(int(refused and attempts_left > 0)):
                    raise
                if refused:
                    logger.warning("weight push %d failed and is tried again: %s", manifest.version, error)
                if self._found_stale():  # an engine that was started again meanwhile lacks more than what this push would bring
                    manifest = self._manifest(manifest.version, send_tensors=True, complete=True)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, manifest: WeightManifest) -> PushResult | None:
        buckets = Lockstep(self._source.buckets(complete=manifest.complete), self._collectives) if manifest.tensors else None
        results: list[PushResult] = []

        def push() -> None:
            if self._transport is not None:
                results.append(self._transport.push(manifest, buckets or (), self._options.timeout))
            else:
                for _ in buckets or ():
                    pass
            if buckets is not None and not buckets.finished and next(buckets, None) is not None:
                raise WeightSyncError(f"weight push {manifest.version}: the transport stopped before the last bucket")

        try:
            self._together(push, "pushing weights", always=buckets.close if buckets is not None else None)
        except PeerError:
            if results:
                raise WeightSyncError("another rank failed during a weight push") from None
            raise
        return results[0] if results else None

    def _together(self, action: Callable[[], object], what: str, always: Callable[[], None] | None = None) -> None:
        """Runs this rank's part, then tells everybody how it went."""
        error: EbftError | None = None
        try:
            action()
        except EbftError as caught:
            error = caught
        finally:
            if always is not None:
                always()
        if self._collectives.max_int(int(error is not None)):
            raise error or PeerError(f"rank 0 failed while {what}; its message names the cause")

    def probe(self, version: int) -> tuple[float | None, float | None]:
        """(mean, largest) |trainer - engine| log-prob gap on the fixed sequence, in nats, of the worst engine; None without a probe.

        Raises:
            WeightSyncError: the mean gap is above tolerance, on every rank.
        """
        if self._options.probe_ids is None:
            return None, None
        ids = list(self._options.probe_ids)
        [temperature] = self._collectives.broadcast([self._probe_temperature()], list[float])
        own = self._trainer_log_probs(ids, temperature)
        gaps: list[list[float]] = []

        def compare() -> None:
            if self._transport is None:
                return
            for scored in self._transport.score(ids, temperature, self._options.timeout):
                difference = (own - torch.tensor(scored)).abs()
                gaps.append([float(difference.mean()), float(difference.max())])

        self._together(compare, "probing the engines")
        found = self._collectives.broadcast(gaps, list[list[float]])
        if not found:  # all died since they confirmed, and are started again: they get the weights, and this probe, before a request
            logger.warning("version %d: no engine could be probed", version)
            return None, None
        mean_gap, max_gap = max(found, key=lambda gap: math.inf if math.isnan(gap[0]) else gap[0])
        if not mean_gap <= self._tolerance:
            raise WeightSyncError(
                f"version {version}: engine and trainer disagree on a fixed sequence by {mean_gap:.3g} nats (at most {max_gap:.3g}), "
                f"above sync_probe_tolerance={self._tolerance:g}: the engine does not hold the trainer's weights, or computes otherwise"
            )
        return mean_gap, max_gap

    def _probe_temperature(self) -> float:
        own = self._transport.probe_temperature if self._transport is not None else None
        return self._options.temperature if own is None else own

    def _trainer_log_probs(self, ids: list[int], temperature: float) -> torch.Tensor:
        device = self._engine.device
        count = len(ids) - 1
        work = LogProbWork(
            rows=pad_rows([ids], device=device),
            positions=torch.arange(count, device=device),
            targets=torch.tensor(ids[1:], dtype=torch.int64, device=device),
            inverse_temperature=torch.full((count,), 1.0 / temperature, device=device),
        )
        log_probs, _ = self._engine.frozen_log_probs(work)
        return log_probs.cpu()
