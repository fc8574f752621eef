"""How many requests one server gets at a time: more while that brings more tokens a second, fewer when it says that it is too many.

Requests that a server cannot work on yet are better kept here: they go to whichever server is free first, and start from newer weights.
"""

from __future__ import annotations

START_LIMIT = 32
GAIN = 1.1
"""A larger limit must bring this much more throughput to be raised again."""
PATIENCE = 8
"""Windows at a limit that brought no more, until a larger one is tried again: completions may have become longer or shorter."""


class Pacer:
    """The limit of one server, in requests.

    By Little's law a server's throughput is (requests in it) / (seconds per token of one request). The limit doubles while a window of
    answers shows more of it than the window before; it is halved by refusals and timeouts.
    """

    def __init__(self, cap: int | None = None) -> None:
        self._cap = cap
        self.limit = START_LIMIT if cap is None else min(START_LIMIT, cap)
        self._best = 0.0
        self._rest = 0
        self._in_flight = 0.0
        self._seconds_per_token = 0.0
        self._count = 0

    def answered(self, in_flight: int, seconds: float, tokens: int) -> None:
        """A good answer. `in_flight`: requests in the server when it was sent, itself included. `tokens`: of the longest completion."""
        if 2 * in_flight < self.limit:
            return  # the limit was not what held requests back: nothing to learn
        self._in_flight += in_flight
        self._seconds_per_token += seconds / tokens
        self._count += 1
        if self._count >= self.limit:
            self._close_window()

    def overloaded(self) -> None:
        """The server refused for load, or did not answer in time."""
        self.limit = max(1, self.limit // 2)
        self._best, self._rest = 0.0, PATIENCE
        self._clear()

    def _close_window(self) -> None:
        throughput = (self._in_flight / self._count) / (self._seconds_per_token / self._count)
        self._rest -= 1
        if throughput > GAIN * self._best or self._rest <= 0:
            self._best, self._rest = throughput, PATIENCE
            self.limit = 2 * self.limit if self._cap is None else min(2 * self.limit, self._cap)
        self._clear()

    def _clear(self) -> None:
        self._in_flight = self._seconds_per_token = 0.0
        self._count = 0
