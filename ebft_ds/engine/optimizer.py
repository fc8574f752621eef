"""Optimizer parameter groups: named, disjoint, and complete over the trainable parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ebft_ds.config.sections import OptimSection
from ebft_ds.errors import ConfigError

_NO_DECAY = re.compile(r"(^|\.)(bias|.*norm.*|.*layernorm.*|ln_\w+|lora_magnitude_vector.*)($|\.)", re.IGNORECASE)
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|lm_head|embed_out|lora_embedding_[AB])($|\.)")


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimSection) -> list[dict[str, Any]]:
    """Groups for torch.optim: [{name, params, lr, weight_decay}], in a fixed order, none empty.

    First match wins: `lr_groups` in recipe order, then embeddings (`embedding_lr`, `embedding_lr_scale`, and with LoRA+
    `loraplus_lr_embedding`), then LoRA B matrices (`loraplus_lr_ratio`), then the rest. Biases, norms and DoRA magnitudes
    never decay. A named group that matches nothing is an error.
    """
    groups: dict[str, dict[str, Any]] = {}
    hits = {spec.get("name", str(i)): 0 for i, spec in enumerate(optim.lr_groups)}
    names = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        names.append(name)
        label, rate, decay = _rule(name, optim, hits)
        if _NO_DECAY.search(name):
            label, decay = f"{label}_no_decay", 0.0
        group = groups.setdefault(label, {"name": label, "params": [], "lr": rate, "weight_decay": decay})
        group["params"].append(parameter)
    unmatched = [name for name, count in hits.items() if count == 0]
    if unmatched:
        raise ConfigError(f"lr_groups: {', '.join(unmatched)} matches no trainable parameter; the names are like {', '.join(names[:5])}")
    if not groups:
        raise ConfigError("the model has no trainable parameter")
    return [groups[label] for label in sorted(groups)]


def _rule(name: str, optim: OptimSection, hits: dict[str, int]) -> tuple[str, float, float]:
    """(group label, learning rate, weight decay) of one parameter."""
    for i, spec in enumerate(optim.lr_groups):
        patterns = spec["modules"] if isinstance(spec["modules"], list) else [spec["modules"]]
        if any(_matches(pattern, name) for pattern in patterns):
            label = spec.get("name", str(i))
            hits[label] += 1
            return f"named_{label}", float(spec.get("lr", optim.learning_rate)), float(spec.get("weight_decay", optim.weight_decay))
    if _EMBEDDING.search(name):
        if optim.embedding_lr is not None:
            return "embedding", optim.embedding_lr, optim.weight_decay
        if optim.embedding_lr_scale is not None:
            return "embedding", optim.learning_rate * optim.embedding_lr_scale, optim.weight_decay
        if optim.loraplus_lr_ratio is not None and "lora_embedding" in name:
            return "lora_embedding", optim.loraplus_lr_embedding, optim.weight_decay
    if optim.loraplus_lr_ratio is not None and ".lora_B." in name:
        return "lora_b", optim.learning_rate * optim.loraplus_lr_ratio, optim.weight_decay
    return "base", optim.learning_rate, optim.weight_decay


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise ConfigError(f"lr_groups: {pattern!r} is not a regular expression: {error}") from error


def build_optimizer(groups: list[dict[str, Any]], optim: OptimSection, *, offloaded: bool) -> torch.optim.Optimizer:
    """AdamW; DeepSpeed's CPU Adam where the optimizer states live in host memory. float32 masters are ZeRO-3's."""
    betas = (optim.adam_beta1, optim.adam_beta2)
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=optim.learning_rate, betas=betas, eps=optim.adam_epsilon)
        return optimizer
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=betas, eps=optim.adam_epsilon)
