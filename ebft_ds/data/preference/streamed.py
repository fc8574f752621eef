"""Rows read one after the other, shuffled block by block, from a position that can be resumed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ebft_ds.data.file_rows import iterate_file
from ebft_ds.data.reading import READ_FAILURES, failures_are_data_errors
from ebft_ds.data.sources import (
    DataSource,
    RowTable,
    check_hub_name,
    choose_split,
    folder_files,
    is_json_array,
    is_saved_dataset,
    read_rows,
)
from ebft_ds.errors import DataError, EbftError


class RowStream(msgspec.Struct, frozen=True):
    """A source that can be read from its beginning again and again."""

    name: str
    open: Callable[[], Iterator[Any]]
    """The rows from the first one on, every time in the same order."""

    def rows(self, start: int = 0) -> Iterator[Any]:
        """The rows from number `start` on. Raises `DataError` where the source fails."""
        read = start
        try:
            for row in itertools.islice(self.open(), start, None):
                read += 1
                yield row
        except EbftError:
            raise
        except READ_FAILURES as error:
            raise DataError(f"{self.name}: reading behind row {read} failed: {error or type(error).__name__}") from error


class StreamedRows:
    """Training order over a stream: blocks of `buffer` consecutive rows, each shuffled by (seed, epoch, block). One block is in memory.
    An epoch's first block is shorter, by chance, so that rows do not meet the same ones in every epoch.

    A position is a number of rows: resuming passes over the rows before its block and draws the same order in that.
    """

    def __init__(self, stream: RowStream, *, seed: int, shuffle: bool, buffer: int) -> None:
        """Reads no row."""
        self._stream = stream
        self._seed, self._shuffle, self._buffer = seed, shuffle, buffer
        self._source: Iterator[Any] | None = None
        self._block: list[tuple[int, Any]] = []
        self._block_read: int | None = None
        """Start of the block in memory."""
        self._epoch = 0
        self._offset = 0
        """Rows of this epoch that were taken."""
        self.rows: int | None = None
        """Known after the first epoch."""
        self.duplicates = 0

    @property
    def epoch(self) -> float:
        """Whole epochs, and the part of the present one where the number of rows is known."""
        return self._epoch + (self._offset / self.rows if self.rows else 0.0)

    def where(self, number: int) -> str:
        return f"row {number + 1} of {self._stream.name} (index {number})"

    def take(self, count: int) -> list[tuple[int, Any]]:
        return [self._next() for _ in range(count)]

    def look(self, count: int) -> list[tuple[int, Any]]:
        """As `PreferenceReader.look`; nothing behind the present block."""
        within = self._load_block()
        return self._block[within : within + count]

    def _next(self) -> tuple[int, Any]:
        within = self._load_block()
        if within >= len(self._block):  # the epoch is over
            self.rows = self._offset
            self._epoch, self._offset = self._epoch + 1, 0
            self._forget_block()
            return self._next()
        self._offset += 1
        return self._block[within]

    def _load_block(self) -> int:
        """The position's place in its block, which is in memory then; behind its rows at the end of the source."""
        start = self._block_start()
        if start != self._block_read:
            self._read_block(start)
        if not self._block and self._offset == 0:
            raise DataError(f"{self._stream.name} has no rows.")
        return self._offset - start

    def _forget_block(self) -> None:
        self._source, self._block, self._block_read = None, [], None

    def _block_start(self) -> int:
        first = self._first_block()
        return 0 if self._offset < first else self._offset - (self._offset - first) % self._buffer

    def _first_block(self) -> int:
        if not self._shuffle:
            return self._buffer
        return 1 + random.Random(f"stream blocks, seed {self._seed}, epoch {self._epoch}").randrange(self._buffer)

    def _read_block(self, start: int) -> None:
        source, self._source = self._source or self._stream.rows(start), None  # a source that fails is not asked again
        rows = list(itertools.islice(source, self._buffer if start else self._first_block()))
        self._source = source
        self._block, self._block_read = list(enumerate(rows, start=start)), start
        if self._shuffle:
            random.Random(f"stream order, seed {self._seed}, epoch {self._epoch}, row {start}").shuffle(self._block)

    def identity(self) -> dict[str, Any]:
        """What must not change between saving and resuming; the rows themselves are not looked at."""
        return {"kind": "stream", "seed": self._seed, "shuffle": self._shuffle, "shuffle_buffer_size": self._buffer}

    def progress(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "offset": self._offset, "rows": self.rows}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch, self._offset, self.rows = int(state["epoch"]), int(state["offset"]), state["rows"]
        self._forget_block()


def open_stream(source: Any, *, split: str | None, config_name: str | None) -> RowStream:
    """A stream over anything that `read_rows` opens, or over an `IterableDataset`. Raises `DataError` for what is not there."""
    import datasets

    if isinstance(source, datasets.IterableDatasetDict):
        source = source[choose_split(list(source), split, "the dataset dictionary")]
    if isinstance(source, datasets.IterableDataset):
        return _dataset_stream(source, "the streamed dataset")
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        with failures_are_data_errors(lambda: str(path.absolute())):
            is_lines = path.is_file() and not is_json_array(path)
        if is_lines:
            return _file_stream([path], path.name)
        if path.is_dir() and not is_saved_dataset(path):
            return _file_stream(folder_files(path, split), str(path))
        if not path.exists():
            check_hub_name(str(source))
            return _hub_stream(str(source), split, config_name)
    return _table_stream(read_rows(source, split=split, config_name=config_name, lazy=True))


def _hub_stream(name: str, split: str | None, config_name: str | None) -> RowStream:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config_name, split=split, streaming=True)
    except (*READ_FAILURES, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"Dataset {name!r}: there is no such file or folder ({Path(name).absolute()}), and the hub did not give it"
            f" (configuration {config_name or 'default'}, split {split or 'any'}): {error}"
        ) from error
    if isinstance(loaded, datasets.IterableDatasetDict):
        loaded = loaded[choose_split(list(loaded), split, name)]
    return _dataset_stream(loaded, name)


def _dataset_stream(dataset: Any, name: str) -> RowStream:
    # Its own skip() and set_epoch() are not used: together they change the order of its files.
    return RowStream(name, lambda: iter(dataset))


def _file_stream(paths: list[Path], name: str) -> RowStream:
    return RowStream(name, lambda: itertools.chain.from_iterable(map(iterate_file, paths)))


def _table_stream(table: RowTable) -> RowStream:
    return RowStream(table.name, lambda: map(table.row, range(len(table))))


def is_stream(source: DataSource | Any) -> bool:
    """Can the source be read only one row after the other?"""
    import datasets

    return isinstance(source, (datasets.IterableDataset, datasets.IterableDatasetDict))
