"""File operations that survive a power cut and a shared file system: fsync, atomic text files, retry on stale NFS handles."""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CHUNK_BYTES = 4 * 1024 * 1024
STALE_ATTEMPTS = 5
STALE_WAIT_SECONDS = 0.2


def retry_stale(operation: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep) -> T:
    """Run `operation` again, up to five times, when it fails with ESTALE: an NFS client held a handle that another node replaced.

    `operation` must reopen what it reads. Any other error, and the last ESTALE, pass through.
    """
    for attempt in range(1, STALE_ATTEMPTS):
        try:
            return operation()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            sleep(STALE_WAIT_SECONDS * attempt)
    return operation()


def fsync_path(path: Path) -> None:
    """Flush a file's or a folder's content (for a folder: its entries) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either the old content or all of the new one, and is on the disk on return."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def crc32_of(path: Path) -> tuple[int, str]:
    """Size in bytes and CRC-32 as 8 hex digits, read in chunks (about 1 GB/s a thread; zlib releases the GIL)."""

    def read() -> tuple[int, str]:
        size, crc = 0, 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                crc = zlib.crc32(chunk, crc)
        return size, f"{crc:08x}"

    return retry_stale(read)
