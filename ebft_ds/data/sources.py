"""Where rows come from: JSONL, JSON and Parquet files, folders of them, saved datasets, the hub, objects in memory.

Everything becomes one `RowTable`: random access to rows by number, and a phrase saying where a row is, for error messages.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ebft_ds.data.file_rows import JsonLines, parse_json_line
from ebft_ds.data.parquet_rows import ParquetRows, RowGroupCache
from ebft_ds.data.reading import READ_FAILURES, failures_are_data_errors
from ebft_ds.errors import DataError

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

DataSource: TypeAlias = "str | Path | list[Any] | tuple[Any, ...] | datasets.Dataset | datasets.DatasetDict"
"""What a user may hand over as a dataset; lists hold one dict a row."""

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
EVAL_SPLITS = ("validation", "valid", "val", "eval", "evaluation", "test", "dev")
KNOWN_SPLITS = ("train", "training", *EVAL_SPLITS)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class TablePart(msgspec.Struct, frozen=True):
    """The rows of one file or dataset."""

    name: str
    rows: Sequence[Any]
    """Mappings, or `UnreadableRow` (file_rows.py)."""
    lines: Sequence[int] | None = None
    """Line of each row, from 1; None where lines mean nothing."""


class RowTable:
    """Rows of one source. Row numbers count from 0 over all parts and do not depend on any setting but the source itself."""

    def __init__(self, name: str, parts: list[TablePart]) -> None:
        self.name = name
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part.rows))

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate(self, number: int) -> tuple[TablePart, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {self.name}, which has {len(self)} rows")
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            if number < stop:
                return part, number - start
        raise AssertionError("unreachable: starts cover all rows")

    def row(self, number: int) -> Any:
        """The row as it stands in the source: any JSON value, or `UnreadableRow`. Raises `DataError` if the source cannot be read."""
        part, offset = self._locate(number)
        with failures_are_data_errors(lambda: self.where(number)):
            return part.rows[offset]

    def where(self, number: int) -> str:
        """`row 17 of prompts.jsonl`, counting from 1 as editors do; with the line or the index where that differs."""
        part, offset = self._locate(number)
        if part.lines is None:
            return f"row {offset + 1} of {part.name} (index {offset})"
        line = part.lines[offset]
        return f"row {offset + 1} of {part.name}" + ("" if line == offset + 1 else f" (line {line})")


def read_rows(
    source: DataSource,
    *,
    split: str | None = "train",
    config_name: str | None = None,
    num_proc: int | None = None,
    lazy: bool = False,
) -> RowTable:
    """Open `source`.

    `split` names a split of a dataset with several, or a file group of a folder; None takes the only one or the first of
    `EVAL_SPLITS` that exists. A single file, list or `Dataset` has no splits and ignores it. `lazy`: rows of JSON-lines and Parquet
    files are parsed when they are asked for, so that text that is not UTF-8 is found only then (`UnreadableRow`).
    Raises `DataError` for a missing path, an unreachable hub dataset, an unknown split, an unreadable file or zero rows.
    """
    is_name = isinstance(source, (str, Path))
    table = _read_named(str(source), split, config_name, num_proc, lazy) if is_name else _read_object(source, split)
    if len(table) == 0:
        raise DataError(f"{table.name} has no rows.")
    return table


def _read_named(text: str, split: str | None, config_name: str | None, num_proc: int | None, lazy: bool) -> RowTable:
    path = Path(text).expanduser()
    if path.is_file():
        return RowTable(path.name, [read_file(path, path.name, lazy=lazy)])
    if path.is_dir():
        return _read_folder(path, split, lazy)
    check_hub_name(text)
    return _read_hub(text, split, config_name, num_proc)


def check_hub_name(text: str) -> None:
    """Raises `DataError` for a name that is neither a file, nor a folder, nor of the form `owner/name`."""
    if text.lower().endswith(FILE_SUFFIXES) or not _HUB_NAME.fullmatch(text):
        raise DataError(
            f"No dataset at {Path(text).expanduser().absolute()}: neither a file nor a folder."
            " Correct the path, or give a hub name (owner/name)."
        )


def read_file(path: Path, name: str, *, lazy: bool = False, groups: RowGroupCache | None = None) -> TablePart:
    """Rows of one JSONL, JSON or Parquet file; `name` is what messages call it, `lazy` as in `read_rows`, `groups` as in `ParquetRows`."""
    suffix = path.suffix.lower()
    if suffix not in FILE_SUFFIXES:
        raise DataError(f"{path.absolute()}: files ending in {suffix or 'nothing'} are not read; use {', '.join(FILE_SUFFIXES)}.")
    try:
        if lazy and suffix == ".parquet":
            return TablePart(name, ParquetRows(path, groups))
        if lazy and not is_json_array(path):
            rows = JsonLines(path)
            return TablePart(name, rows, rows.lines)
        if suffix == ".parquet":
            import pyarrow.parquet

            return TablePart(name, pyarrow.parquet.read_table(path).to_pylist())
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path.absolute()} is not UTF-8 text: {error}. Convert it.") from error
    except READ_FAILURES as error:
        raise DataError(f"{path.absolute()} cannot be read: {error}") from error
    if suffix == ".json" and text.lstrip().startswith("["):
        return _parse_json_array(text, path, name)
    return _parse_json_lines(text, name)


def is_json_array(path: Path) -> bool:
    """Does a .json file hold one array rather than a row a line? Raises OSError."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _parse_json_array(text: str, path: Path, name: str) -> TablePart:
    try:
        return TablePart(name, json.loads(text))
    except json.JSONDecodeError as error:
        raise DataError(f"{path.absolute()} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}.") from error


