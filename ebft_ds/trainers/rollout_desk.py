"""The collective front of the rollout feed: rank 0 owns feed and client, every rank gets the same groups.

While rank 0 waits for rollouts, all ranks meet every `WAIT_SLICE` seconds on the CPU group: a stop signal at any rank and an
error at rank 0 are known everywhere within a slice, and no rank sits in a collective that could time out. An engine that has lost its
weights meanwhile (a restarted server) is given them again from there, so that the wait can end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ebft_ds.collectives import Collectives
from ebft_ds.errors import EbftError, PeerError, Preempted
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.feed import FeedStats, RolloutFeed
from ebft_ds.sync.transports.colocated import Turns
from ebft_ds.trainers.stop_signal import StopSignal
from ebft_ds.types import Prompt, RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)

WAIT_SLICE = 0.5
REPORT_SECONDS = 30.0
LOOK_SECONDS = 2.0
"""Between two looks at the engines' versions while waiting."""
T = TypeVar("T")


class Repair(Protocol):
    """Who gives lost weights back (WeightSync)."""

    def stale(self) -> bool:
        """Rank 0, not collective: an engine answers and does not hold the weights it should."""
        ...

    def repair(self, version: int) -> object:
        """Collective: push to it."""
        ...


class RolloutDesk:
    """Groups for a step, references for a warm-start step, completions for an evaluation."""

    def __init__(
        self,
        feed: RolloutFeed | None,
        client: RolloutClient | None,
        collectives: Collectives,
        stop: StopSignal,
        check_servers: Callable[[], None] | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`check_servers`: rank 0's further look after processes that the run depends on; raises RolloutError. `turns`: of a shared GPU."""
        self._feed = feed
        self._client = client
        self._collectives = collectives
        self._stop = stop
        self._check_servers = check_servers
        self._turns = turns
        self._repair: Repair | None = None
        self._looked = time.monotonic()

    def repair_with(self, repair: Repair) -> None:
        """Collective in effect: from now on engines without their weights are repaired while waiting."""
        self._repair = repair

    def next_groups(self, version: int, steps: int = 1) -> list[RolloutGroup]:
        """Collective: the groups of the step that starts from policy `version`, which `steps - 1` further ones will train on again;
        rollouts of later steps are under way afterwards.

        Raises:
            RolloutError (rank 0) or PeerError: the rollout side failed. Preempted: a stop signal was agreed on.
        """
        started = time.monotonic()

        def report() -> None:
            stats = self.stats()
            if stats is not None:
                waited, state = time.monotonic() - started, f"{stats.in_flight} in flight, {stats.queue_depth} ready{self._servers()}"
                logger.info("step %d: waiting for rollouts for %.0f s (%s)", version, waited, state)

        self._begin_turn()
        self._wait(lambda: self._feed is not None and self._advance(self._feed, version), report, version)
        groups = self._hand_out(version, steps)
        self._end_turn()
        return groups

    def _servers(self) -> str:
        """What the rollout process says of its servers, where it has any."""
        counts = self._client.servers() if self._client is not None else None
        return "" if counts is None else f"; {counts.usable} of {counts.total} servers usable, {counts.stale} without the run's weights"

    def _begin_turn(self) -> None:
        """A shared GPU belongs to one rank (the configuration's checks see to it), so there is nobody to tell about an error."""
        if self._turns is not None:
            self._turns.rollouts_begin()

    def _end_turn(self) -> None:
        if self._turns is not None:
            self._turns.rollouts_end()

    def _wait(self, advance: Callable[[], bool], report: Callable[[], None], version: int) -> None:
        """Collective: until rank 0's `advance` (a slice of work) says that it is done. Signals and errors reach every rank."""
        reported = time.monotonic()
        error: EbftError | None = None
        while True:
            done, stale = False, False
            try:
                done = advance()
                if self._check_servers is not None:
                    self._check_servers()
                stale = not done and self._finds_stale()
            except EbftError as caught:
                error = caught
            stop, failed, is_done, repair = self._collectives.max_ints(
                [int(self._stop.requested), int(error is not None), int(done), int(stale)]
            )
            if stop:  # first: whoever stops the ranks may have stopped the rollout process as well
                raise Preempted("a stop signal arrived while waiting for rollouts")
            if failed:
                raise error or PeerError("the rollout side failed; rank 0's message names the cause")
            if is_done:
                return
            if repair and self._repair is not None:
                self._repair.repair(version)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                report()

    def _finds_stale(self) -> bool:
        """Now and then, on rank 0."""
        if self._repair is None or self._client is None or time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return self._repair.stale()

    def _advance(self, feed: RolloutFeed, version: int) -> bool:
        feed.top_up(version)
        if feed.ready(version):
            return True
        feed.poll(WAIT_SLICE)
        return feed.ready(version)

    def reuse(self, version: int) -> None:
        """Collective: the step that starts from policy `version` trains on the groups handed out last; rollouts go on meanwhile."""
        feed = self._feed
        self.on_main(lambda: feed.reuse(version) if feed is not None else None)

    def _hand_out(self, version: int, steps: int) -> list[RolloutGroup]:
        def take() -> list[RolloutGroup] | None:
            if self._feed is None:
                return None
            groups = self._feed.take(version, steps)
            self._feed.top_up(version)  # keeps the engine busy while the ranks train
            return groups

        return self._collectives.broadcast(self.on_main(take), list[RolloutGroup])

    def references(self, count: int) -> list[Prompt]:
        """Collective: the next `count` prompts of the stream, for their references alone."""
        return self._collectives.broadcast(self._feed.take_references(count) if self._feed is not None else None, list[Prompt])

    def roll_out(self, requests: Sequence[RolloutRequest], version: int) -> list[RolloutGroup]:
        """Collective: completions for evaluation prompts (negative indices), in the order of the requests. Raises like `next_groups`.

        `version`: the trainer's, for engines that need their weights again meanwhile. There is no deadline but the client's own: a
        process without progress is lost, a slow one is waited for.
        """
        feed = self._feed
        self._begin_turn()
        self.on_main(lambda: feed.begin_evaluation(requests) if feed is not None else None)

        def advance() -> bool:
            if feed is None:
                return False
            feed.poll(WAIT_SLICE)
            return feed.evaluation_pending == 0

        groups: list[RolloutGroup] | None = None
        try:
            self._wait(
                advance, lambda: logger.info("evaluation: %d prompts to come", feed.evaluation_pending if feed is not None else 0), version
            )
        except BaseException:
            if feed is not None:
                with contextlib.suppress(EbftError):  # what ended the wait is what all ranks agree on
                    feed.end_evaluation()
            raise
        if feed is not None:
            groups = feed.end_evaluation()
        self._end_turn()
        return self._collectives.broadcast(groups, list[RolloutGroup])

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Runs rank 0's part; an error there is an error everywhere. None on the other ranks."""
        result: T | None = None
        error: EbftError | None = None
        if self._collectives.is_main:
            try:
                result = action()
            except EbftError as caught:
                error = caught
        if self._collectives.max_int(int(error is not None)):
            raise error or PeerError("rank 0 failed; its message names the cause")
        return result

    def check_stop(self) -> None:
        """Collective, cheap: Preempted on every rank once any rank has got a stop signal; rank 0 also looks after its child."""
        error: EbftError | None = None
        if self._client is not None:
            try:
                self._client.check()
                if self._check_servers is not None:
                    self._check_servers()
            except EbftError as caught:
                error = caught
        stop, failed = self._collectives.max_ints([int(self._stop.requested), int(error is not None)])
        if stop:
            raise Preempted("a stop signal arrived")
        if failed:
            raise error or PeerError("the rollout side failed; rank 0's message names the cause")

    def stats(self) -> FeedStats | None:
        """Rank 0's counters."""
        return self._feed.stats() if self._feed is not None else None

    def state_dict(self) -> dict[str, Any]:
        """Collective: rank 0's feed and loop state in JSON types; {} on the others."""

        def read() -> dict[str, Any]:
            if self._feed is None or self._client is None:
                return {}
            state: dict[str, Any] = msgspec.to_builtins({"feed": self._feed.state_dict(), "loop": self._client.state_dict()})
            return state

        return self.on_main(read) or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Collective: restores what `state_dict` gave."""

        def write() -> None:
            if self._feed is not None and self._client is not None:
                self._feed.load_state_dict(state["feed"])
                self._client.load_state_dict(state["loop"])

        self.on_main(write)

    def close(self) -> None:
        """Ends the rollout process."""
        if self._client is not None:
            self._client.stop()
