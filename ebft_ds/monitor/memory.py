"""Most memory used in a step: the accelerator's if there is one, else this process's resident memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

_BYTES_PER_GB = 1e9


class PeakMemory:
    """Peak since the last `take_gb`.

    `take_device_peak` returns the accelerator's peak in bytes since its last call (`take_cuda_peak`). Without it the peak is this
    process's: on Linux the kernel's high-water mark, elsewhere the highest of the `sample` calls.
    """

    def __init__(self, take_device_peak: Callable[[], int] | None = None) -> None:
        self._take_device_peak = take_device_peak
        self._process = psutil.Process()
        self._sampled = 0
        self._has_mark = _reset_kernel_mark()

    def sample(self) -> None:
        """Look at the resident memory now (only needed where the kernel keeps no mark)."""
        self._sampled = max(self._sampled, self._process.memory_info().rss)

    def take_gb(self) -> float:
        """GB (1e9 bytes), and start over."""
        if self._take_device_peak is not None:
            return self._take_device_peak() / _BYTES_PER_GB
        self.sample()
        peak = max(self._sampled, _kernel_mark_bytes() if self._has_mark else 0)
        self._sampled = 0
        self._has_mark = _reset_kernel_mark()
        return peak / _BYTES_PER_GB


def take_cuda_peak() -> int:
    """Most bytes that torch's allocator held on the current CUDA device since the last call."""
    import torch

    peak = int(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return peak


def _reset_kernel_mark() -> bool:
    """Set VmHWM to the present resident size; False where the kernel has no such mark."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kernel_mark_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
