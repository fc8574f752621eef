"""Buckets from the thread that gathers them to the one that sends them, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.transport import Bucket
from ebft_ds.sync.transports.deadline import Deadline

POLL_SECONDS = 0.05


class HandOver:
    """At most one bucket lies between the threads, and `put` returns when it was taken: two exist while the next one is gathered."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._slot: Bucket | None = None
        self._ended = False
        self._broken: str | None = None
        self._changed = threading.Condition()

    def put(self, bucket: Bucket) -> None:
        """Blocks until the other thread has begun with it. Errors: WeightSyncError when that one has failed, or time is over."""
        with self._changed:
            self._slot = bucket
            self._changed.notify_all()
            while self._slot is not None:
                self._wait("the sender does not take the next bucket")

    def end(self) -> None:
        """No more buckets."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Both sides stop."""
        with self._changed:
            self._broken = reason
            self._slot = None
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            with self._changed:
                while self._slot is None and not self._ended:
                    self._wait("no bucket comes")
                if self._slot is None:
                    return
                bucket: Bucket | None = self._slot
                self._slot = None
                self._changed.notify_all()
            assert bucket is not None
            yield bucket
            bucket = None  # before the wait for the next one

    def _wait(self, what: str) -> None:
        if self._broken is not None:
            raise WeightSyncError(self._broken)
        if not self._deadline.left:
            raise WeightSyncError(f"{what}: the push's {self._deadline.seconds:g} s are over")
        self._changed.wait(POLL_SECONDS)
        if self._broken is not None:
            raise WeightSyncError(self._broken)
