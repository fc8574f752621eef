"""Peak memory of a stretch of work: of the accelerator, or resident memory of this process on a CPU."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from types import TracebackType

import psutil
import torch

INTERVAL = 0.002


class PeakMemory:
    """`with PeakMemory() as peak: ...`, then `peak.extra_mb`: most that was held above the start, in MB (1e6 bytes)."""

    extra_mb: float = 0.0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return self
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier variant freed would hide what this one needs
        self._process = psutil.Process()
        self._start = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._on_gpu:
            peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._thread.join()
            peak = self._peak
        self.extra_mb = (peak - self._start) / 1e6

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, self._process.memory_info().rss)
            if self._done.wait(INTERVAL):
                return
