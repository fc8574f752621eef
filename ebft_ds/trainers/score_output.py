"""The file of scores: one line for each input line, in order, and what must be the same for a stopped run to go on."""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ebft_ds.checkpoint.durable import CHUNK_BYTES, crc32_of, write_text_atomically
from ebft_ds.errors import ConfigError, DataError


class ScoredBy(msgspec.Struct, frozen=True):
    """What the scores of a file follow from: they are refused a mixture of two."""

    input: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]

    def differences(self, other: ScoredBy) -> list[str]:
        """Names of the parts that are not the same."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def input_identity(path: Path) -> tuple[dict[str, Any], int]:
    """({size, checksum}, lines) of the input. Errors: DataError if it cannot be read."""
    size, checksum, breaks, last = 0, 0, 0, b"\n"
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                size, checksum, breaks, last = size + len(chunk), zlib.crc32(chunk, checksum), breaks + chunk.count(b"\n"), chunk[-1:]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return {"bytes": size, "crc32": f"{checksum:08x}"}, breaks + (last != b"\n")


def model_identity(model: str, revision: str | None) -> dict[str, Any]:
    """Checksums of a folder's files; name and revision of a hub model."""
    folder = Path(model)
    if not folder.is_dir():
        return {"name": model, "revision": revision}
    return {path.name: list(crc32_of(path)) for path in sorted(folder.iterdir()) if path.is_file()}


class ScoreOutput:
    """Appends lines to the file; `done` is the number of the last input line that it already holds (0: none)."""

    def __init__(self, path: Path, scored_by: ScoredBy, *, overwrite: bool) -> None:
        """Opens the file, or goes on with it: a broken end is cut off.

        Raises:
            ConfigError: it holds scores of another input, model or settings, or is none of ours, and not `overwrite`; another process
                is writing it.
        """
        self._path = path
        self._record = path.with_name(f"{path.name}.meta.json")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self.done = self._go_on(scored_by, overwrite)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output {self._path}: another process is writing this file") from None

    def _go_on(self, scored_by: ScoredBy, overwrite: bool) -> int:
        if os.fstat(self._descriptor).st_size and not overwrite:
            self._require_same(scored_by)
            done, end = sound_end(self._path)
        else:
            done, end = 0, 0
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        write_text_atomically(self._record, json.dumps(msgspec.to_builtins(scored_by), indent=2) + "\n")
        return done

    def _require_same(self, scored_by: ScoredBy) -> None:
        how = "name another file, or add --overwrite to begin again"
        try:
            before = msgspec.json.decode(self._record.read_bytes(), type=ScoredBy)
        except FileNotFoundError:
            raise ConfigError(
                f"--output {self._path} exists and is not the output of this command ({self._record.name} is missing); {how}"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self._record} cannot be read ({error}); {how}") from error
        if changed := before.differences(scored_by):
            raise ConfigError(f"--output {self._path} was made with another {' and '.join(changed)}; {how}")

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines, whole, to the end. Errors: ConfigError if the disk does not take them."""
        data = memoryview(b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise ConfigError(
                f"--output {self._path} cannot be written: {error.strerror}; make room and start the same command again"
            ) from error

    def close(self) -> None:
        """Everything that was appended is on the disk when this returns."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def sound_end(path: Path) -> tuple[int, int]:
    """(input line of the last whole line, bytes up to its end): lines after a broken one are given up."""
    last, end = 0, 0
    with path.open("rb") as file:
        for line in file:
            number = _line_number(line)
            if number is None or number <= last:
                break
            last, end = number, end + len(line)
    return last, end


def _line_number(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    number = value.get("line") if isinstance(value, dict) else None
    return number if isinstance(number, int) else None
