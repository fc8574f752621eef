"""The rows of each step: the next usable ones of rank 0's reader, the same on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import msgspec

from ebft_ds.collectives import Collectives
from ebft_ds.data.preference.counts import EncodingCounts
from ebft_ds.data.preference.encode import EncodedResponses, RewardEncoder
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.reader import PreferenceReader
from ebft_ds.data.preference.together import Batch, RowsTogether, all_counts
from ebft_ds.errors import CheckpointError, DataError


class PreferenceFeed:
    """The next usable rows of a reader, whatever the world size. `reader` is given on rank 0 alone."""

    def __init__(
        self,
        reader: PreferenceReader | None,
        encoder: RewardEncoder,
        collectives: Collectives,
        *,
        fields: PreferenceFields,
        bad_rows: Literal["error", "skip"],
    ) -> None:
        assert (reader is not None) == collectives.is_main, "rank 0 reads, and no other rank"
        self._reader = reader
        self._together = RowsTogether(encoder, collectives, fields=fields, bad_rows=bad_rows)
        self._collectives = collectives
        self.rows_seen = 0
        """Rows read from the source, left-out ones included; the same on every rank."""
        self.epoch = 0.0
        """Passes over the source so far, as the reader counts them."""

    def next_rows(self, count: int) -> list[EncodedResponses]:
        """Collective: the next `count` usable rows on every rank; those that are left out are replaced by later ones.

        Raises:
            DataError: a bad row (with `bad_rows: error`), on every rank; or a whole epoch without a usable row.
        """
        rows: list[EncodedResponses] = []
        fruitless = 0
        while len(rows) < count:
            missing = count - len(rows)
            batch = self._together.read(None if self._reader is None else partial(self._read, self._reader, missing))
            self.rows_seen += len(batch.rows)
            self.epoch = batch.epoch
            usable = self._together.encode(batch.rows)
            rows += usable
            fruitless = 0 if usable else fruitless + len(batch.rows)
            if batch.rows_per_epoch is not None and fruitless >= batch.rows_per_epoch:
                raise DataError(f"No usable preference row in a whole epoch. {self.counts().summary()}.")
        return rows

    def _read(self, reader: PreferenceReader, count: int) -> Batch:
        rows = [self._together.numbered(number, row, reader.where(number)) for number, row in reader.take(count)]
        return Batch(rows, reader.epoch, reader.rows_per_epoch)

    def counts(self) -> EncodingCounts:
        """Collective: what became of the rows so far, over all ranks."""
        duplicates = self._reader.held_out_duplicates if self._reader is not None else 0
        return all_counts(msgspec.structs.replace(self._together.encoder.counts, held_out_duplicates=duplicates), self._collectives)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; complete on rank 0, which the checkpoint keeps."""
        reader = self._reader.state_dict() if self._reader is not None else None
        return {"rows_seen": self.rows_seen, "epoch": self.epoch, "encoding": self._together.encoder.fingerprint, "reader": reader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Every rank, with rank 0's state. Raises `CheckpointError` if data, order or encoding are not those it was saved with."""
        missing = [key for key in ("rows_seen", "epoch", "encoding", "reader") if key not in state]
        if missing or (self._reader is not None and not state["reader"]):
            raise CheckpointError(
                f"The saved feed has no {', '.join(missing) or 'reader'}: the checkpoint is damaged or of another version."
            )
        if state["encoding"] != self._together.encoder.fingerprint:
            raise CheckpointError(
                "The run was saved with another encoding of rows: tokenizer, chat template, lengths or truncation have changed."
                " Restore them, or start a new run from the exported model."
            )
        if self._reader is not None:
            self._reader.load_state_dict(state["reader"])
        self.rows_seen, self.epoch = int(state["rows_seen"]), float(state["epoch"])
