"""Many token lists in one flat array: 4 bytes a token, where lists of Python integers take 36."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenTable:
    """Append-only table of token lists."""

    def __init__(self) -> None:
        self._flat = array("i")
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, token_ids: Sequence[int]) -> None:
        self._flat.extend(token_ids)
        self._offsets.append(len(self._flat))

    def __getitem__(self, index: int) -> list[int]:
        return self._slice(index).tolist()

    def length(self, index: int) -> int:
        return self._offsets[index + 1] - self._offsets[index]

    def content(self, index: int) -> bytes:
        """The ids as bytes, for checksums."""
        return self._slice(index).tobytes()

    def largest(self) -> int:
        """Largest id in the table; -1 if it holds none."""
        return max(self._flat, default=-1)

    def _slice(self, index: int) -> array[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table with {len(self)} rows")
        return self._flat[self._offsets[index] : self._offsets[index + 1]]
