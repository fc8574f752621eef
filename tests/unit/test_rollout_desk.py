"""The desk while it waits: engines that have lost their weights get them again, dead servers end the wait, a shared GPU changes hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

import ebft_ds.trainers.rollout_desk as desk_module
from ebft_ds.collectives import Collectives
from ebft_ds.errors import RolloutError
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.feed import FeedStats, RolloutFeed
from ebft_ds.trainers.rollout_desk import RolloutDesk
from ebft_ds.trainers.stop_signal import StopSignal
from ebft_ds.types import Prompt, Rollout, RolloutGroup, RolloutRequest, SamplingSpec, TokenSpan

PROMPT = Prompt(0, 0, 0, [1], [2])
GROUP = RolloutGroup(PROMPT, [Rollout([3], [-1.0], [TokenSpan(0, 1, 0)], "stop")])


class LateFeed:
    """Has its group once `ready_when` says so; writes down what happens."""

    def __init__(self, events: list[str], ready_when: Any) -> None:
        self._events = events
        self._ready_when = ready_when
        self.evaluation_pending = 0

    def top_up(self, version: int) -> int:
        self._events.append("submit")
        return 1

    def ready(self, version: int) -> bool:
        return bool(self._ready_when())

    def poll(self, timeout: float) -> int:
        return 0

    def take(self, version: int, steps: int) -> list[RolloutGroup]:
        self._events.append("take")
        return [GROUP]

    def stats(self) -> FeedStats:
        return FeedStats(0, 0, 1, 0.0, 0, 0)

    def begin_evaluation(self, requests: Sequence[RolloutRequest]) -> None:
        self._events.append("evaluate")

    def end_evaluation(self) -> list[RolloutGroup]:
        return [GROUP]


class LostWeights:
    """A repair that works at the second attempt."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.repairs = 0

    def stale(self) -> bool:
        return self.repairs < 2

    def repair(self, version: int) -> None:
        self.repairs += 1
        self._events.append(f"repair to {version}")


class Turns:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def rollouts_begin(self) -> None:
        self._events.append("begin")

    def rollouts_end(self) -> None:
        self._events.append("end")


def make_desk(feed: LateFeed, **options: Any) -> RolloutDesk:
    client = cast(RolloutClient, object())  # only its being there counts while waiting
    return RolloutDesk(cast(RolloutFeed, feed), client, Collectives(), StopSignal(), **options)


def test_engines_without_their_weights_get_them_while_the_desk_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "LOOK_SECONDS", 0.0)
    events: list[str] = []
    lost = LostWeights(events)
    desk = make_desk(LateFeed(events, lambda: lost.repairs == 2))
    desk.repair_with(lost)
    assert desk.next_groups(7) == [GROUP]
    assert [event for event in events if event.startswith("repair")] == ["repair to 7", "repair to 7"]
    assert events.index("repair to 7") < events.index("take")


def test_a_dead_server_ends_the_wait() -> None:
    def check() -> None:
        raise RolloutError("the server is dead for good")

    desk = make_desk(LateFeed([], lambda: False), check_servers=check)
    with pytest.raises(RolloutError, match="dead for good"):
        desk.next_groups(1)


def test_a_shared_gpu_is_the_servers_from_the_first_request_to_the_last_group() -> None:
    events: list[str] = []
    desk = make_desk(LateFeed(events, lambda: True), turns=Turns(events))
    desk.next_groups(1)
    assert (events[0], events[-1]) == ("begin", "end")
    assert {"submit", "take"} <= set(events[1:-1])
    events.clear()
    request = RolloutRequest(PROMPT, 1, 4, SamplingSpec(1.0, 1.0, 0, 0.0, [2], 0))
    desk.roll_out([request], 1)
    assert events == ["begin", "evaluate", "end"]
