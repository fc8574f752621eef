"""Out-of-place merges W + delta in float32. The live base weight is only read."""

from __future__ import annotations

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from ebft_ds.errors import WeightSyncError


@torch.no_grad()
def merged_weight(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """(W, merged W) of a LoRA, rsLoRA or DoRA layer in float32; its parameters must be gathered.

    LoRA: W + s B A, with PEFT's scaling. DoRA: m (W + s B A) / |W + s B A|, norms over the input dimension (arXiv 2402.09353).
    """
    base = layer.get_base_layer().weight
    weight = base.detach().float()
    delta = layer.get_delta_weight(adapter).detach().float()
    merged = weight + delta
    magnitudes = getattr(layer, "lora_magnitude_vector", None)
    if magnitudes is not None and adapter in magnitudes:
        if merged.dim() != 2:
            raise WeightSyncError(f"DoRA on a {type(layer.get_base_layer()).__name__} cannot be merged")
        magnitude = magnitudes[adapter].weight.detach().float().flatten()
        norms = merged.norm(dim=1)
        merged = merged * (magnitude / norms)[:, None]
    return weight, merged
