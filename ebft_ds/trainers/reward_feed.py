"""The rows of each step: as the recipe encodes them, or through a user's data collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ebft_ds.collectives import Collectives
from ebft_ds.data.preference import EncodedResponses, EncodingCounts, PreferenceReader, rows_of_batch
from ebft_ds.errors import CheckpointError, DataError, EbftError, PeerError
from ebft_ds.trainers.reward_inputs import DataCollator


class RowFeed(Protocol):
    """What the training loop takes its rows from; collective."""

    rows_seen: int
    epoch: float

    def next_rows(self, count: int) -> list[EncodedResponses]: ...

    def counts(self) -> EncodingCounts: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Collated(msgspec.Struct, frozen=True):
    """A batch on its way from rank 0."""

    rows: list[EncodedResponses]
    epoch: float
    failed: bool = False


class CollatedFeed:
    """Rank 0 reads raw rows and calls the collator on each step's, the other ranks get what it gave.

    Args:
        reader: on rank 0 alone.
        max_length: most tokens of a sequence; the collator keeps to it.
        vocab_size: of the model; None: ids are not held against it.
    """

    def __init__(
        self,
        reader: PreferenceReader | None,
        collator: DataCollator,
        collectives: Collectives,
        *,
        max_length: int,
        vocab_size: int | None = None,
    ) -> None:
        self._reader = reader
        self._collator = collator
        self._collectives = collectives
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._counts = EncodingCounts()
        self.rows_seen = 0
        self.epoch = 0.0

    def next_rows(self, count: int) -> list[EncodedResponses]:
        """Collective. Raises DataError (rank 0) or PeerError for what the collator gave, or if it left rows out."""
        batch, failure = Collated([], 0.0, failed=True), None
        if self._reader is not None:
            try:
                batch = self._collate(self._reader, count)
            except EbftError as error:
                failure = error
        shared = self._collectives.broadcast(batch, Collated)
        assert shared is not None
        if shared.failed:
            raise failure or PeerError("rank 0 cannot give the step's rows; its message names the cause")
        self.rows_seen += count
        self._counts.rows += count
        self._counts.used += count
        self.epoch = shared.epoch
        return shared.rows

    def _collate(self, reader: PreferenceReader, count: int) -> Collated:
        taken = reader.take(count)
        numbers = [number for number, _ in taken]
        rows = rows_of_batch(self._call([row for _, row in taken], numbers), vocab_size=self._vocab_size)
        if len(rows) != count:
            raise DataError(f"the data_collator was given {count} rows and gave {len(rows)}; it must keep every row")
        longest = max(len(ids) for row in rows for ids in row.group)
        if longest > self._max_length:
            raise DataError(f"the data_collator gave a sequence of {longest} tokens, over max_length {self._max_length}")
        return Collated(_numbered(rows, numbers), reader.epoch)

    def _call(self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> Mapping[str, Any]:
        try:
            return self._collator(rows)
        except EbftError:
            raise
        except Exception as error:  # a user's code may raise anything, and the other ranks wait for its answer
            name = getattr(self._collator, "__name__", type(self._collator).__name__)
            where = ", ".join(map(str, numbers))
            raise DataError(f"data_collator {name} raised {type(error).__name__}: {error} (rows {where}, counted from 0)") from error

    def counts(self) -> EncodingCounts:
        return self._counts

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; complete on rank 0."""
        reader = self._reader.state_dict() if self._reader is not None else None
        return {"rows_seen": self.rows_seen, "epoch": self.epoch, "collated": True, "reader": reader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Every rank, with rank 0's state. Raises CheckpointError for other data, or a run without a collator."""
        if "collated" not in state:
            raise CheckpointError("the run was saved without a data_collator; give none, or start a new run from the exported model")
        if self._reader is not None:
            self._reader.load_state_dict(state["reader"])
        self.rows_seen, self.epoch = int(state["rows_seen"]), float(state["epoch"])


def _numbered(rows: Sequence[EncodedResponses], numbers: Sequence[int]) -> list[EncodedResponses]:
    return [msgspec.structs.replace(row, row=number) for row, number in zip(rows, numbers, strict=True)]
