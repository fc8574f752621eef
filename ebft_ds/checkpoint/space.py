"""A full disk while saving: recognised whatever raised it, and reported with the free and the needed bytes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from ebft_ds.checkpoint.layout import MANIFEST, finished
from ebft_ds.errors import CheckpointError

_TORCH_WRITE_FAILURES = ("PytorchStreamWriter failed", "file write failed", "unexpected pos")
"""torch.save reports a failed write as a RuntimeError without an errno."""
_RUST_WRITE_FAILURE = "(os error "
"""safetensors has its own error type, with the system's text and number in it."""


@contextlib.contextmanager
def writing(folder: Path, *, needed_bytes: int | None = None) -> Iterator[None]:
    """Around anything that writes into a checkpoint folder: a failed write becomes a CheckpointError, other errors pass.

    `needed_bytes`: size of the checkpoint if known; otherwise the newest earlier checkpoint's size stands for it. Nothing is
    deleted here: earlier checkpoints stay as they are, the unfinished folder is removed by the next start.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not _is_write_failure(error):
            raise
        raise CheckpointError(_message(folder, needed_bytes, error)) from error


def _is_write_failure(error: Exception) -> bool:
    text = str(error)
    return (
        isinstance(error, OSError)
        or (isinstance(error, RuntimeError) and any(mark in text for mark in _TORCH_WRITE_FAILURES))
        or _RUST_WRITE_FAILURE in text
    )


def _message(folder: Path, needed_bytes: int | None, error: Exception) -> str:
    cause = (error.strerror if isinstance(error, OSError) else None) or (str(error).splitlines() or [type(error).__name__])[0]
    free = shutil.disk_usage(_existing(folder)).free
    needed = needed_bytes if needed_bytes is not None else _size_of_newest(folder.parent)
    need = "unknown (no earlier checkpoint to compare)" if needed is None else f"about {needed:,} bytes"
    return (
        f"saving {folder} failed: {cause}. Free: {free:,} bytes (a quota may allow less), needed: {need}. Earlier checkpoints are "
        "untouched: if the disk is full, free some space or lower save_total_limit, then start again with resume_from_checkpoint=auto"
    )


def _existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def _size_of_newest(root: Path) -> int | None:
    for folder in finished(root):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            files = json.loads((folder / MANIFEST).read_bytes())["files"]
            return sum(int(record["size"]) for record in files.values())
    return None
