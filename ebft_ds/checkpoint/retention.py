"""Deleting checkpoints: the oldest beyond the limit, and what a crash left behind."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ebft_ds.checkpoint.layout import DELETING, INCOMPLETE, REPLACED, finished, with_suffix
from ebft_ds.checkpoint.manifest import verify

logger = logging.getLogger(__name__)


def prune(root: Path, keep_last: int | None, protect: Iterable[Path] = ()) -> list[Path]:
    """Delete all but the newest `keep_last` good checkpoints under `root` and return the deleted paths. One rank calls this.

    Good means complete with the right sizes. Damaged ones do not count towards the limit and go only when they are older than
    the oldest one kept, so the only good checkpoint is never deleted, nor is one in `protect` (the one this run resumed from,
    say). None keeps everything. A folder is renamed to `*.deleting` first, so that none is ever found half deleted.
    """
    if keep_last is None:
        return []
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1 (or None), not {keep_last}")
    folders = finished(root)
    good = [path for path in folders if not verify(path, deep=False)]
    if not good:
        return []
    oldest_kept = folders.index(good[:keep_last][-1])
    protected = {path.resolve() for path in protect}
    doomed = [path for path in folders[oldest_kept + 1 :] if path.resolve() not in protected]
    for path in doomed:
        _delete(path)
    return doomed


def clean_leftovers(root: Path) -> list[Path]:
    """At start, before `resolve`: finish or undo what a crash interrupted; returns what was removed. One rank calls this.

    A `step_N.replaced` whose successor never got its name becomes `step_N` again; unfinished and half-deleted folders go.
    """
    removed = with_suffix(root, DELETING)
    for path in removed:
        _delete(path)
    for aside in with_suffix(root, REPLACED):
        final = aside.with_name(aside.name.removesuffix(REPLACED))
        if final.exists():
            removed.append(aside)
            _delete(aside)
        else:
            os.rename(aside, final)
    for path in with_suffix(root, INCOMPLETE):
        removed.append(path)
        _delete(path)
    return removed


def _delete(path: Path) -> None:
    doomed = path
    if not path.name.endswith(DELETING):
        base = path.name.removesuffix(INCOMPLETE).removesuffix(REPLACED)
        doomed = path.with_name(base + DELETING)
        if doomed.exists():
            shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
    try:
        shutil.rmtree(doomed)
    except OSError as error:  # NFS keeps a name for a file that somebody still reads; the next start tries again
        logger.warning("%s could not be deleted yet (%s); the next start tries again", doomed, error.strerror)
