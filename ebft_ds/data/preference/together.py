"""Rows that rank 0 reads and all ranks encode, each its share; all get all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ebft_ds.collectives import Collectives
from ebft_ds.data.preference.counts import EncodingCounts
from ebft_ds.data.preference.encode import EncodedResponses, RewardEncoder, Skipped
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.rows import PreferenceRow, validate_preference_row
from ebft_ds.data.rows import BadRow
from ebft_ds.errors import DataError, EbftError, PeerError

ROOT_FAILED = "rank 0 cannot read the rows; its message names the cause"


class Numbered(msgspec.Struct, frozen=True):
    """A row on its way from rank 0 to the rank that encodes it."""

    number: int
    where: str
    row: PreferenceRow | None
    problem: str | None = None
    """Why `row` is missing."""


class Batch(msgspec.Struct, frozen=True):
    """What rank 0 read."""

    rows: list[Numbered]
    epoch: float = 0.0
    rows_per_epoch: int | None = None
    failed: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What became of one row."""

    at: int
    encoded: EncodedResponses | None
    reason: str | None = None
    bad: bool = False


class RowsTogether:
    """Encodes what rank 0 read, on all ranks; errors of rows reach every rank as the same `DataError`."""

    def __init__(
        self, encoder: RewardEncoder, collectives: Collectives, *, fields: PreferenceFields, bad_rows: Literal["error", "skip"]
    ) -> None:
        self.encoder = encoder
        self._collectives = collectives
        self._fields = fields
        self._bad_rows = bad_rows

    def read(self, take: Callable[[], Batch] | None) -> Batch:
        """Collective: rank 0's batch on every rank; the others pass None. Its errors are raised there, and as `PeerError` elsewhere."""
        batch = Batch([], failed=True)
        failure: Exception | None = None
        if take is not None:
            try:
                batch = take()
            except Exception as error:  # noqa: BLE001 - a user's source may raise anything, and the other ranks wait for the broadcast
                failure = error
        shared = self._collectives.broadcast(batch, Batch)
        assert shared is not None
        if shared.failed:
            raise failure or PeerError(ROOT_FAILED)
        return shared

    def numbered(self, number: int, row: Any, where: str) -> Numbered:
        """The checked row; rank 0 does this, and counts what it finds wrong."""
        try:
            return Numbered(number, where, validate_preference_row(row, self._fields))
        except BadRow as problem:
            self.encoder.counts.rows += 1
            self.encoder.counts.bad_rows += 1
            self.encoder.counts.first_bad = self.encoder.counts.first_bad or f"{where} {problem}"
            return Numbered(number, where, None, str(problem))

    def encode(self, rows: list[Numbered]) -> list[EncodedResponses]:
        """Collective: the usable ones, in order. Raises `DataError` for a bad row unless bad rows are skipped."""
        own, failure = self._encode_share(rows)
        shares = self._collectives.all_gather([own, str(failure) if failure else ""])
        failed = [message for _, message in shares if message]
        if failed:
            raise failure or PeerError(f"another rank cannot encode its rows: {failed[0]}")
        answers = [msgspec.convert(answer, Answer) for share, _ in shares for answer in share]
        answers += [Answer(i, None, numbered.problem, bad=True) for i, numbered in enumerate(rows) if numbered.row is None]
        answers.sort(key=lambda answer: answer.at)
        if self._bad_rows == "error":
            for answer in answers:
                if answer.bad:
                    raise DataError(f"{rows[answer.at].where} {answer.reason}. Correct it, or set bad_rows: skip.")
        return [answer.encoded for answer in answers if answer.encoded is not None]

    def _encode_share(self, rows: list[Numbered]) -> tuple[list[Answer], EbftError | None]:
        answers: list[Answer] = []
        for at in range(self._collectives.rank, len(rows), self._collectives.world_size):
            numbered = rows[at]
            if numbered.row is None:
                continue
            try:
                result = self.encoder.encode(numbered.row, number=numbered.number, where=numbered.where)
            except EbftError as error:  # every rank must hear of it before one stops
                return [], error
            if isinstance(result, Skipped):
                answers.append(Answer(at, None, result.reason, result.is_bad))
            else:
                answers.append(Answer(at, result))
        return answers, None


def all_counts(own: EncodingCounts, collectives: Collectives) -> EncodingCounts:
    """Collective: the ranks' counts together."""
    total = EncodingCounts()
    for share in collectives.all_gather(own):
        total.merge(msgspec.convert(share, EncodingCounts))
    return total
