"""The final model in Hugging Face format, streamed from ZeRO-3 shards: no rank ever holds the whole model.

`final/` is the merged model with its tokenizer; with an adapter, `final/adapter/` holds that alone. Both are written beside and
renamed, so a half-written export never looks like a model.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ebft_ds.checkpoint.space import writing
from ebft_ds.collectives import Collectives
from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.errors import CheckpointError, PeerError
from ebft_ds.sync.source import MergedWeightSource

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 * 2**30


def export_final(
    network: LanguageNetwork,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    collectives: Collectives,
    *,
    dtype: torch.dtype,
    merged: bool,
    generation_config: GenerationConfig | None,
    write_beside: Callable[[Path], None] | None = None,
) -> Path:
    """Collective. Writes `target` on rank 0 and returns it. With an adapter and `merged` false, only the adapter is written.

    `write_beside` writes further files into the folder that it is given, on rank 0.

    Raises:
        CheckpointError (rank 0), PeerError (the others): it could not be written; a former `target` is unharmed.
    """
    staging = target.with_name(f"{target.name}.incomplete")
    writes = DeferredWrites(staging)
    if collectives.is_main:

        def begin() -> None:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

        writes.do(begin)
    is_peft = isinstance(network.model, PeftModel)
    if merged or not is_peft:
        _write_model(network, staging, collectives, dtype, generation_config, writes)
    if is_peft:
        _write_adapter(network.model, staging / "adapter" if merged else staging, collectives, writes)
    if collectives.is_main:

        def publish() -> None:
            tokenizer.save_pretrained(staging)
            if write_beside is not None:
                write_beside(staging)
            shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)

        writes.do(publish)
    failed = collectives.max_int(int(writes.error is not None))
    if failed:
        if collectives.is_main:
            shutil.rmtree(staging, ignore_errors=True)  # frees a full disk; half a model is of no use
        raise writes.error or PeerError("rank 0 could not write the final model; its message names the cause")
    return target


class DeferredWrites:
    """Rank 0's writes between collective gathers: after a failure nothing more is written, and its error waits for the last gather."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.error: CheckpointError | None = None

    def do(self, write: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            with writing(self._folder):
                write()
        except CheckpointError as error:
            self.error = error


def _write_model(
    network: LanguageNetwork,
    folder: Path,
    collectives: Collectives,
    dtype: torch.dtype,
    generation_config: GenerationConfig | None,
    writes: DeferredWrites,
) -> None:
    source = MergedWeightSource(network, dtype, bucket_bytes=256 * 2**20, is_main=collectives.is_main, only_trained=False)
    shard: dict[str, Tensor] = {}
    files: dict[str, list[str]] = {}
    size, total = 0, 0
    for bucket in source.buckets():
        for name, tensor in bucket:
            if shard and size + tensor.nbytes > SHARD_BYTES:
                writes.do(partial(_save_shard, shard, folder, files))
                shard, size = {}, 0
            shard[name] = tensor.contiguous()
            size += tensor.nbytes
            total += tensor.nbytes
    if not collectives.is_main:
        return

    def finish() -> None:
        _save_shard(shard, folder, files)
        _name_shards(folder, files, total)
        config = network.base_model.config
        config.dtype = dtype
        config.use_cache = True
        config.save_pretrained(folder)
        if generation_config is not None:
            generation_config.save_pretrained(folder)

    writes.do(finish)


def _save_shard(shard: dict[str, Tensor], folder: Path, files: dict[str, list[str]]) -> None:
    """Writes a shard under a preliminary name and notes in `files` what is in it."""
    name = f"part-{len(files)}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    files[name] = list(shard)


def _name_shards(folder: Path, files: dict[str, list[str]], total_bytes: int) -> None:
    """Hugging Face names: one file, or numbered ones with an index."""
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (part, names) in enumerate(files.items(), start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / part).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_adapter(model: PeftModel, folder: Path, collectives: Collectives, writes: DeferredWrites) -> None:
    """PEFT's own format, from gathered parameters (its own save would write empty ZeRO-3 placeholders)."""
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            if collectives.is_main:
                state[name] = parameter.detach().to("cpu", copy=True)
    if not collectives.is_main:
        return

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        adapter = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
        tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config["default"].inference_mode = True
        model.peft_config["default"].save_pretrained(folder)
        model.peft_config["default"].inference_mode = False

    writes.do(write)
