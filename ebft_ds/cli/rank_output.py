"""Output of the ranks that do not own the terminal: kept in the run's logs folder, and shown when the rank fails."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import IO

KEPT_LINES = 60


class RankOutput:
    """Reads one rank's output in a thread. Until the log folder exists (the ranks make it once they accepted it) lines only wait."""

    def __init__(self, rank: int, stream: IO[str], log_folder: Path | None) -> None:
        self._path = log_folder / f"rank_{rank}.out" if log_folder is not None else None
        self._stream = stream
        self._waiting: list[str] = []
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name=f"output of rank {rank}", daemon=True)
        self._thread.start()

    def tail(self, timeout: float = 2.0) -> list[str]:
        """The last lines, read to the end of the stream if it ends within `timeout` seconds."""
        self._thread.join(timeout)
        return list(self._tail)

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                self._tail.append(line.rstrip("\n"))
                self._waiting.append(line)
                self._write()
        self._write()

    def _write(self) -> None:
        if self._path is None or not self._path.parent.is_dir():
            del self._waiting[:-KEPT_LINES]
            return
        try:
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as log:
                log.writelines(self._waiting)
        except OSError:
            self._path = None  # a full disk must not stop the reading: a rank blocks on a full pipe
        self._waiting.clear()
