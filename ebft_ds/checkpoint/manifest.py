"""The checkpoint file protocol: a folder counts only when its manifest was written last and its files still match it.

`begin` -> every rank writes its files -> every rank seals its own (`seal_files`) -> barrier -> rank 0 calls `commit`.
Cost of a checksum: one more read of every byte, mostly from the page cache. Sealing spreads it over the ranks, so that a
terabyte on 64 ranks costs each one 16 GB of reading; files that nobody sealed are read by rank 0 in a few threads.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ebft_ds.checkpoint.durable import crc32_of, fsync_path, retry_stale, write_text_atomically
from ebft_ds.checkpoint.layout import DELETING, INCOMPLETE, LATEST, MANIFEST, REPLACED, step_name, step_of
from ebft_ds.checkpoint.space import writing
from ebft_ds.errors import CheckpointError

FORMAT = "ebft_ds-checkpoint"
FORMAT_VERSION = 1
READ_THREADS = 4


class FileRecord(msgspec.Struct, frozen=True):
    """What the manifest knows about one file."""

    size: int
    """Bytes."""
    crc32: str
    """8 hex digits."""


class Manifest(msgspec.Struct, frozen=True):
    """Content of manifest.json."""

    format: str
    format_version: int
    step: int
    world_size: int
    created: str
    """UTC, ISO 8601."""
    meta: dict[str, Any]
    """What the caller needs to resume; plain JSON."""
    files: dict[str, FileRecord]
    """Every other file of the folder, by its path relative to it, with forward slashes."""
    crc32: str = ""
    """Of this manifest, taken with the field empty."""

    @property
    def total_bytes(self) -> int:
        return sum(record.size for record in self.files.values())


def begin(root: Path, step: int) -> Path:
    """Create the empty folder `root/step_N.incomplete` and return it. One rank calls this, before the others write.

    An older incomplete folder of the same step is removed. Raises CheckpointError if the folder cannot be made.
    """
    folder = root / (step_name(step) + INCOMPLETE)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot create {folder}: {error.strerror}; check that the disk is writable and not full") from error
    return folder


def file_names(folder: Path) -> list[str]:
    """Files of a checkpoint folder but its manifest, sorted, relative, with forward slashes."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in (MANIFEST, f".{MANIFEST}.tmp"))