def _parse_json_lines(text: str, name: str) -> TablePart:
    rows: list[Any] = []
    lines: list[int] = []
    # split("\n"), not splitlines(): JSON strings may hold U+2028 and other characters that splitlines() breaks at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        rows.append(parse_json_line(line, number))
        lines.append(number)
    return TablePart(name, rows, lines)


def _read_folder(path: Path, split: str | None, lazy: bool) -> RowTable:
    if is_saved_dataset(path):
        import datasets

        try:
            return _read_object(datasets.load_from_disk(str(path)), split, name=str(path))
        except READ_FAILURES as error:
            raise DataError(f"{path.absolute()} is a saved dataset that cannot be read: {error}") from error
    groups = RowGroupCache()
    files = folder_files(path, split)
    return RowTable(str(path), [read_file(file, str(file.relative_to(path)), lazy=lazy, groups=groups) for file in files])


def is_saved_dataset(path: Path) -> bool:
    """Was the folder written with save_to_disk?"""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def folder_files(path: Path, split: str | None) -> list[Path]:
    """The data files of a folder that belong to `split`, in order. Raises `DataError` if there are none."""
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in FILE_SUFFIXES and p.is_file() and not _hidden(p, path))
    # Beside data files, .json is metadata (dataset_infos.json, ...).
    files = [file for file in files if file.suffix.lower() != ".json"] or files
    if not files:
        raise DataError(f"{path.absolute()} holds no {', '.join(FILE_SUFFIXES)} file and no dataset written with save_to_disk.")
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    if set(by_split) == {None}:
        return files
    return by_split[choose_split([s for s in by_split if s is not None], split, str(path.absolute()))]


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _split_of(relative: Path) -> str | None:
    """`train-00000-of-00002.parquet`, `train.jsonl` and `train/0.parquet` belong to split `train`."""
    for part in reversed(relative.parts):
        head = re.split(r"[-_.]", part, maxsplit=1)[0].lower()
        if head in KNOWN_SPLITS:
            return head
    return None


def choose_split(available: Sequence[str], wanted: str | None, name: str) -> str:
    """The split to use; None: the only one, or the first of `EVAL_SPLITS`. Raises `DataError` that lists what there is."""
    if wanted is not None:
        if wanted in available:
            return wanted
        raise DataError(f"{name} has no split {wanted!r}; it has {', '.join(sorted(available))}. Set train_split or eval_split.")
    candidates = [s for s in EVAL_SPLITS if s in available] or list(available)
    if len(available) > 1 and candidates[0] not in EVAL_SPLITS:
        raise DataError(f"{name} has the splits {', '.join(sorted(available))}: say which one with eval_split.")
    return candidates[0]


def _read_hub(name: str, split: str | None, config_name: str | None, num_proc: int | None) -> RowTable:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config_name, split=split, num_proc=num_proc)
    except (*READ_FAILURES, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"Dataset {name!r}: there is no such file or folder ({Path(name).absolute()}), and the hub did not give it"
            f" (configuration {config_name or 'default'}, split {split or 'any'}): {error}"
            " Offline, download it first or give a local path."
        ) from error
    return _read_object(loaded, split, name=name)


def _read_object(source: Any, split: str | None, *, name: str | None = None) -> RowTable:
    if isinstance(source, (list, tuple)):
        title = name or "the list of rows"
        return RowTable(title, [TablePart(title, source)])
    import datasets

    if isinstance(source, datasets.DatasetDict):
        title = name or "the dataset dictionary"
        chosen = choose_split(list(source), split, title)
        logger.info("%s: using split %s (%d rows)", title, chosen, len(source[chosen]))
        return RowTable(title, [TablePart(f"{title}[{chosen}]", source[chosen])])
    if isinstance(source, datasets.Dataset):
        title = name or "the dataset"
        return RowTable(title, [TablePart(title, source)])
    raise DataError(
        f"A dataset of type {type(source).__name__} cannot be used: give a path, a hub name, a datasets.Dataset or a list of dicts"
        " (streamed datasets have no random access, which a resumable prompt order needs)."
    )
