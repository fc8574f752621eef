"""The weights as a rollout engine or an export wants them: checkpoint names, merged, read from ZeRO-3 shards bucket by bucket.

Every rank walks the same buckets and gathers together; rank 0 copies what it will send. Copies leave the gather before anything
is sent, so a slow receiver never holds parameters gathered. Memory: one bucket's parameters gathered plus the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import deepspeed
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.merge import merged_weight

ADAPTER = "default"


@dataclass(frozen=True)
class Piece:
    """One tensor of a push: where it comes from and what it is called."""

    name: str
    parameters: list[nn.Parameter]
    """All that must be gathered for it; the first one has the tensor's shape."""
    layer: LoraLayer | None
    """Set: merged from this layer. None: the first parameter itself."""

    @property
    def shape(self) -> list[int]:
        return list(full_shape(self.parameters[0]))

    @property
    def numel(self) -> int:
        """Full size: `numel()` of a partitioned parameter is 0."""
        return sum(full_numel(p) for p in self.parameters)


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


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter, partitioned or not."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_numel(parameter: nn.Parameter) -> int:
    numel: int = getattr(parameter, "ds_numel", parameter.numel())
    return numel


@dataclass
class MergedWeightSource:
    """Merged weights of a network in `dtype`.

    Args:
        only_trained: leave out what cannot have changed (frozen weights without an adapter on them).
        bucket_bytes: a bucket closes when it reaches this many bytes of gathered parameters.
    """

    network: LanguageNetwork
    dtype: torch.dtype
    bucket_bytes: int
    is_main: bool
    only_trained: bool = True
    loss: MergeLoss = field(default_factory=MergeLoss)

    def pieces(self) -> list[Piece]:
        """Every tensor of a push, in model order. Tied weights appear once, under their first name."""
        seen: set[int] = set()
        pieces = []
        for prefix, module in self.network.base_model.named_modules():
            for piece in _pieces_of(prefix, module):
                target = piece.parameters[0]
                if id(target) in seen:
                    continue
                seen.add(id(target))
                if piece.layer is not None or target.requires_grad or not self.only_trained:
                    pieces.append(piece)
        if not pieces:
            raise WeightSyncError("there is no weight to push: the model has neither an adapter nor a trainable parameter")
        return pieces

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Collective. Named tensors on the CPU, rank 0; empty lists elsewhere, as many as rank 0 has buckets."""
        self.loss = MergeLoss()
        for bucket in self._packed():
            parameters = list({id(p): p for piece in bucket for p in piece.parameters}.values())
            with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
                copies = [(piece.name, self._copy(piece)) for piece in bucket] if self.is_main else []
            yield copies

    def _packed(self) -> Iterator[list[Piece]]:
        bucket: list[Piece] = []
        size = 0
        for piece in self.pieces():
            bytes_needed = piece.numel * piece.parameters[0].element_size()
            if bucket and size + bytes_needed > self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += bytes_needed
        if bucket:
            yield bucket

    @torch.no_grad()
    def _copy(self, piece: Piece) -> Tensor:
        source = piece.parameters[0]
        if list(source.shape) != piece.shape:
            raise WeightSyncError(f"{piece.name} was not gathered: shape {list(source.shape)}, expected {piece.shape}")
        if piece.layer is None:
            return source.detach().to("cpu", self.dtype, copy=True)
        weight, merged = merged_weight(piece.layer, ADAPTER)
        cast = merged.to(self.dtype)
        self.loss.add(weight, merged, cast)
        return cast.to("cpu")


def _pieces_of(prefix: str, module: nn.Module) -> Iterator[Piece]:
    """The tensors that this module itself owns, under their checkpoint names."""
    if isinstance(module, LoraLayer):
        base = module.get_base_layer()
        parameters = [base.weight, *(p for name, p in module.named_parameters() if "lora_" in name)]
        yield Piece(f"{prefix}.weight", parameters, module)
        return
    path = prefix.split(".")
    if any(part.startswith("lora_") for part in path):
        return
    if "original_module" in path:
        return  # replaced by the trained copy in modules_to_save
    name = ".".join(_checkpoint_path(path))
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if path[-1] == "base_layer" and parameter_name == "weight":
            continue  # merged above
        yield Piece(f"{name}.{parameter_name}" if name else parameter_name, [parameter], None)


def _checkpoint_path(path: list[str]) -> list[str]:
    """Module path without PEFT's wrappers."""
    kept = []
    for i, part in enumerate(path):
        if part == "base_layer" or part == "modules_to_save" or (i > 0 and path[i - 1] == "modules_to_save"):
            continue
        kept.append(part)
    return kept
