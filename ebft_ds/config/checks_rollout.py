"""Checks of precision and of the rollouts: kernels, staleness, devices, sampling fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft_ds.config.check_context import Note, Surroundings
from ebft_ds.config.engine_choice import rollout_engine_of
from ebft_ds.config.fields import nearest
from ebft_ds.config.recipe import RecipeConfig

GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p")
"""What generation_kwargs may hold."""

OBJECT_NAME = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
"""`package.module:Name`."""


def check_precision(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Number formats, kernels, checkpointing."""
    model, rollout = config.model, config.rollout
    on_cpu = around.accelerators == 0
    if on_cpu and "float16" in (model.dtype, rollout.rollout_dtype):
        yield "float16 does not train on a CPU; use dtype: float32"
    if on_cpu and model.dtype == "bfloat16":
        yield Note("bfloat16 is slow on most CPUs; dtype: float32 is the usual choice there")
    if model.attn_implementation == "flash_attention_2" and (on_cpu or model.dtype == "float32"):
        yield "attn_implementation: flash_attention_2 needs a GPU and bfloat16 or float16; use sdpa"
    checkpointing = "gradient_checkpointing_kwargs" in model.model_fields_set
    if checkpointing and not model.gradient_checkpointing:
        yield Note("gradient_checkpointing_kwargs has no effect with gradient_checkpointing: false")
    options = ("use_reentrant", "preserve_rng_state", "determinism_check")
    strange = sorted(set(model.gradient_checkpointing_kwargs) - set(options))
    if strange:
        yield f"gradient_checkpointing_kwargs: {', '.join(strange)} is not an option; there are {', '.join(options)}"
    if model.trust_remote_code:
        yield Note("trust_remote_code runs Python code from the checkpoint")
    if model.model_revision and model.model_name_or_path and Path(model.model_name_or_path).is_dir():
        yield "model_revision has no meaning for a model folder; remove it"


def check_rollout(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """Staleness, rollout loop, sampling."""
    rollout, interval = config.rollout, config.rollout.vllm_merge_check_interval
    if rollout.max_staleness < interval - 1:
        yield (
            f"max_staleness {rollout.max_staleness} is below vllm_merge_check_interval {interval} - 1: the weights are "
            f"{interval - 1} steps old at best, so every group would be dropped; raise the one or lower the other"
        )
    if rollout.rollout_loop is not None and not OBJECT_NAME.match(rollout.rollout_loop):
        yield f"rollout_loop: {rollout.rollout_loop!r} is not of the form package.module:Class"
    if rollout.rollout_loop_kwargs and rollout.rollout_loop is None:
        yield "rollout_loop_kwargs needs rollout_loop"
    if config.method.ebft_rl_coef > 0 and rollout.rollout_loop is None and rollout_engine_of(config) == "transformers":
        yield from _check_device(rollout.rollout_device, around)
    yield from _check_sampling(config)


def _check_device(device: str | None, around: Surroundings) -> Iterator[str]:
    if around.accelerators and device is None:
        yield "rollout_device is needed on a machine with GPUs (e.g. cuda:1, or cpu): the engine must not share a rank's GPU unasked"
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?|xpu(:\d+)?|npu(:\d+)?", device):
        yield f"rollout_device: {device!r} is not a device; examples: cpu, cuda:0"
    elif device is not None and device.startswith("cuda") and around.accelerators is not None:
        index = int(device.partition(":")[2] or 0)
        if index >= around.accelerators:
            yield f"rollout_device: {device}: this machine has {around.accelerators} GPU(s)"


def _check_sampling(config: RecipeConfig) -> Iterator[str]:
    rollout = config.rollout
    stated: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
    }
    for key, value in rollout.generation_kwargs.items():
        if key not in GENERATION_KEYS:
            guess = nearest(key, GENERATION_KEYS)
            yield f"generation_kwargs: {key} is not supported" + (
                f"; did you mean {guess}?" if guess else f"; there are {', '.join(GENERATION_KEYS)}"
            )
        elif key in rollout.model_fields_set and stated[key] != value:
            yield f"generation_kwargs.{key}: {value!r} contradicts {key}: {stated[key]!r}; keep one of them"
    if rollout.stop_token_ids is not None and (not rollout.stop_token_ids or min(rollout.stop_token_ids) < 0):
        yield "stop_token_ids is empty or holds a negative id; null takes the generation configuration's EOS ids"
