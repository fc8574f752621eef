"""Pushes by files, for servers that share nothing with the trainer but a file system.

`<sync_dir>/<run token>/v<version>/` holds one safetensors file a bucket and a list of them, with checksums. Each file appears whole or not
at all, and the folder is removed when its push has ended, well or not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.rollout.tensors import to_bytes
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.push_ops import BucketFile, DiskWay, FileManifest, Sealed
from ebft_ds.sidecar.versions import VersionNames
from ebft_ds.sync.transport import Bucket
from ebft_ds.sync.transports.deadline import Deadline, in_thread
from ebft_ds.sync.transports.push_round import PushRound, SenderError, new_push_id
from ebft_ds.sync.transports.run_folder import RunFolder
from ebft_ds.sync.transports.servers import ServerTransport

FORMAT_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Of safetensors."""


class DiskTransport(ServerTransport):
    """`sync_dir`: a folder that trainer and servers see under the same path. `shared`: servers of other users read it too."""

    def __init__(
        self, addresses: Sequence[ServerAddress], names: VersionNames, control: ControlLoop, *, sync_dir: Path, shared: bool = False
    ) -> None:
        super().__init__(addresses, names, control)
        self._folder = RunFolder(sync_dir, names.run_token, shared=shared)

    def move(
        self, manifest: WeightManifest, buckets: Iterable[Bucket], servers: list[ServerAddress], deadline: Deadline
    ) -> dict[str, float]:
        name = self.names.name(manifest.version)
        push_id = new_push_id(name)
        with self._folder.version(manifest.version, manifest.num_bytes) as folder:
            way = _DiskPush(push_id, manifest.version, folder, self.control)
            return PushRound(self.control, way, manifest, push_id, name, servers, deadline).run(buckets)

    def close(self) -> None:
        self._folder.close()


class _DiskPush:
    """The Way of one push."""

    def __init__(self, push_id: str, version: int, folder: Path, control: ControlLoop) -> None:
        self._push_id = push_id
        self._version = version
        self._folder = folder
        self._control = control
        self._files: list[BucketFile] = []

    def open(self, server: ServerAddress, num_workers: int, deadline: Deadline) -> DiskWay:
        return DiskWay(str(self._folder.resolve()))

    def connect(self, server: ServerAddress, deadline: Deadline) -> Future[None]:
        return in_thread(lambda: None, "disk-connect")

    def send(self, bucket: Bucket, servers: Iterable[ServerAddress], deadline: Deadline) -> dict[ServerAddress, Future[None]]:
        written = in_thread(lambda: self._write(bucket), "disk-write")
        return {server: self._tell(server, written, deadline) for server in servers}

    def seal(self, servers: Iterable[ServerAddress], deadline: Deadline) -> dict[ServerAddress, Future[None]]:
        written = in_thread(self._write_list, "disk-write")
        return {server: self._tell(server, written, deadline) for server in servers}

    def close(self) -> None:
        """The folder belongs to whoever made it."""

    def _tell(self, server: ServerAddress, written: Future[BucketFile] | Future[Sealed], deadline: Deadline) -> Future[None]:
        def tell() -> None:
            op = written.result()
            for reply in self._control.run(self._control.api(server).push_op(op, deadline.share)):
                if reply.error is not None:
                    raise WeightSyncError(reply.error)

        return in_thread(tell, "disk-tell")

    def _write(self, bucket: Bucket) -> BucketFile:
        name = f"bucket-{len(self._files):05d}.safetensors"
        size, digest = write_durably(self._folder / name, safetensors_chunks(bucket))
        self._files.append(BucketFile(self._push_id, name, size, digest))
        return self._files[-1]

    def _write_list(self) -> Sealed:
        name = "files.json"
        _, digest = write_durably(self._folder / name, [msgspec.json.encode(FileManifest(self._version, self._files))])
        return Sealed(self._push_id, name, digest)


def safetensors_chunks(bucket: Bucket) -> Iterable[bytes | memoryview]:
    """The bytes of a safetensors file, without a copy of the tensors."""
    specs, payload = to_bytes(bucket)
    header = {}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": FORMAT_NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    yield from payload


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """(size, sha256) of the file, which appears under its name when it is whole. Errors: SenderError."""
    staging = path.with_name(f".{path.name}.tmp")
    digest = hashlib.sha256()
    size = 0
    try:
        with staging.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        staging.rename(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise SenderError(f"weights cannot be written to {path}: {error}; free some room, or set sync_dir to another folder") from error
    return size, digest.hexdigest()
