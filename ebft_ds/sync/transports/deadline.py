"""Time limits of blocking steps, and threads that a step may be left to when it outlasts its limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """A point in time that several steps share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def share(self) -> float:
        """Seconds that one step may take where one silent server must leave time for the others."""
        return self.left / 2


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run it in a daemon thread, which nothing waits for at exit: the caller may stop waiting for the future.

    What `work` refers to is let go of before the future is done: whoever waits for a bucket to be sent may gather the next one at once.
    """
    future: Future[T] = Future()
    pending = [work]
    del work

    def run() -> None:
        try:
            result = pending.pop()()
        except BaseException as error:  # noqa: BLE001  whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