def seal_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Flush these files to the disk and take their sizes and checksums. A rank calls it for the files that it wrote."""
    names = list(names)
    with writing(folder), ThreadPoolExecutor(READ_THREADS) as pool:
        return dict(zip(names, pool.map(partial(_seal, folder), names), strict=True))


def commit(
    incomplete: Path,
    *,
    step: int,
    world_size: int,
    meta: Mapping[str, Any],
    records: Mapping[str, FileRecord] | None = None,
) -> Path:
    """Turn a fully written `step_N.incomplete` into `step_N` and return the new path. One rank calls this, after a barrier.

    `records`: what the ranks' `seal_files` returned, merged; files not in it are sealed here, files in it must be visible
    with their size. `meta` must be plain JSON (no NaN). An existing `step_N` is replaced; a crash at any point leaves a good
    checkpoint of the step or the earlier steps' checkpoints. Raises CheckpointError on missing files and on a full disk.
    """
    if incomplete.name != step_name(step) + INCOMPLETE:
        raise ValueError(f"{incomplete} is not the folder that begin(..., step={step}) made")
    plain_meta = json.loads(json.dumps(dict(meta), allow_nan=False))
    sealed = dict(records or {})
    present = file_names(incomplete)
    if absent := sorted(set(sealed) - set(present)):
        raise CheckpointError(
            f"{incomplete} lacks {len(absent)} files that a rank wrote ({absent[0]}, ...): is the folder shared by all nodes?"
        )
    if wrong := [name for name, record in sealed.items() if (incomplete / name).stat().st_size != record.size]:
        raise CheckpointError(f"{incomplete / wrong[0]} does not have the size that its rank wrote: is the folder shared by all nodes?")
    sealed |= seal_files(incomplete, [name for name in present if name not in sealed])
    manifest = Manifest(FORMAT, FORMAT_VERSION, step, world_size, datetime.now(UTC).isoformat(), plain_meta, dict(sorted(sealed.items())))
    with writing(incomplete):
        for folder in sorted((path for path in incomplete.rglob("*") if path.is_dir()), reverse=True):
            fsync_path(folder)
        write_text_atomically(incomplete / MANIFEST, encode_manifest(manifest))
        return _publish(incomplete, step)


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest, itself checked. Raises CheckpointError (missing, unreadable, damaged, other format version)."""
    path = folder / MANIFEST
    try:
        text = retry_stale(path.read_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint, or its saving never finished") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        content = json.loads(text)
        head = (content["format"], content["format_version"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: not a manifest") from None
    if head != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(f"{path} is of format {head[0]!r} version {head[1]!r}; this code reads {FORMAT!r} version {FORMAT_VERSION}")
    try:
        manifest = msgspec.convert(content, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if manifest.crc32 != _self_checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its content does not match its own checksum")
    return manifest


def read_meta(folder: Path) -> dict[str, Any]:
    """The `meta` given to `commit`. Raises CheckpointError like `read_manifest`."""
    return read_manifest(folder).meta


def verify(folder: Path, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Problems of a checkpoint folder, one sentence each; an empty list means usable.

    `deep` reads every byte and compares checksums; otherwise only presence and sizes. With `share=(rank, world_size)` the
    deep part covers that rank's part of the files, so that all ranks together read each file once. Files that the manifest
    does not list (notes, a file system's own) are ignored.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    step = step_of(folder)
    problems = [] if step in (None, manifest.step) else [f"{folder.name} holds a manifest of step {manifest.step}: the folder was renamed"]
    whole = []
    for name, record in manifest.files.items():
        problem = _size_problem(folder, name, record)
        if problem is None:
            whole.append(name)
        else:
            problems.append(problem)
    if deep:
        rank, world_size = share
        by_size = sorted(whole, key=lambda name: (-manifest.files[name].size, name))
        with ThreadPoolExecutor(READ_THREADS) as pool:
            found = pool.map(lambda name: _content_problem(folder, name, manifest.files[name]), by_size[rank::world_size])
            problems += [problem for problem in found if problem is not None]
    return problems


def encode_manifest(manifest: Manifest) -> str:
    """JSON text of a manifest, with its own checksum filled in."""
    return json.dumps(msgspec.to_builtins(manifest) | {"crc32": _self_checksum(manifest)}, indent=1, allow_nan=False) + "\n"


def _self_checksum(manifest: Manifest) -> str:
    content = msgspec.to_builtins(manifest) | {"crc32": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"


def _seal(folder: Path, name: str) -> FileRecord:
    fsync_path(folder / name)
    return FileRecord(*crc32_of(folder / name))


def _publish(incomplete: Path, step: int) -> Path:
    """Rename to the finished name, moving an existing checkpoint of the step aside until the new one is in place."""
    root, final = incomplete.parent, incomplete.with_name(step_name(step))
    aside = final.with_name(final.name + REPLACED)
    fsync_path(incomplete)
    if final.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(final, aside)
    os.rename(incomplete, final)
    fsync_path(root)
    write_text_atomically(root / LATEST, final.name + "\n")
    if aside.exists():
        doomed = final.with_name(final.name + DELETING)
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(aside, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return final


def _size_problem(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        size = retry_stale((folder / name).stat).st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if size == record.size else f"{name} has {size} bytes, the manifest says {record.size}"


def _content_problem(folder: Path, name: str, record: FileRecord) -> str | None:
    try:
        _, crc32 = crc32_of(folder / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if crc32 == record.crc32 else f"{name} is damaged: checksum {crc32}, the manifest says {record.crc32}"
