"""The folder that one run's pushes pass through: locked while the run lives, so that a later run can tell it from what a dead one left."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft_ds.errors import WeightSyncError

logger = logging.getLogger(__name__)

LOCK = "owner.lock"
RUN_PREFIX = "ebft-"
SPARE_BYTES = 16 * 2**20
"""Kept free beside what a push needs."""


class RunFolder:
    """`<sync_dir>/<run token>`, made at once. Weights in it can be read by this user alone, or as the umask says where `shared`."""

    def __init__(self, sync_dir: Path, run_token: str, *, shared: bool) -> None:
        self.path = sync_dir / run_token
        self._mode = 0o777 if shared else 0o700
        try:
            sync_dir.mkdir(parents=True, exist_ok=True)
            remove_leftovers(sync_dir)
            fresh = sync_dir / f".{run_token}.{os.getpid()}"
            fresh.mkdir(mode=self._mode)
            self._lock: int | None = os.open(fresh / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            _try_lock(self._lock)  # before the folder has the name that others look for
            fresh.rename(self.path)
        except OSError as error:
            raise WeightSyncError(
                f"pushes cannot pass through {sync_dir}: {error}; set sync_dir to a folder that can be written"
            ) from error

    @contextmanager
    def version(self, version: int, num_bytes: int) -> Iterator[Path]:
        """A folder for one push, removed at its end. Errors: WeightSyncError if the push does not fit."""
        # A name of its own for each attempt: a writer that was given up may still put its last file in place.
        folder = self.path / f"v{version}-{secrets.token_hex(4)}"
        try:
            free = shutil.disk_usage(self.path).free
            if free < num_bytes + SPARE_BYTES:
                raise WeightSyncError(
                    f"push {version}: not enough room in {self.path.parent}: {num_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; "
                    f"make room, or set sync_dir to a larger file system"
                )
            folder.mkdir(mode=self._mode)
        except OSError as error:
            raise WeightSyncError(f"push {version} cannot be written to {folder}: {error}") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes it; may be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_leftovers(sync_dir: Path) -> None:
    """Folders of this user's runs that live no more. Where the file system has no locks that cannot be told, and all are kept."""
    for folder in sync_dir.glob(f"{RUN_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or not of our making
        try:
            if _try_lock(lock):
                logger.info("removing %s, left behind by a run that has ended", folder)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _try_lock(file: int) -> bool:
    """False: somebody has it, or locks do not work here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            logger.warning("no file locks on this file system (%s): folders of dead runs are not removed", error)
        return False
    return True
