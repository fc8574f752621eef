"""Names, shapes and dtypes of a checkpoint, read from its files' headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of safetensors headers; anything else (quantised weights) cannot be pushed and keeps its own name."""
INDEX = "model.safetensors.index.json"


def checkpoint_specs(folder: Path) -> dict[str, TensorSpec]:
    """Every tensor of a safetensors checkpoint.

    Raises:
        WeightSyncError: the folder holds no safetensors file, or a damaged one.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not names:
        raise WeightSyncError(
            f"{folder} holds no safetensors files, so a push cannot be checked against it: serve a safetensors checkpoint (save_pretrained)"
        )
    specs: dict[str, TensorSpec] = {}
    for name in names:
        specs.update(read_header(folder / name))
    return specs


def read_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of one file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        return {
            name: TensorSpec(name, DTYPE_NAMES.get(entry["dtype"], entry["dtype"]), list(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise WeightSyncError(f"{path} is no readable safetensors file: {error}") from error


def local_folder(model: str, revision: str | None, cache: str | None) -> Path:
    """The folder of a model that the server has loaded already: a path, or a snapshot in the hub cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise WeightSyncError(f"the checkpoint of {model} is not found in the hub cache: {error}") from error
