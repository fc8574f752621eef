"""What it costs to bring merged weights out of ZeRO-3 shards: ours, bucket by bucket, against one gather of the whole model.

Alone it measures one rank; under a launcher (torchrun or deepspeed tools/bench.py sync ...) the shards of all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived import derive
from ebft_ds.engine.build import ZeroEngine, init_distributed
from ebft_ds.engine.loading import load_actor
from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.engine.optimizer import build_optimizer, parameter_groups
from ebft_ds.sync.source import MergedWeightSource
from tools.benchmarks.memory import PeakMemory
from tools.benchmarks.turns import Measurement, Report, in_turns, medians, ratio

PLAIN, COMPLETE, TOUCHED = "plain: one gather, one state dict", "ours: all weights", "ours: touched modules"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora-r", type=int, default=16, help="rank of the adapter; 0: full fine-tuning")
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"], help="what the adapter is on")
    parser.add_argument("--bucket-mb", type=float, default=64.0)


def run(model: Path, options: argparse.Namespace) -> Report | None:
    """None on ranks other than 0."""
    collectives = init_distributed(600.0)
    network = _network(model, options, collectives)
    source = MergedWeightSource(
        network, getattr(torch, options.dtype), int(options.bucket_mb * 2**20), collectives.is_main, whole_modules=True
    )

    def ours(complete: bool) -> Iterator[list[tuple[str, Tensor]]]:
        return source.buckets(complete=complete)

    samples = in_turns(
        {
            PLAIN: lambda: _measured(_plain(network, source.dtype, collectives.is_main)),
            COMPLETE: lambda: _measured(ours(True)),
            TOUCHED: lambda: _measured(ours(False)),
        },
        options.rounds,
    )
    if not collectives.is_main:
        return None
    settings: dict[str, str | int | float] = {
        "model": model.name,
        "dtype": options.dtype,
        "ranks": collectives.world_size,
        "lora_r": options.lora_r,
        "targets": "+".join(options.target_modules),
        "bucket_mb": options.bucket_mb,
        "rounds": options.rounds,
    }
    ratios = {
        "seconds, all weights, ours / plain": ratio(samples, "seconds", COMPLETE, PLAIN),
        "seconds, ours touched / plain": ratio(samples, "seconds", TOUCHED, PLAIN),
    }
    return Report("sync", settings, medians(samples), samples, ratios)


def _network(model: Path, options: argparse.Namespace, collectives: Collectives) -> LanguageNetwork:
    adapter: dict[str, Any] = {"use_peft": True, "lora_r": options.lora_r, "lora_target_modules": options.target_modules}
    config = AsyncEBFTConfig(
        model_name_or_path=str(model), dtype=options.dtype, max_steps=1, learning_rate=1e-4, **(adapter if options.lora_r else {})
    )
    shards = build_deepspeed_config(config, derive(config, collectives.world_size), "actor", None)
    network = load_actor(config.model, config.peft, shards, chunk_size=512)
    optimizer = build_optimizer(parameter_groups(network.named_parameters(), config.optim), config.optim, offloaded=False)
    return ZeroEngine(network, shards, optimizer=optimizer).network


def _measured(buckets: Iterator[list[tuple[str, Tensor]]]) -> Measurement:
    """Seconds, bytes and memory until the last bucket has been taken; each is dropped at once."""
    sent = 0
    with PeakMemory() as peak:
        started = time.monotonic()
        for bucket in buckets:
            sent += sum(tensor.nbytes for _, tensor in bucket)
            del bucket
        seconds = time.monotonic() - started
    return {"seconds": seconds, "sent_mb": sent / 1e6, "peak_extra_mb": peak.extra_mb}


@torch.no_grad()
def _plain(network: LanguageNetwork, dtype: torch.dtype, is_main: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """The usual way: gather everything, merge into one state dict, hand that on."""
    parameters = list(network.parameters())
    state: dict[str, Tensor] = {}
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
        layers = {f"{n}.base_layer.weight": m for n, m in network.named_modules() if isinstance(m, LoraLayer)} if is_main else {}
        for name, parameter in network.named_parameters() if is_main else ():
            if "lora_" in name:
                continue
            weight = parameter.detach().float()
            if name in layers:
                weight = weight + layers[name].get_delta_weight("default").float()
            state[name] = weight.to("cpu", dtype, copy=True)
    yield list(state.items())
