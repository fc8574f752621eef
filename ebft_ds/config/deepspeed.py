"""The DeepSpeed configuration of an engine: a JSON file under the recipe. A contradiction is an error, never a silent winner."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from ebft_ds.config.deepspeed_files import DEFAULT_FILES, find_deepspeed_file, read_deepspeed_file, shipped_folder
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.errors import ConfigError

EngineKind = Literal["actor", "feature"]
AUTO = "auto"


class BatchNumbers(Protocol):
    """What of a mode's derived numbers DeepSpeed is told."""

    @property
    def world_size(self) -> int: ...

    @property
    def global_batch(self) -> int: ...


_REFUSED = {
    "optimizer": "the recipe owns the optimizer (learning_rate, weight_decay, adam_*, lr_groups)",
    "scheduler": "the recipe owns the schedule (lr_scheduler_type, warmup_steps)",
    "amp": "mixed precision is set by the recipe's dtype",
    "torch_autocast": "mixed precision is set by the recipe's dtype",
    "bfloat16": "use bf16",
    "elasticity": "it would change the batch size",
    "tensor_parallel": "the engine is data parallel ZeRO-3",
    "pipeline": "the engine is data parallel ZeRO-3",
    "sequence_parallel_size": "the engine is data parallel ZeRO-3",
}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}


def build_deepspeed_config(
    config: RecipeConfig, derived: BatchNumbers, kind: EngineKind = "actor", hidden_size: int | None = None
) -> dict[str, Any]:
    """What `deepspeed.initialize` is given for the actor or for the frozen feature copy.

    `hidden_size` fills the bucket sizes that are "auto" (without it DeepSpeed's defaults hold). Gradient accumulation is always 1
    there: the trainer sets the boundaries itself. Errors: ConfigError naming the file, the key, and the recipe's field.
    """
    content, origin = _read(config, kind)
    problems = [*_refusals(content, kind), *_contradictions(content, config, derived)]
    if problems:
        raise ConfigError("\n".join(f"{origin}: {problem}" for problem in problems))
    _fill(content, config, derived, kind, hidden_size)
    left = sorted(_autos(content))
    if left:
        raise ConfigError(f"{origin}: {', '.join(left)}: auto cannot be filled from the recipe; give a value")
    return content


def _read(config: RecipeConfig, kind: EngineKind) -> tuple[dict[str, Any], str]:
    """The file's content and its name; a mapping in the recipe is laid over the shipped file."""
    field = "deepspeed" if kind == "actor" else "feature_deepspeed"
    stated = config.engine.deepspeed if kind == "actor" else config.engine.feature_deepspeed
    if isinstance(stated, str):
        path = find_deepspeed_file(stated)
        return read_deepspeed_file(path), str(path)
    path = shipped_folder() / DEFAULT_FILES[kind]
    content = read_deepspeed_file(path)
    return (_laid_over(stated, content), f"{field} in the recipe") if stated else (content, str(path))


def _laid_over(top: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _laid_over(value, below) if isinstance(value, dict) and isinstance(below, dict) else copy.deepcopy(value)
    return merged


def _refusals(content: dict[str, Any], kind: EngineKind) -> Iterator[str]:
    for key, reason in _REFUSED.items():
        value = content.get(key)
        if value in (None, {}, 1, False) or (isinstance(value, dict) and value.get("enabled") is False):
            continue
        yield f"{key} is refused: {reason}"
    zero = content.get("zero_optimization")
    stage = zero.get("stage", AUTO) if isinstance(zero, dict) else 0
    if stage not in (3, AUTO):
        yield f"zero_optimization.stage {stage} is refused: only ZeRO stage 3 is supported"
    if not isinstance(zero, dict):
        return
    if kind == "feature" and zero.get("offload_optimizer"):
        yield "zero_optimization.offload_optimizer is refused: the frozen copy has no optimizer"
    for key in ("offload_param", "offload_optimizer"):
        target = zero.get(key)
        if isinstance(target, dict) and target.get("device") == "nvme" and not target.get("nvme_path"):
            yield f"zero_optimization.{key}: device nvme needs nvme_path"


def _contradictions(content: dict[str, Any], config: RecipeConfig, derived: BatchNumbers) -> Iterator[str]:
    dtype = config.model.dtype
    for key, name in _PRECISIONS.items():
        section = content.get(key)
        enabled = section.get("enabled", AUTO) if isinstance(section, dict) else AUTO
        if enabled != AUTO and bool(enabled) != (dtype == name):
            yield f"{key}.enabled is {str(enabled).lower()}, but the recipe says dtype: {dtype}; remove the one or change the other"
    stated = (
        ("gradient_clipping", "max_grad_norm", config.optim.max_grad_norm),
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", config.run.per_device_train_batch_size),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", config.run.gradient_accumulation_steps),
        ("train_batch_size", "global batch", derived.global_batch),
    )
    for key, field, value in stated:
        if content.get(key, AUTO) not in (AUTO, value):
            yield f"{key} is {content[key]}, but the recipe says {field}: {value}; set it to auto or make them equal"


def _fill(content: dict[str, Any], config: RecipeConfig, derived: BatchNumbers, kind: EngineKind, hidden_size: int | None) -> None:
    """Fill in place. Batch sizes only serve DeepSpeed's own bookkeeping: micro-batches are cut by the planner."""
    content["train_micro_batch_size_per_gpu"] = config.run.per_device_train_batch_size
    content["gradient_accumulation_steps"] = 1
    content["train_batch_size"] = config.run.per_device_train_batch_size * derived.world_size
    for key, name in _PRECISIONS.items():
        content[key] = {**content.get(key, {}), "enabled": config.model.dtype == name}
    if kind == "actor":
        content["gradient_clipping"] = config.optim.max_grad_norm
        # Micro-batch gradients in bf16 would lose the small ones when they are added up.
        content.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    else:
        content.pop("gradient_clipping", None)
    zero = content["zero_optimization"]
    zero["stage"] = 3
    sizes = {
        "reduce_bucket_size": hidden_size and hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": hidden_size and int(0.9 * hidden_size * hidden_size),
        # Adapter matrices are small and many: gathering each of them costs more than keeping them whole.
        "stage3_param_persistence_threshold": hidden_size and max(100_000, 10 * hidden_size),
    }
    for key, size in sizes.items():
        if zero.get(key) == AUTO:
            if size:
                zero[key] = size
            else:
                del zero[key]


def _autos(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield prefix + key
