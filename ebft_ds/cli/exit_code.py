"""From the ends of all ranks to the exit code of the job, and a line that says why."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    """Its exit code; negative: the signal that killed it."""
    message: str = ""
    ended_by_us: bool = False
    """It was terminated after another rank had failed: its code says nothing."""


def job_exit_code(ends: Sequence[RankEnd]) -> tuple[int, str]:
    """(exit code, reason) from the ranks' ends in the order they ended.

    The telling codes 2 to 7 win over 1, and 1 over a death by signal, which ends the job with 1; among equals the first. 0 only
    if every rank ended with 0.
    """
    failures = [end for end in ends if end.code != 0]
    if not failures:
        return 0, ""
    telling = [end for end in failures if not end.ended_by_us] or failures
    chosen = min(telling, key=_weight)
    if chosen.code > 0:
        return chosen.code, f"rank {chosen.rank} ended with exit code {chosen.code}"
    return 1, f"rank {chosen.rank} was killed by {signal_name(-chosen.code)}"


def _weight(end: RankEnd) -> int:
    if 2 <= end.code <= 7:
        return 0
    return 1 if end.code > 0 else 2


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
