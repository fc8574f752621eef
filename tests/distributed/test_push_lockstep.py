"""A push that fails at any bucket fails on every rank, hangs nobody, is tried again as often as allowed, and the next one works."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ebft_ds.collectives import Collectives
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.errors import EbftError, RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sync.merge import MergeLoss
from ebft_ds.sync.push import SyncOptions, WeightSync
from ebft_ds.sync.transport import Bucket, PushResult
from tests.distributed.ranks import run_ranks

BUCKETS = 4
FAULTS: dict[str, tuple[int, type[EbftError]]] = {
    "before the first bucket": (0, WeightSyncError),
    "after one": (1, WeightSyncError),
    "after the last": (BUCKETS, WeightSyncError),
    "no engine left": (2, RolloutError),
}


class CollectiveSource:
    """Each bucket is a collective of all ranks, as gathering one is; a rank too many or too few in it would hang or mix up the sums."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.loss = MergeLoss()

    def pieces(self, *, complete: bool) -> list[Any]:
        return [SimpleNamespace(name=f"w{i}", shape=[1]) for i in range(BUCKETS)]

    def buckets(self, *, complete: bool) -> Generator[Bucket, None, None]:
        for i in range(BUCKETS):
            [total] = self._collectives.sum_floats([float(i)])
            yield [(f"w{i}", torch.tensor([total]))] if self._collectives.is_main else []


class FaultyTransport:
    """Fails after some buckets as often as it is told, then works."""

    probe_temperature = None

    def __init__(self) -> None:
        self.fail_after = 0
        self.error: type[EbftError] = WeightSyncError
        self.failures_left = 0
        self.stop_early = False
        self.attempts = 0
        self.received: dict[str, float] = {}
        self.version = 0

    def stale(self, version: int) -> bool:
        return False

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        self.attempts += 1
        failing, self.failures_left = self.failures_left > 0, self.failures_left - 1
        if failing and self.fail_after == 0:
            raise self.error("refused")
        received: dict[str, Tensor] = {}
        for count, bucket in enumerate(buckets, start=1):
            received.update(bucket)
            if failing and count == self.fail_after:
                raise self.error("refused")
            if self.stop_early:
                break
        self.received = {name: float(tensor) for name, tensor in received.items()}
        self.version = manifest.version
        return PushResult(0.0, confirmed=1)

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        raise AssertionError("no probe here")

    def close(self) -> None:
        pass


def outcomes(collectives: Collectives) -> dict[str, Any]:
    network = nn.Linear(2, 2)
    engine = cast(ZeroEngine, SimpleNamespace(network=network))
    transport = FaultyTransport() if collectives.is_main else None
    answer: dict[str, Any] = {}
    version = 0

    def push(retries: int) -> str:
        nonlocal version
        version += 1
        options = SyncOptions(1, "float32", "float32", 10.0, retries, None, None, 1.0)
        sync = WeightSync(engine, CollectiveSource(collectives), transport, collectives, options)
        before = transport.attempts if transport else 0
        try:
            sync.merge_check(version)
        except EbftError as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = f"version {sync.pushed_version}"
        return f"{said} after {transport.attempts - before}" if transport else said

    for label, (after, error) in FAULTS.items():
        for retries, failures in ((0, 1), (2, 2), (2, 3)):
            if transport is not None:
                transport.fail_after, transport.error, transport.failures_left = after, error, failures
            answer[f"{label}, {failures} of {retries + 1}"] = push(retries)
            if transport is not None:
                transport.failures_left = 0
            answer[f"{label}, {failures} of {retries + 1}, next"] = push(0)
            answer[f"{label}, received"] = transport.received if transport else None
    if transport is not None:
        transport.stop_early = True
    answer["stopped early"] = push(0)
    if transport is not None:
        transport.stop_early = False
    answer["stopped early, next"] = push(0)
    return answer


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(3, outcomes)


@pytest.mark.parametrize("label", [label for label, (_, error) in FAULTS.items() if error is WeightSyncError])
def test_a_refused_push_is_tried_again_as_often_as_allowed(ranks: list[dict[str, Any]], label: str) -> None:
    main, *others = ranks
    assert main[f"{label}, 1 of 1"] == "WeightSyncError: refused after 1"
    assert main[f"{label}, 2 of 3"].startswith("version")
    assert main[f"{label}, 2 of 3"].endswith("after 3")
    assert main[f"{label}, 3 of 3"] == "WeightSyncError: refused after 3"
    for other in others:
        assert other[f"{label}, 1 of 1"].startswith("PeerError")
        assert main[f"{label}, 2 of 3"].startswith(other[f"{label}, 2 of 3"])
        assert other[f"{label}, 3 of 3"].startswith("PeerError")


def test_a_lost_engine_is_not_pushed_to_again(ranks: list[dict[str, Any]]) -> None:
    main, *others = ranks
    assert main["no engine left, 2 of 3"] == "RolloutError: refused after 1"
    assert all(other["no engine left, 2 of 3"].startswith("PeerError") for other in others)


@pytest.mark.parametrize("label", list(FAULTS))
def test_the_next_push_brings_everything_once(ranks: list[dict[str, Any]], label: str) -> None:
    assert ranks[0][f"{label}, received"] == {f"w{i}": 3.0 * i for i in range(BUCKETS)}
    for key in (f"{label}, 1 of 1, next", f"{label}, 3 of 3, next"):
        assert all(ranks[0][key].startswith(rank[key]) and rank[key].startswith("version") for rank in ranks)


def test_a_transport_that_stops_early_is_found_out(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["stopped early"].startswith("WeightSyncError")
    assert "before the last bucket" in ranks[0]["stopped early"]
    assert all(rank["stopped early, next"].startswith("version") for rank in ranks)
