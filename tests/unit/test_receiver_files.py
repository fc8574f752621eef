"""Reading what the disk transport writes, and refusing anything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.tensors import dtype_name
from ebft_ds.sidecar.push_ops import Announce, BucketFile, DiskWay, FileManifest, Sealed
from ebft_ds.sidecar.receiver_checkpoint import checkpoint_specs, local_folder
from ebft_ds.sidecar.receiver_disk import DiskIntake
from ebft_ds.sync.transports import disk
from ebft_ds.sync.transports.push_round import SenderError

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b.weight": torch.randn(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "half": torch.randn(2, 2, 2, dtype=torch.float16),
}


def write(folder: Path, tensors: dict[str, Tensor], name: str = "bucket.safetensors") -> BucketFile:
    size, digest = disk.write_durably(folder / name, disk.safetensors_chunks(list(tensors.items())))
    return BucketFile("p", name, size, digest)


def seal(folder: Path, files: list[BucketFile]) -> Sealed:
    content = msgspec.json.encode(FileManifest(1, files))
    (folder / "files.json").write_bytes(content)
    return Sealed("p", "files.json", hashlib.sha256(content).hexdigest())


@pytest.fixture
def intake(tmp_path: Path) -> Callable[..., DiskIntake]:
    def begin(tensors: dict[str, Tensor] = TENSORS, seconds: float = 20.0) -> DiskIntake:
        specs = [TensorSpec(name, dtype_name(t.dtype), list(t.shape)) for name, t in tensors.items()]
        found = DiskIntake(Announce("p", WeightManifest(1, specs), seconds, DiskWay(str(tmp_path))), lambda: None)
        found.start()
        return found

    return begin


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is wrong stays wrong here: no waiting for a slow file system."""
    monkeypatch.setattr("ebft_ds.sidecar.receiver_disk.APPEAR_SECONDS", 0.2)


def test_files_are_safetensors_and_arrive_bit_by_bit(tmp_path: Path, intake: Callable[..., DiskIntake]) -> None:
    file = write(tmp_path, TENSORS)
    assert {name: t.dtype for name, t in load_file(tmp_path / file.file).items()} == {name: t.dtype for name, t in TENSORS.items()}
    assert [p.name for p in tmp_path.iterdir()] == [file.file], "nothing half-written is left"
    receiving = intake()
    receiving.file(file)
    receiving.file(seal(tmp_path, [file]))
    receiving.join()
    for name, tensor in TENSORS.items():
        assert torch.equal(receiving.tensors[name], tensor)
        assert receiving.tensors[name].dtype == tensor.dtype


def test_a_file_that_appears_late_is_waited_for(tmp_path: Path, intake: Callable[..., DiskIntake]) -> None:
    file = write(tmp_path, TENSORS)
    (tmp_path / file.file).rename(tmp_path / "elsewhere")
    receiving = intake()
    receiving.file(file)
    receiving.file(seal(tmp_path, [file]))
    assert receiving.state == "receiving"
    (tmp_path / "elsewhere").rename(tmp_path / file.file)
    receiving.join()
    assert receiving.state == "received"


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("damage", ["flipped byte", "cut", "longer", "gone"])
def test_damaged_files_are_refused(tmp_path: Path, intake: Callable[..., DiskIntake], damage: str) -> None:
    file = write(tmp_path, TENSORS)
    path = tmp_path / file.file
    content = bytearray(path.read_bytes())
    match damage:
        case "flipped byte":
            content[-3] ^= 1
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-1])
        case "longer":
            path.write_bytes(content + b"x")
        case "gone":
            path.unlink()
    receiving = intake()
    receiving.file(file)
    expected = {"flipped byte": "checksum", "cut": "bytes", "longer": "bytes", "gone": "cannot be read"}[damage]
    with pytest.raises(WeightSyncError, match=f"{file.file}: .*{expected}"):
        receiving.join()
    assert not receiving.tensors


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (TENSORS | {"a.weight": torch.randn(5, 3)}, "a.weight is float32 .5, 3., announced was"),
        (TENSORS | {"a.weight": torch.randn(3, 5, dtype=torch.float64)}, "a.weight is float64"),
        (TENSORS | {"other": torch.randn(2)}, "other is float32 .2., announced was None"),
        ({k: v for k, v in TENSORS.items() if k != "half"}, "half missing"),
    ],
)
def test_other_tensors_than_announced_are_refused(
    tmp_path: Path, intake: Callable[..., DiskIntake], sent: dict[str, Tensor], message: str
) -> None:
    file = write(tmp_path, sent)
    receiving = intake()
    receiving.file(file)
    receiving.file(seal(tmp_path, [file]))
    with pytest.raises(WeightSyncError, match=message):
        receiving.join()


def test_a_list_of_other_files_is_refused(tmp_path: Path, intake: Callable[..., DiskIntake]) -> None:
    file = write(tmp_path, TENSORS)
    receiving = intake()
    receiving.file(file)
    receiving.file(seal(tmp_path, [msgspec.structs.replace(file, sha256="0" * 64)]))
    with pytest.raises(WeightSyncError, match="lists other files"):
        receiving.join()


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, intake: Callable[..., DiskIntake]) -> None:
    receiving = intake()
    receiving.file(BucketFile("p", "../secret", 4, "0" * 64))
    with pytest.raises(WeightSyncError, match="no plain file name"):
        receiving.join()


def test_a_sender_that_falls_silent_is_given_up_in_time(intake: Callable[..., DiskIntake]) -> None:
    receiving = intake(seconds=0.3)
    with pytest.raises(WeightSyncError, match=r"within 0.3 s: a.weight, b.weight, scalar and 2 more missing"):
        receiving.join()


def test_a_cancelled_push_ends_its_thread(intake: Callable[..., DiskIntake]) -> None:
    receiving = intake(seconds=60.0)
    receiving.cancel()
    with pytest.raises(WeightSyncError, match="given up"):
        receiving.join()


def test_a_full_disk_is_the_senders_error_and_leaves_no_file(tmp_path: Path) -> None:
    def chunks() -> object:
        yield b"x"
        raise OSError(28, "No space left on device")

    with pytest.raises(SenderError, match=r"No space left.*sync_dir"):
        disk.write_durably(tmp_path / "f", chunks())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_checkpoint_headers(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no safetensors"):
        checkpoint_specs(tmp_path)
    save_file({"x": torch.zeros(2, 3), "q": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert checkpoint_specs(local_folder(str(tmp_path), None, None)) == {
        "x": TensorSpec("x", "float32", [2, 3]),
        "q": TensorSpec("q", "I8", [4]),
    }
    index = {"weight_map": {"y": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"y": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "part-1.safetensors")
    assert checkpoint_specs(tmp_path) == {"y": TensorSpec("y", "bfloat16", [1])}
    (tmp_path / "part-1.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(WeightSyncError, match="no readable safetensors"):
        checkpoint_specs(tmp_path)
