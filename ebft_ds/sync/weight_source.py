"""What a push reads from: tensors with the names and shapes that the receiver knows them by, bucket by bucket."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from ebft_ds.sync.merge import MergeLoss
from ebft_ds.sync.transport import Bucket


class PieceInfo(Protocol):
    """One tensor of a push, before it is gathered."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...


class WeightSource(Protocol):
    """Merged weights, or an adapter's own."""

    @property
    def loss(self) -> MergeLoss:
        """What rounding cost in the last walk."""
        ...

    def pieces(self, *, complete: bool) -> Sequence[PieceInfo]:
        """Every tensor of a push, in order. `complete`: all parameters; else what training can change, and what must travel along."""
        ...

    def buckets(self, *, complete: bool) -> Generator[Bucket, None, None]:
        """Collective. The tensors on rank 0, empty buckets elsewhere, as many; may be closed at any bucket."""
        ...
