"""Building the weights' side of a run: servers where the recipe wants them, what is pushed, and by which transport."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel

from ebft_ds.collectives import Collectives
from ebft_ds.config import RecipeConfig
from ebft_ds.config.engine_choice import rollout_engine_of
from ebft_ds.data.stream import PromptStream
from ebft_ds.engine.build import ZeroEngine, accelerator_count
from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.errors import EbftError, PeerError
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.sync.adapter_source import AdapterSource
from ebft_ds.sync.push import SyncOptions, WeightSync
from ebft_ds.sync.source import MergedWeightSource
from ebft_ds.sync.transport import WeightTransport
from ebft_ds.sync.transports.embedded import EmbeddedTransport
from ebft_ds.sync.weight_source import WeightSource
from ebft_ds.trainers.rollout_servers import RolloutServers
from ebft_ds.trainers.stop_signal import StopSignal

PROBE_TOKENS = 32


def start_servers(config: RecipeConfig, log_folder: Path, collectives: Collectives, stop: StopSignal) -> RolloutServers | None:
    """Collective: rank 0's servers, if the recipe wants any; they start while the engines are built. An error there is one everywhere."""
    if rollout_engine_of(config) != "vllm":
        return None
    servers: RolloutServers | None = None
    error: EbftError | None = None
    if collectives.is_main:
        try:
            servers = RolloutServers(config, log_folder, stop, on_cpu=not accelerator_count())
        except EbftError as caught:
            error = caught
    if collectives.max_int(int(error is not None)):
        raise error or PeerError("rank 0 could not start the rollout servers; its message names the cause")
    return servers


def weight_transport(client: RolloutClient | None, servers: RolloutServers | None, network: LanguageNetwork) -> WeightTransport | None:
    """Rank 0's way to push."""
    if client is None:
        return None
    return EmbeddedTransport(client) if servers is None else servers.transport(client, network.model)


def build_sync(
    config: RecipeConfig,
    actor: ZeroEngine,
    transport: WeightTransport | None,
    collectives: Collectives,
    stream: PromptStream,
    temperature: float,
) -> WeightSync:
    rollout = config.rollout
    dtype = rollout.rollout_dtype or config.model.dtype
    first = stream.prompt(0)
    network = actor.network
    return WeightSync(
        actor,
        _weight_source(config, network, getattr(torch, dtype), is_main=collectives.is_main),
        transport,
        collectives,
        SyncOptions(
            interval=rollout.vllm_merge_check_interval,
            dtype=dtype,
            trainer_dtype=config.model.dtype,
            timeout=rollout.sync_timeout,
            retries=rollout.sync_retries,
            probe_ids=(first.token_ids + first.reference_ids)[-PROBE_TOKENS:] if rollout.sync_probe else None,
            probe_tolerance=rollout.sync_probe_tolerance,
            temperature=temperature,
        ),
    )


def _weight_source(config: RecipeConfig, network: LanguageNetwork, dtype: torch.dtype, *, is_main: bool) -> WeightSource:
    bucket_bytes = int(config.rollout.sync_bucket_mb * 2**20)
    if config.rollout.sync_mode == "adapter":
        assert isinstance(network.model, PeftModel)
        return AdapterSource(network.model, dtype, bucket_bytes, is_main=is_main)
    to_servers = rollout_engine_of(config) == "vllm"
    return MergedWeightSource(network, dtype, bucket_bytes, is_main=is_main, whole_modules=to_servers)
