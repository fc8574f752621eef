"""The receiving side of one push, in a thread of its own: generation goes on meanwhile."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec
from ebft_ds.rollout.tensors import DTYPES
from ebft_ds.sidecar.manifest_check import some
from ebft_ds.sidecar.push_ops import Announce, BucketFile, Sealed, State


class Intake(ABC):
    """Collects announced tensors in host memory. `prepare` runs first, in the same thread; `prepared` is its result."""

    def __init__(self, announced: Announce, prepare: Callable[[], object]) -> None:
        self.announced = announced
        self.deadline = time.monotonic() + announced.seconds
        self.tensors: dict[str, Tensor] = {}
        self.error: str | None = None
        self.cancelled = threading.Event()
        self.prepared: object = None
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run, name="ebft_ds-weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> State:
        if self._thread.is_alive():
            return "receiving"
        return "received" if self.error is None else "failed"

    @property
    def left(self) -> float:
        """Seconds that the push still has; WeightSyncError when none."""
        seconds = self.deadline - time.monotonic()
        if self.cancelled.is_set():
            raise WeightSyncError("the push was given up")
        if seconds <= 0:
            raise WeightSyncError(f"not all tensors came within {self.announced.seconds:g} s: {self.missing()}")
        return seconds

    def join(self) -> None:
        """Wait for the end of the push's time at most. Errors: WeightSyncError if not every tensor has come."""
        self._thread.join(max(0.0, self.deadline - time.monotonic()))
        if self._thread.is_alive():
            raise WeightSyncError(f"not all tensors came within {self.announced.seconds:g} s: {self.missing()}")
        if self.error is not None:
            raise WeightSyncError(self.error)

    def cancel(self) -> None:
        """Let it end by itself as soon as it can; nothing waits for it."""
        self.cancelled.set()

    def file(self, op: BucketFile | Sealed) -> None:
        """A file is there; only for pushes by files."""
        raise WeightSyncError(f"push {self.announced.push_id} does not come in files")

    def missing(self) -> str:
        names = [spec.name for spec in self.announced.manifest.tensors if spec.name not in self.tensors]
        return f"{some(names)} missing" if names else "nothing is missing"

    def buffer(self, spec: TensorSpec) -> Tensor:
        """A new host tensor for an announced one."""
        if spec.name in self.tensors:
            raise WeightSyncError(f"{spec.name} came twice")
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])

    @abstractmethod
    def receive(self) -> None:
        """Fill `tensors`; raise WeightSyncError, OSError, RuntimeError or ValueError if that cannot be."""

    def release(self) -> None:  # noqa: B027  most have nothing
        """Let go of connections and buffers; called at the end in any case."""

    def _run(self) -> None:
        try:
            self.prepared = self._prepare()
            self.receive()
            if len(self.tensors) != len(self.announced.manifest.tensors):
                raise WeightSyncError(self.missing())
        except Exception as error:  # noqa: BLE001  the thread's end: whoever asks for the state is told
            self.error = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
            self.tensors.clear()
        finally:
            self.release()
