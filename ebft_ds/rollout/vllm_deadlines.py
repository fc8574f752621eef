"""How long the engine waits for servers while work is pending."""

from __future__ import annotations

from collections.abc import Sequence

from ebft_ds.rollout.vllm_server import State


class Deadlines:
    """Two clocks: since when no server answers, and since when none holds the run's weights. During a push both stand still.

    Rank 0 watches over a push, in which a server's core may be busy with the weights and answer nothing.
    """

    def __init__(self, *, unreachable: float, unusable: float, now: float) -> None:
        """Seconds that either may last; `unusable` bounds a push as well: after it a push counts as given up."""
        self._unreachable = unreachable
        self._unusable = unusable
        self._reachable_at = self._usable_at = now
        self._push_began: float | None = None

    def push_began(self, now: float) -> None:
        self._push_began = now

    def push_ended(self, now: float) -> None:
        self._push_began = None
        self._reachable_at = self._usable_at = now

    def pushing(self, now: float) -> bool:
        return self._push_began is not None and now - self._push_began < self._unusable

    def overdue(self, states: Sequence[State], *, pending: bool, now: float, answered_at: float = float("-inf")) -> str | None:
        """What has lasted too long, for an error message; None: nothing. `answered_at`: when a completion last came, which shows a server
        that is too busy to answer looks."""
        self._reachable_at = max(self._reachable_at, answered_at)
        if not pending or "usable" in states or self.pushing(now):
            self._reachable_at = self._usable_at = now
        elif "stale" in states:
            self._reachable_at = now
        if now - self._reachable_at > self._unreachable:
            return f"no vLLM server has answered for {self._unreachable:g} s (vllm_reconnect_timeout)"
        if now - self._usable_at > self._unusable:
            return f"no vLLM server has held the run's weights for {self._unusable:g} s"
        return None
