"""Rows of JSON-lines and Parquet files, by number or one after the other, without parsing what is not asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np

CHUNK = 1 << 24
BLANK = 16
"""Lines up to this many bytes are looked at to see whether they are blank."""


class UnreadableRow(msgspec.Struct, frozen=True):
    """Stands for a line that is no JSON object; `reason` says why."""

    reason: str


def parse_json_line(line: str | bytes, number: int) -> Any:
    """The JSON value on line `number` (from 1), or `UnreadableRow`."""
    try:
        return json.loads(line if isinstance(line, str) else line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except json.JSONDecodeError as error:
        return UnreadableRow(f"line {number} is not valid JSON (column {error.colno}: {error.msg})")
    except UnicodeDecodeError as error:
        return UnreadableRow(f"line {number} is not UTF-8 text ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, lists nested thousands deep
        return UnreadableRow(f"line {number} cannot be read: {error}")


class NumberedFileRows(Sequence[Any]):
    """Rows by number, for subclasses that say how many there are and read one."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _read(self, index: int) -> Any:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._read(i) for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._read(index)


class JsonLines(NumberedFileRows):
    """Rows of a JSON-lines file. The file is searched for line ends once; a line is parsed when it is asked for.

    Raises OSError for an unreadable file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        bounds = _line_bounds(path)
        lengths = np.diff(bounds)
        filled = lengths > BLANK
        with path.open("rb") as file:
            for line in np.flatnonzero(~filled).tolist():
                file.seek(int(bounds[line]))
                filled[line] = bool(file.read(int(lengths[line])).strip())
        at = np.flatnonzero(filled)
        self._starts, self._lengths = bounds[:-1][at], lengths[at]
        self.lines: Sequence[int] = range(1, len(at) + 1) if filled.all() else (at + 1).tolist()
        """Line of each row, from 1."""

    def __len__(self) -> int:
        return len(self._starts)

    def _read(self, index: int) -> Any:
        with self._path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return parse_json_line(file.read(int(self._lengths[index])), self.lines[index])


def _line_bounds(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Byte offsets where lines begin, and at last where the file ends."""
    bounds, read = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            bounds.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (read + 1))
            read += len(chunk)
    joined = np.concatenate(bounds)
    return joined if joined[-1] == read else np.append(joined, read)


def iterate_file(path: Path) -> Iterator[Any]:
    """Rows of a JSON-lines or Parquet file from its beginning; nothing is read ahead but the next batch of a Parquet file."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_json_line(line, number)
