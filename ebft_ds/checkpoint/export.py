"""The final model in Hugging Face format, streamed from ZeRO-3 shards: no rank ever holds the whole model.

`final/` is the merged model with its tokenizer; with an adapter, `final/adapter/` holds that alone. Both are written beside and
renamed, so a half-written export never looks like a model.
"""

from __future__ import annotations

import json
import logging
import shutil
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
) -> Path:
    """Collective. Writes `target` on rank 0 and returns it. With an adapter and `merged` false, only the adapter is written."""
    staging = target.with_name(f"{target.name}.incomplete")
    if collectives.is_main:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    is_peft = isinstance(network.model, PeftModel)
    with writing(staging):
        if merged or not is_peft:
            _write_model(network, staging, collectives, dtype, generation_config)
        if is_peft:
            _write_adapter(network.model, staging / "adapter" if merged else staging, collectives)
        if collectives.is_main:
            tokenizer.save_pretrained(staging)
            shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)
    collectives.barrier()
    return target


def _write_model(
    network: LanguageNetwork, folder: Path, collectives: Collectives, dtype: torch.dtype, generation_config: GenerationConfig | None
) -> None:
    source = MergedWeightSource(network, dtype, bucket_bytes=256 * 2**20, is_main=collectives.is_main, only_trained=False)
    shard: dict[str, Tensor] = {}
    files: dict[str, list[str]] = {}
    size, total = 0, 0
    for bucket in source.buckets():
        for name, tensor in bucket:
            if shard and size + tensor.nbytes > SHARD_BYTES:
                files[_save_shard(shard, folder, len(files))] = list(shard)
                shard, size = {}, 0
            shard[name] = tensor.contiguous()
            size += tensor.nbytes
            total += tensor.nbytes
    if not collectives.is_main:
        return
    files[_save_shard(shard, folder, len(files))] = list(shard)
    _name_shards(folder, files, total)
    config = network.base_model.config
    config.dtype = dtype
    config.use_cache = True
    config.save_pretrained(folder)
    if generation_config is not None:
        generation_config.save_pretrained(folder)


def _save_shard(shard: dict[str, Tensor], folder: Path, number: int) -> str:
    name = f"part-{number}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    return name


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


def _write_adapter(model: PeftModel, folder: Path, collectives: Collectives) -> None:
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
    folder.mkdir(parents=True, exist_ok=True)
    adapter = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    save_file(
        {name: tensor.contiguous() for name, tensor in adapter.items()}, folder / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    model.peft_config["default"].inference_mode = True
    model.peft_config["default"].save_pretrained(folder)
    model.peft_config["default"].inference_mode = False
