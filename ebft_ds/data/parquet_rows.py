"""Rows of Parquet files by number, row group by row group."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ebft_ds.data.file_rows import NumberedFileRows

CACHED_BYTES = 1 << 29
"""Of row groups in memory, over the files of a source."""


class RowGroupCache:
    """The row groups that were used last, as many as fit into `most_bytes`, but always the last one."""

    def __init__(self, most_bytes: int = CACHED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._groups: OrderedDict[tuple[Path, int], Any] = OrderedDict()

    def get(self, key: tuple[Path, int]) -> Any:
        """The table of a group; None if it is not here."""
        if key in self._groups:
            self._groups.move_to_end(key)
        return self._groups.get(key)

    def put(self, key: tuple[Path, int], table: Any) -> None:
        self._groups[key] = table
        self._bytes += table.nbytes
        while self._bytes > self._most_bytes and len(self._groups) > 1:
            self._bytes -= self._groups.popitem(last=False)[1].nbytes


class ParquetRows(NumberedFileRows):
    """The footer gives the number of rows; a row group is read and decoded when one of its rows is asked for.

    Raises OSError or ValueError for an unreadable file, also later, for an unreadable group.
    """

    def __init__(self, path: Path, groups: RowGroupCache | None = None) -> None:
        """`groups` may be shared with other files."""
        import pyarrow.parquet

        self._path = path
        self._groups = groups or RowGroupCache()
        footer = pyarrow.parquet.read_metadata(path)
        self._starts = np.cumsum([0, *(footer.row_group(i).num_rows for i in range(footer.num_row_groups))])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _file(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self._path)

    def _read(self, index: int) -> Any:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        table = self._groups.get((self._path, group))
        if table is None:
            table = self._file.read_row_group(group)
            self._groups.put((self._path, group), table)
        return table.slice(index - int(self._starts[group]), 1).to_pylist()[0]
