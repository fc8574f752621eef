"""Scoring in rounds: rank 0 says what is to be scored, every rank takes part, rank 0 has the rewards."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ebft_ds.collectives import Collectives
from ebft_ds.errors import NumericsError, PeerError, Preempted
from ebft_ds.packing.whole_groups import WholeGroup
from ebft_ds.trainers.reward_engine import RewardEngine
from ebft_ds.trainers.reward_scoring import score_groups
from ebft_ds.trainers.stop_signal import StopSignal


class GroupIds(msgspec.Struct, frozen=True):
    """A WholeGroup on its way between ranks."""

    prefix: list[int]
    branches: list[list[int]]


class Round(msgspec.Struct, frozen=True):
    """What rank 0 tells the others."""

    groups: list[GroupIds]
    end: bool = False
    failure: str | None = None
    """With `end`: why the job failed."""
    stopped: str | None = None
    """With `end`: where a stop signal ended it."""


class ScoreRounds:
    """Rank 0 calls `lead` again and again and `finish` once; the others call `follow`. All of it is collective."""

    def __init__(self, reward: RewardEngine, collectives: Collectives, stop: StopSignal, *, token_budget: int) -> None:
        self._reward, self._collectives, self._stop = reward, collectives, stop
        self._token_budget = token_budget
        self._others_listen = True
        self.stop_wanted = False
        """Some rank had been sent a stop signal when the last round ended."""

    def lead(self, groups: Sequence[GroupIds]) -> list[list[float]]:
        """Rank 0: the rewards of these groups. Without groups a sign of life.

        Raises:
            NumericsError: a reward that is not finite. The next round works.
        """
        self._others_listen = False  # until the round is over: where it breaks off, the others are in the middle of it
        self._collectives.broadcast(Round(list(groups)), Round)
        rewards, problem = self._score(groups)
        self.stop_wanted = bool(self._collectives.max_int(int(self._stop.requested)))
        self._others_listen = True
        if problem is not None:
            raise problem
        return rewards

    def finish(self, *, failure: str | None = None, stopped: str | None = None) -> None:
        """Rank 0: the others end. Does nothing after a round that broke off, or a second time."""
        if self._others_listen:
            self._others_listen = False
            self._collectives.broadcast(Round([], True, failure, stopped), Round)

    def follow(self) -> None:
        """Other ranks: take part until rank 0 finishes.

        Raises:
            PeerError: rank 0 failed.
            Preempted: it was stopped by a signal.
        """
        while True:
            found = self._collectives.broadcast(None, Round)
            if found.failure is not None:
                raise PeerError(f"rank 0 ended the scoring: {found.failure}")
            if found.stopped is not None:
                raise Preempted(found.stopped)
            if found.end:
                return
            self._score(found.groups)
            self._collectives.max_int(int(self._stop.requested))

    def _score(self, groups: Sequence[GroupIds]) -> tuple[list[list[float]], NumericsError | None]:
        """A reward that is not finite is known on every rank: none of them leaves the lockstep, and rank 0 decides what becomes of it."""
        if not groups:
            return [], None
        whole = [WholeGroup(group.prefix, group.branches) for group in groups]
        engine, packer = self._reward.engine, self._reward.packer
        try:
            return score_groups(engine, packer, whole, self._collectives, token_budget=self._token_budget), None
        except NumericsError as error:
            return [], error
