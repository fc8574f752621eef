"""Tensors from safetensors files in a folder that trainer and server both see."""

from __future__ import annotations

import hashlib
import json
import queue
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec
from ebft_ds.rollout.tensors import DTYPES, dtype_name
from ebft_ds.sidecar.push_ops import Announce, BucketFile, DiskWay, FileManifest, Sealed
from ebft_ds.sidecar.receiver_checkpoint import DTYPE_NAMES
from ebft_ds.sidecar.receiver_intake import Intake

APPEAR_SECONDS = 5.0
"""A shared file system may show a finished file late, or an old size of it."""


class DiskIntake(Intake):
    """Reads each file when it is named, and ends with the list of all of them."""

    def __init__(self, announced: Announce, prepare: Callable[[], object]) -> None:
        super().__init__(announced, prepare)
        assert isinstance(announced.way, DiskWay)
        self._folder = Path(announced.way.folder)
        self._specs = {spec.name: spec for spec in announced.manifest.tensors}
        self._named: queue.Queue[BucketFile | Sealed | None] = queue.Queue()
        self._read: list[BucketFile] = []

    def file(self, op: BucketFile | Sealed) -> None:
        self._named.put(op)

    def cancel(self) -> None:
        super().cancel()
        self._named.put(None)

    def receive(self) -> None:
        while True:
            try:
                op = self._named.get(timeout=self.left)
            except queue.Empty:
                continue  # `left` says what is missing
            if isinstance(op, BucketFile):
                self._take(op)
            elif isinstance(op, Sealed):
                self._check_list(op)
                return

    def _take(self, op: BucketFile) -> None:
        content = self._bytes(op.file, op.num_bytes, op.sha256)
        for spec, tensor in tensors_of_file(op.file, content):
            announced = self._specs.get(spec.name)
            if announced != spec:
                raise WeightSyncError(f"{op.file}: {spec.name} is {spec.dtype} {spec.shape}, announced was {announced}")
            if spec.name in self.tensors:
                raise WeightSyncError(f"{op.file}: {spec.name} came twice")
            self.tensors[spec.name] = tensor
        self._read.append(op)

    def _check_list(self, op: Sealed) -> None:
        size = len(msgspec.json.encode(FileManifest(self.announced.manifest.version, self._read)))
        found = msgspec.json.decode(self._bytes(op.file, size, op.sha256).numpy().tobytes(), type=FileManifest)
        if found != FileManifest(self.announced.manifest.version, self._read):
            raise WeightSyncError(f"{op.file} lists other files than those that were named")

    def _bytes(self, name: str, size: int, sha256: str) -> Tensor:
        """The file's content, uint8 [size], with the checksum verified."""
        if Path(name).name != name:
            raise WeightSyncError(f"{name!r} is no plain file name")
        path = self._folder / name
        content = torch.empty(size, dtype=torch.uint8)
        until = time.monotonic() + min(APPEAR_SECONDS, self.left)
        while True:
            problem = _read_exactly(path, content.numpy().data)
            if problem is None and hashlib.sha256(content.numpy().data).hexdigest() == sha256:
                return content
            if time.monotonic() > until:
                raise WeightSyncError(f"{name}: {problem or 'its checksum is not the announced one: the file is damaged'}")
            self.cancelled.wait(0.1)
            _ = self.left


def _read_exactly(path: Path, target: memoryview) -> str | None:
    """Why the file does not have exactly the target's size; None if it was read."""
    try:
        with path.open("rb") as file:
            count = file.readinto(target)
            if count != len(target) or file.read(1):
                return f"it has not the announced {len(target)} bytes"
    except OSError as error:
        return f"it cannot be read: {error.strerror} (do trainer and server see the same folder?)"
    return None


def tensors_of_file(name: str, content: Tensor) -> list[tuple[TensorSpec, Tensor]]:
    """The tensors of a safetensors file, as views of its bytes (uint8 [size]).

    Raises:
        WeightSyncError: the content is not what the format promises.
    """
    try:
        (length,) = struct.unpack("<Q", content[:8].numpy().tobytes())
        header: dict[str, Any] = json.loads(content[8 : 8 + length].numpy().tobytes())
        found = []
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            dtype = DTYPES[DTYPE_NAMES[entry["dtype"]]]
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            data = content[begin:end]
            if begin % dtype.itemsize:
                data = data.clone()
            found.append((TensorSpec(key, dtype_name(dtype), list(entry["shape"])), data.view(dtype).reshape(entry["shape"])))
        return found
    except (ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
        raise WeightSyncError(f"{name} is no safetensors file: {error!r}") from error
