"""Evaluation rows: all of a set at once, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ebft_ds.collectives import Collectives
from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.preference.by_number import RowSelection
from ebft_ds.data.preference.encode import EncodedResponses, RewardEncoder
from ebft_ds.data.preference.evaluation_rows import EvaluationRows
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.reader import PreferenceSource
from ebft_ds.data.preference.streamed import is_stream, open_stream
from ebft_ds.data.preference.together import Batch, Numbered, RowsTogether, all_counts
from ebft_ds.data.sources import RowTable, read_rows
from ebft_ds.errors import DataError

logger = logging.getLogger(__name__)

CHUNK = 256


def read_evaluation_rows(
    source: PreferenceSource | RowSelection | None,
    *,
    data: DataSection,
    reward: RewardSection,
    encoder: RewardEncoder,
    collectives: Collectives,
    split: str | None,
    max_rows: int | None,
    name: str,
) -> Sequence[EncodedResponses]:
    """Collective: the usable rows among the first `max_rows`, in source order, on every rank. Ranks other than 0 may pass no source.
    They are kept as `EvaluationRows`: 4 bytes a token.

    Left-out rows are logged under `name`. Give each set an encoder of its own, so that its counts are its own.
    Raises `DataError` for a bad row (with `bad_rows: error`), a source that is not there or cannot be read, or no usable row.
    """
    fields = PreferenceFields.of(reward, data)
    together = RowsTogether(encoder, collectives, fields=fields, bad_rows=data.bad_rows)
    chunks = _EvaluationChunks(source, together, data, split, max_rows) if collectives.is_main else None
    found = EvaluationRows()
    while batch := together.read(None if chunks is None else chunks.take).rows:
        found.extend(together.encode(batch))
    counts = all_counts(encoder.counts, collectives)
    if not len(found):
        raise DataError(f"{name} has no usable row. {counts.summary()}.")
    if collectives.is_main:
        logger.info("%s: %s", name, counts.summary())
    return found


class _EvaluationChunks:
    """Rank 0's side of reading an evaluation set."""

    def __init__(self, source: Any, together: RowsTogether, data: DataSection, split: str | None, max_rows: int | None) -> None:
        self._source, self._together, self._data, self._split, self._max_rows = source, together, data, split, max_rows
        self._rows: Iterator[tuple[int, Any, str]] | None = None

    def take(self) -> Batch:
        """Opened here, so that a source which is not there is an error that every rank hears of."""
        if self._rows is None:
            self._rows = self._open()
        rows: list[Numbered] = []
        for number, row, where in self._rows:
            rows.append(self._together.numbered(number, row, where))
            if len(rows) == CHUNK:
                break
        return Batch(rows)

    def _open(self) -> Iterator[tuple[int, Any, str]]:
        source, most = self._source, self._max_rows
        if is_stream(source):
            stream = open_stream(source, split=self._split, config_name=self._data.dataset_config)
            rows = enumerate(islice(stream.rows(), most))
            return ((number, row, f"row {number + 1} of {stream.name}") for number, row in rows)
        if isinstance(source, RowSelection):
            table: RowTable | RowSelection = source
            numbers: Sequence[int] = source.numbers
        else:
            table = read_rows(
                source, split=self._split, config_name=self._data.dataset_config, num_proc=self._data.dataset_num_proc, lazy=True
            )
            numbers = range(len(table))
        return ((number, table.row(number), table.where(number)) for number in numbers[:most])
