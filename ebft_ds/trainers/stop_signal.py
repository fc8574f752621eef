"""SIGINT, SIGTERM and SIGUSR1 ask for "save and stop"; a second one, a moment later, ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

SECOND_SIGNAL_SECONDS = 2.0
"""A launcher may pass on the very signal that a terminal has already delivered; only a later one is a second request."""


class StopSignal:
    """Installs the handlers while used as a context; outside the main thread it only ever says no."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._first: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self._first is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > SECOND_SIGNAL_SECONDS:
            os._exit(128 + number)
