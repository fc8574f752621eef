"""Which rollout engine a recipe asks for, and how weights get there. Pure functions of the configuration."""

from __future__ import annotations

from typing import Literal

from ebft_ds.config.recipe import RecipeConfig

Transport = Literal["nccl", "gloo", "disk", "ipc", "adapter"]


def rollout_engine_of(config: RecipeConfig) -> Literal["vllm", "transformers"]:
    """`rollout_engine`, with `auto` resolved: vllm if the recipe starts or names servers."""
    chosen = config.rollout.rollout_engine
    if chosen != "auto":
        return chosen
    return "vllm" if starts_servers(config) or config.vllm.vllm_server_base_url else "transformers"


def starts_servers(config: RecipeConfig) -> bool:
    """Does the run start its servers itself?"""
    return config.vllm.vllm_launch or config.vllm.vllm_colocate


def transport_of(config: RecipeConfig, *, on_cpu: bool) -> Transport:
    """How weights reach vLLM; `on_cpu`: the trainer has no GPU. Servers must be started for the same one."""
    rollout = config.rollout
    if rollout.sync_mode == "adapter":
        return "adapter"
    if rollout.sync_transport != "auto":
        return rollout.sync_transport
    if config.vllm.vllm_colocate:
        return "ipc"
    return "gloo" if on_cpu else "nccl"


def devices_of_one_server(config: RecipeConfig) -> int:
    """GPUs that one server needs."""
    vllm = config.vllm
    return vllm.vllm_tensor_parallel_size * vllm.vllm_pipeline_parallel_size * vllm.vllm_data_parallel_size
