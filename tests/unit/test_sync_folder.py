"""The folder that pushes by files pass through."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ebft_ds.errors import WeightSyncError
from ebft_ds.sidecar.versions import new_run_token
from ebft_ds.sync.transports.run_folder import LOCK, RunFolder


def _hold(sync_dir: Path, token: str, told: Connection) -> None:
    folder = RunFolder(sync_dir, token, shared=False)
    with folder.version(1, 10):
        told.send("there")
        told.recv()
        os._exit(9)  # as a killed run: nothing is cleaned up


def test_folders_of_dead_runs_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_hold, args=(tmp_path, "ebft-other", theirs))
    other.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == "there"
        first = RunFolder(tmp_path, new_run_token(), shared=False)
        assert list((tmp_path / "ebft-other").glob("v1-*"))
        first.close()
        first.close()
        ours.send("end")
        other.join(30)
        assert (tmp_path / "ebft-other").is_dir()
        second = RunFolder(tmp_path, new_run_token(), shared=False)
        assert not (tmp_path / "ebft-other").exists()
        second.close()
        assert not list(tmp_path.iterdir())
    finally:
        other.kill()
        other.join(10)


def test_a_version_is_removed_with_its_push_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "made" / "here", "ebft-x", shared=False)
    with contextlib.suppress(KeyError), run.version(4, 1000) as folder:
        (folder / "file").write_text("weights")
        assert folder.stat().st_mode & 0o077 == 0
        raise KeyError
    assert [path.name for path in run.path.iterdir()] == [LOCK]
    run.close()


def test_a_push_that_does_not_fit_says_so_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "ebft-x", shared=False)
    with pytest.raises(WeightSyncError, match=r"not enough room .*sync_dir"), run.version(1, 10**18):
        pass
    run.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match="sync_dir"):
        RunFolder(tmp_path / "file" / "below", "ebft-x", shared=False)
