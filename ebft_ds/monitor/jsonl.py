"""JSON-lines files with one writer: appended line by line, trimmed on resume, never worth losing a run for."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebft_ds.errors import DataError

logger = logging.getLogger(__name__)

MAX_PENDING_LINES = 10_000


class LineSink:
    """Appends lines to a file. A failed write (full disk, lost mount) is reported once; the lines wait and are tried again.

    Lines reach the file whole and in order: a half-written one is overwritten by the retry. At most 10,000 lines wait, then
    the oldest is given up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._end = path.stat().st_size if path.exists() else 0
        self._last_length = 0
        self._pending: list[bytes] = []
        self._failing = False
        self._lost = 0

    def append(self, line: bytes) -> None:
        """Write one line (without its line break)."""
        self._pending.append(line + b"\n")
        if len(self._pending) > MAX_PENDING_LINES:
            self._pending.pop(0)
            self._lost += 1
        self._flush()

    def replace_last(self, line: bytes) -> None:
        """Write a line in place of the one appended last by this object."""
        if self._pending:
            self._pending[-1] = line + b"\n"
        else:
            self._end -= self._last_length
            self._last_length = 0
            self._pending = [line + b"\n"]
        self._flush()

    def adopt_last(self, length: int) -> None:
        """Treat the file's last `length` bytes as the line appended last."""
        self._last_length = length

    def close(self) -> None:
        self._flush()
        self._drop_descriptor()
        if self._pending or self._lost:
            logger.warning("%s: %d lines could not be written", self._path, len(self._pending) + self._lost)

    def _flush(self) -> None:
        if not self._pending:
            return
        data = b"".join(self._pending)
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            _write_at(self._descriptor, data, self._end)
            os.ftruncate(self._descriptor, self._end + len(data))
        except OSError as error:
            self._drop_descriptor()  # a stale NFS handle would fail for ever
            if not self._failing:
                logger.warning("%s cannot be written (%s); the run goes on, its lines are kept and tried again", self._path, error.strerror)
            self._failing = True
            return
        self._end += len(data)
        self._last_length = len(self._pending[-1])
        if self._failing:
            logger.warning("%s can be written again; %d waiting lines were written, %d lost", self._path, len(self._pending), self._lost)
        self._failing = False
        self._pending.clear()

    def _drop_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # NFS may report the failed write here again
                logger.debug("closing %s: %s", self._path, error)


def trim_after(path: Path, step: int, *, unique: bool) -> int:
    """Move the lines of `path` with a step above `step`, broken lines and out-of-order ones to `<stem>.replaced.jsonl`; return their count.

    `unique`: a step may appear only once (the later line of two moves out). The file is rewritten atomically, and only if
    something moves.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    moved: list[bytes] = []
    last = -1
    for line in path.read_bytes().split(b"\n"):
        if not line:
            continue
        number = _step_of(line)
        if number is None or number > step or number < last or (unique and number == last):
            moved.append(line)
        else:
            last = number
            kept.append(line)
    if not moved and not _ends_open(path):
        return 0
    if moved:
        with path.with_name(f"{path.stem}.replaced.jsonl").open("ab") as file:
            file.writelines(line + b"\n" for line in moved)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return len(moved)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of the file. A last line without its line break (a run is writing it) is left out.

    Raises DataError naming file and line for anything that is not a JSON object, and for a file that cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    objects = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {number} is not a JSON object; delete the line or restore the file")
        objects.append(value)
    return objects


def last_object(path: Path) -> tuple[dict[str, Any], int] | None:
    """The last line as an object, and its length in bytes with the line break; None for an empty or missing file."""
    if not path.exists():
        return None
    lines = path.read_bytes().split(b"\n")
    if len(lines) < 2:
        return None
    return json.loads(lines[-2]), len(lines[-2]) + 1


def encode(values: Mapping[str, Any]) -> bytes:
    """One strictly valid JSON object: NaN and infinity become null, other text than UTF-8 can hold is escaped."""
    return json.dumps({key: finite_or_none(value) for key, value in values.items()}, allow_nan=False).encode()


def plain(value: Any) -> Any:
    """The Python number in a NumPy or torch scalar; anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def finite_or_none(value: Any) -> Any:
    """None for NaN and infinity; anything else as a plain value."""
    value = plain(value)
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None
    return value


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _step_of(line: bytes) -> int | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _ends_open(path: Path) -> bool:
    content = path.read_bytes()
    return bool(content) and not content.endswith(b"\n")
