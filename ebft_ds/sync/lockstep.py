"""Walking a collective stream of buckets in step, when one rank may drop out at any bucket and no other may hang for it."""

from __future__ import annotations

from collections.abc import Generator

from ebft_ds.collectives import Collectives
from ebft_ds.errors import PeerError
from ebft_ds.sync.transport import Bucket


class Lockstep:
    """The same buckets; before each gather all ranks agree that nobody has given up.

    Every rank must iterate or `close` it: closing before the end tells the others, which then raise PeerError instead of gathering on.
    (A class, not a generator: a generator that was closed before its first step would tell nobody.)
    """

    def __init__(self, buckets: Generator[Bucket, None, None], collectives: Collectives) -> None:
        self._buckets = buckets
        self._collectives = collectives
        self.finished = False
        """Nothing more will come, and every rank knows."""

    def __iter__(self) -> Lockstep:
        return self

    def __next__(self) -> Bucket:
        if self.finished:
            raise StopIteration
        if self._collectives.max_int(0):
            self.finished = True
            self._buckets.close()
            raise PeerError("rank 0 could not send a bucket of weights; its message names the cause")
        bucket = next(self._buckets, None)
        if bucket is None:
            self.finished = True
            raise StopIteration
        return bucket

    def close(self) -> None:
        """Give up, unless the end was reached; may be called twice."""
        self._buckets.close()
        if not self.finished:
            self.finished = True
            self._collectives.max_int(1)
