"""Out-of-place merges W + delta in float32, cast once. The live base weight is only read, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from torch import Tensor

from ebft_ds.errors import WeightSyncError

CHUNK_ELEMENTS = 4 * 2**20
"""Elements merged at once: float32 temporaries stay small beside a fused expert tensor."""


@dataclass
class MergeLoss:
    """What rounding the merged weights costs: |cast(W + delta) - W| / |delta|, over all merged tensors."""

    kept_squared: float = 0.0
    delta_squared: float = 0.0

    @property
    def delta_survival(self) -> float | None:
        """None before anything was merged, or while every delta is 0."""
        return (self.kept_squared / self.delta_squared) ** 0.5 if self.delta_squared > 0 else None

    def add(self, weight: Tensor, merged: Tensor, cast: Tensor) -> None:
        if cast.dtype == torch.float32:  # nothing is rounded, and the norms of whole weights are not free
            self.kept_squared = self.delta_squared = 1.0
            return
        self.kept_squared += float(torch.linalg.vector_norm(cast.float() - weight)) ** 2
        self.delta_squared += float(torch.linalg.vector_norm(merged - weight)) ** 2


@dataclass(frozen=True)
class _Matrix:
    """A weight as [out, in] (a view where it is stored otherwise), the place for the merged one, and the adapter's factors."""

    weight: Tensor
    merged: Tensor
    b: Tensor
    """[out, rank]."""
    a: Tensor
    """[rank, in]."""


def check_mergeable(layer: LoraLayer, adapter: str, where: str) -> None:
    """Raises WeightSyncError, naming `where`, for an adapter whose merge is not known here."""
    name = type(layer).__name__
    if type(layer) not in (Linear, Embedding, ParamWrapper):
        raise WeightSyncError(f"{where}: a LoRA layer of type {name} on a {type(layer.get_base_layer()).__name__} cannot be merged")
    variant = layer.lora_variant.get(adapter)
    if variant is not None and type(variant) not in (DoraLinearVariant, DoraEmbeddingVariant):
        raise WeightSyncError(f"{where}: {type(variant).__name__} cannot be merged; use LoRA, rsLoRA or DoRA")
    if layer.lora_bias.get(adapter, False):
        raise WeightSyncError(f"{where}: lora_bias=True cannot be merged; leave it out")


@torch.no_grad()
def merge(layer: LoraLayer, adapter: str, weight: Tensor, dtype: torch.dtype, loss: MergeLoss) -> Tensor:
    """The merged weight of a LoRA, rsLoRA or DoRA layer in `dtype`, on the weight's device; all parameters must be gathered.

    LoRA: W + s B A, with PEFT's scaling. DoRA: m (W + s B A) / |W + s B A|, norms over the input dimension (arXiv 2402.09353).
    """
    merged = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scaling = float(layer.scaling[adapter])
    magnitude = _magnitude(layer, adapter)
    for matrix in _matrices(layer, adapter, weight.detach(), merged):
        a = matrix.a.float()
        step = max(1, CHUNK_ELEMENTS // max(1, a.shape[1]))
        for start in range(0, matrix.weight.shape[0], step):
            rows = slice(start, start + step)
            base = matrix.weight[rows].float()
            full = torch.addmm(base, matrix.b[rows].float(), a, alpha=scaling)
            if magnitude is not None:
                full = full * (magnitude[rows] / full.norm(dim=1))[:, None]
            matrix.merged[rows] = full
            loss.add(base, full, matrix.merged[rows])
    return merged


def _matrices(layer: Any, adapter: str, weight: Tensor, merged: Tensor) -> Iterator[_Matrix]:
    if isinstance(layer, Embedding):  # stored [tokens, width]; PEFT takes the tokens as its input dimension
        yield _Matrix(weight.T, merged.T, layer.lora_embedding_B[adapter].detach(), layer.lora_embedding_A[adapter].detach())
        return
    a, b = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
    if isinstance(layer, Linear):
        turned = layer.fan_in_fan_out  # transformers' Conv1D
        yield _Matrix(weight.T if turned else weight, merged.T if turned else merged, b, a)
        return
    if weight.dim() == 2:
        yield _Matrix(weight, merged, b, a)
        return
    # PEFT's layout: A [experts * rank, in], B [out, rank * experts]
    experts = weight.shape[0]
    for expert, a_e in enumerate(a.reshape(experts, -1, a.shape[-1])):
        b_e = b.reshape(b.shape[0], -1, experts)[:, :, expert]
        as_is = weight.shape[1:] == (b_e.shape[0], a_e.shape[1]) and layer._did_swap_in_out_features
        own, place = weight[expert], merged[expert]
        yield _Matrix(own if as_is else own.T, place if as_is else place.T, b_e, a_e)


def _magnitude(layer: Any, adapter: str) -> Tensor | None:
    magnitudes = layer.lora_magnitude_vector
    if not magnitudes or adapter not in magnitudes:
        return None
    found: Tensor = magnitudes[adapter].weight.detach().float().flatten()
    return found
