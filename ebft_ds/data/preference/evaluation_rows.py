"""Encoded rows that are kept for the whole run, compactly."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from ebft_ds.data.preference.encode import EncodedResponses
from ebft_ds.data.token_table import TokenTable


class EvaluationRows(Sequence[EncodedResponses]):
    """Rows whose tokens stand in one flat array; each row is made anew when it is asked for."""

    def __init__(self, rows: Iterable[EncodedResponses] = ()) -> None:
        self._tokens = TokenTable()
        self._starts = array("q", [0])
        """The first response of each row, and the number of responses."""
        self._prefixes, self._numbers = array("q"), array("q")
        self._margins, self._preferences = array("d"), array("d")
        self._subsets: list[str | None] = []
        self.extend(rows)

    def __len__(self) -> int:
        return len(self._subsets)

    def extend(self, rows: Iterable[EncodedResponses]) -> None:
        for row in rows:
            for ids in row.group:
                self._tokens.append(ids)
            self._starts.append(len(self._tokens))
            self._prefixes.append(row.prefix_length)
            self._numbers.append(row.row)
            self._margins.append(row.margin)
            self._preferences.append(row.preference)
            self._subsets.append(row.subset)

    @overload
    def __getitem__(self, index: int) -> EncodedResponses: ...
    @overload
    def __getitem__(self, index: slice) -> list[EncodedResponses]: ...
    def __getitem__(self, index: int | slice) -> EncodedResponses | list[EncodedResponses]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return EncodedResponses(
            [self._tokens[response] for response in range(self._starts[at], self._starts[at + 1])],
            self._prefixes[at],
            self._margins[at],
            self._preferences[at],
            self._subsets[at],
            self._numbers[at],
        )
