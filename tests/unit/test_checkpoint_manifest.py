"""The checkpoint file protocol on real files: whole, damaged, unfinished, interrupted, on a full disk."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebft_ds.checkpoint import (
    begin,
    clean_leftovers,
    commit,
    file_names,
    find_usable,
    prune,
    read_meta,
    resolve,
    seal_files,
    verify,
    writing,
)
from ebft_ds.checkpoint import durable as durable_module
from ebft_ds.checkpoint.durable import retry_stale
from ebft_ds.errors import CheckpointError

CONTENT = {"rank_0/model.bin": b"m" * 5000, "rank_1/model.bin": b"n" * 3000, "state.json": b"{}", "empty": b""}


def fill(folder: Path, content: dict[str, bytes] = CONTENT) -> None:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def save(root: Path, step: int, content: dict[str, bytes] = CONTENT) -> Path:
    incomplete = begin(root, step)
    fill(incomplete, content)
    return commit(incomplete, step=step, world_size=2, meta={"prompts_seen": step * 4})


def truncate(folder: Path) -> None:
    with (folder / "rank_1/model.bin").open("r+b") as file:
        file.truncate(2999)


def delete(folder: Path) -> None:
    (folder / "rank_1/model.bin").unlink()


def flip(folder: Path, name: str = "rank_1/model.bin") -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(bytes(data))


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def change_meta(folder: Path) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    assert '"prompts_seen": 8' in text
    path.write_text(text.replace('"prompts_seen": 8', '"prompts_seen": 9'))


def other_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "rank_1/model.bin has 2999 bytes, the manifest says 3000"),
    "deleted": (delete, "rank_1/model.bin is missing"),
    "flipped": (flip, "rank_1/model.bin is damaged: checksum"),
    "no manifest": (lose_manifest, "has no manifest.json"),
    "half manifest": (cut_manifest, "not a manifest"),
    "changed meta": (change_meta, "does not match its own checksum"),
    "other version": (other_version, "version 99; this code reads"),
}


def test_a_committed_checkpoint_is_whole_and_readable(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    assert path == tmp_path / "step_2"
    assert verify(path) == []
    assert read_meta(path) == {"prompts_seen": 8}
    assert file_names(path) == sorted(CONTENT)
    assert (tmp_path / "latest").read_text() == "step_2\n"
    assert not list(tmp_path.glob("*.incomplete"))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_is_used(tmp_path: Path, kind: str) -> None:
    inflict, message = DAMAGE[kind]
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    inflict(bad)
    assert message in " ".join(verify(bad))
    found, rejected = find_usable(tmp_path)
    assert found == good
    assert [entry.path for entry in rejected] == [bad]
    assert message in str(rejected[0])
    with pytest.raises(CheckpointError, match="step_1") as caught:
        resolve(str(bad), tmp_path)
    assert message in str(caught.value)


def test_a_flipped_byte_needs_the_deep_check(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    flip(path)
    assert verify(path, deep=False) == []
    assert len(verify(path, deep=True)) == 1


def test_the_deep_check_can_be_shared_by_ranks(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    flip(path)
    flip(path, "state.json")
    shares = [verify(path, share=(rank, 3)) for rank in range(3)]
    assert sorted(problem for share in shares for problem in share) == sorted(verify(path))
    assert sum(len(share) > 0 for share in shares) == 2


def test_files_the_manifest_does_not_know_are_no_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (path / "notes.txt").write_text("the good one")
    assert verify(path) == []


def test_a_renamed_folder_is_recognised(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    path.rename(tmp_path / "step_7")
    assert "manifest of step 2" in verify(tmp_path / "step_7")[0]
    (tmp_path / "step_7").rename(tmp_path / "best")
    assert verify(tmp_path / "best") == []


def test_an_unfinished_save_is_passed_over(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    fill(begin(tmp_path, 2))
    resolution = resolve("auto", tmp_path)
    assert resolution.path == good
    assert "never finished" in str(resolution.rejected[0])
    assert clean_leftovers(tmp_path) == [tmp_path / "step_2.incomplete"]
    assert resolve("auto", tmp_path).rejected == []


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert find_usable(tmp_path) == (tmp_path / "step_100", [])


def test_auto_without_any_checkpoint_starts_from_zero(tmp_path: Path) -> None:
    assert resolve("auto", tmp_path / "checkpoints").path is None
    assert resolve(None, tmp_path).path is None
    fill(begin(tmp_path, 5))  # killed in its very first save
    assert resolve("auto", tmp_path).path is None


def test_auto_never_starts_over_when_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    truncate(save(tmp_path, 1))
    delete(save(tmp_path, 2))
    with pytest.raises(CheckpointError, match=r"step_2.*is missing.*step_1.*2999 bytes"):
        resolve("auto", tmp_path)


def test_an_explicit_checkpoint_by_path_or_name(tmp_path: Path) -> None:
    one, _ = save(tmp_path, 1), save(tmp_path, 2)
    assert resolve(str(one), tmp_path).path == one
    assert resolve("step_1", tmp_path).path == one
    with pytest.raises(CheckpointError, match=r"no such folder\. The newest usable one is .*step_2"):
        resolve(str(tmp_path / "step_3"), tmp_path)
    with pytest.raises(CheckpointError, match="no usable one"):
        resolve(str(tmp_path / "elsewhere" / "step_3"), tmp_path / "nothing")


def test_begin_removes_the_remains_of_an_earlier_try(tmp_path: Path) -> None:
    fill(begin(tmp_path, 1))
    assert list(begin(tmp_path, 1).iterdir()) == []


def test_commit_replaces_a_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = save(tmp_path, 3, {"other.bin": b"new"})
    assert verify(path) == []
    assert file_names(path) == ["other.bin"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_3"]


@pytest.mark.parametrize("lost_rename", [1, 2, 3])
def test_a_crash_while_replacing_keeps_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_rename: int) -> None:
    save(tmp_path, 3)
    incomplete = begin(tmp_path, 3)
    fill(incomplete, {"other.bin": b"new"})
    calls = 0
    real_rename = os.rename

    class Crash(BaseException):
        pass

    def rename(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == lost_rename:
            raise Crash
        real_rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(Crash):
            commit(incomplete, step=3, world_size=2, meta={})
    clean_leftovers(tmp_path)
    path = resolve("auto", tmp_path).path
    assert path == tmp_path / "step_3"
    assert file_names(path) == (["other.bin"] if lost_rename == 3 else sorted(CONTENT))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_3"]


def test_ranks_seal_their_own_files(tmp_path: Path) -> None:
    incomplete = begin(tmp_path, 1)
    fill(incomplete)
    records = seal_files(incomplete, ["rank_0/model.bin"]) | seal_files(incomplete, ["rank_1/model.bin"])
    path = commit(incomplete, step=1, world_size=2, meta={}, records=records)
    assert verify(path) == []


@pytest.mark.parametrize(("inflict", "message"), [(delete, "lacks 1 files"), (truncate, "does not have the size")])
def test_commit_refuses_files_that_did_not_arrive(tmp_path: Path, inflict: Callable[[Path], None], message: str) -> None:
    incomplete = begin(tmp_path, 1)
    fill(incomplete)
    records = seal_files(incomplete, file_names(incomplete))
    inflict(incomplete)
    with pytest.raises(CheckpointError, match=message):
        commit(incomplete, step=1, world_size=2, meta={}, records=records)
    assert find_usable(tmp_path)[0] is None


@pytest.mark.parametrize("meta", [{"loss": float("nan")}, {"blob": b"x"}, {"ids": {1, 2}}])
def test_meta_must_be_plain_json(tmp_path: Path, meta: dict[str, object]) -> None:
    incomplete = begin(tmp_path, 1)
    fill(incomplete)
    with pytest.raises((TypeError, ValueError)):
        commit(incomplete, step=1, world_size=1, meta=meta)


def test_a_full_disk_in_the_manifest_leaves_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1)
    incomplete = begin(tmp_path, 2)
    fill(incomplete)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left.*Free: [\d,]+ bytes .*needed: about 8,002 bytes"):
            commit(incomplete, step=2, world_size=2, meta={})
    assert resolve("auto", tmp_path).path == good


SAVE_UNDER_A_LIMIT = """
import resource, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from ebft_ds.checkpoint import begin, writing
from ebft_ds.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
folder = begin(Path(sys.argv[1]), 2)
for write in (
    lambda: torch.save({"w": torch.zeros(10000)}, folder / "w.pt"),
    lambda: save_file({"w": torch.zeros(10000)}, folder / "w.safetensors"),
    lambda: (folder / "w.bin").write_bytes(bytes(20000)),
):
    try:
        with writing(folder, needed_bytes=40000):
            write()
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs file-size limits")
def test_torch_and_safetensors_write_failures_are_recognised(tmp_path: Path) -> None:
    save(tmp_path, 1)
    result = subprocess.run(
        [sys.executable, "-c", SAVE_UNDER_A_LIMIT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 3, result.stdout + result.stderr
    assert all("needed: about 40,000 bytes" in line for line in lines)
    assert resolve("auto", tmp_path).path == tmp_path / "step_1"


def test_other_errors_pass_through_the_guard(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape mismatch") as caught, writing(tmp_path):
        raise RuntimeError("shape mismatch")
    assert not isinstance(caught.value, CheckpointError)


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    assert prune(tmp_path, 2, protect=[paths[0]]) == [paths[1]]
    assert [path.exists() for path in paths] == [True, False, True, True]
    assert prune(tmp_path, None) == []


@pytest.mark.parametrize("inflict", [truncate, delete, lose_manifest])
def test_prune_never_deletes_the_only_good_one(tmp_path: Path, inflict: Callable[[Path], None]) -> None:
    stale, good, bad = save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3)
    inflict(bad)
    inflict(stale)
    assert prune(tmp_path, 1) == [stale]
    assert find_usable(tmp_path)[0] == good
    inflict(good)
    assert prune(tmp_path, 1) == []


def test_prune_refuses_to_keep_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, 0)


def test_a_deletion_that_was_interrupted_is_finished_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def busy(path: Path, ignore_errors: bool = False) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        prune(tmp_path, 1)
    assert (tmp_path / "step_1.deleting").exists()
    assert find_usable(tmp_path) == (tmp_path / "step_2", [])
    assert clean_leftovers(tmp_path) == [tmp_path / "step_1.deleting"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_2"]


def test_stale_handles_are_retried_and_other_errors_are_not() -> None:
    waits: list[float] = []
    outcomes = [OSError(errno.ESTALE, "stale"), OSError(errno.ESTALE, "stale"), None]

    def read() -> str:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return "content"

    assert retry_stale(read, sleep=waits.append) == "content"
    assert len(waits) == 2

    def always() -> str:
        raise OSError(errno.ESTALE, "stale")

    with pytest.raises(OSError, match="stale"):
        retry_stale(always, sleep=waits.append)

    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "gone")

    waits.clear()
    with pytest.raises(FileNotFoundError):
        retry_stale(missing, sleep=waits.append)
    assert waits == []


def test_a_file_larger_than_one_chunk_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_module, "CHUNK_BYTES", 7)
    path = save(tmp_path, 2)
    flip(path)
    assert "damaged" in verify(path)[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
names = st.text(alphabet="abcXYZ012._- é", min_size=1, max_size=12).filter(lambda name: name.strip(".") and name != "manifest.json")


@settings(max_examples=40, deadline=None)
@given(
    content=st.dictionaries(names, st.binary(max_size=200), max_size=5),
    meta=st.dictionaries(st.text(), json_values, max_size=4),
    step=st.integers(min_value=0, max_value=10**9),
    data=st.data(),
)
def test_round_trip_and_any_flipped_byte(content: dict[str, bytes], meta: dict[str, object], step: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        incomplete = begin(root, step)
        fill(incomplete, content)
        path = commit(incomplete, step=step, world_size=1, meta=meta)
        assert verify(path) == []
        assert read_meta(path) == meta
        assert set(file_names(path)) == set(content)
        if flippable := sorted(name for name, blob in content.items() if blob):
            name = data.draw(st.sampled_from(flippable))
            flip(path, name)
            assert verify(path) == [problem for problem in verify(path) if problem.startswith(f"{name} is damaged")]
            assert len(verify(path)) == 1
