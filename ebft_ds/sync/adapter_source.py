"""An adapter's own tensors as a push: PEFT's saved names, read from ZeRO-3 shards bucket by bucket."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import deepspeed
import torch
from peft import PeftModel
from torch import Tensor, nn

from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.merge import MergeLoss
from ebft_ds.sync.transport import Bucket

ADAPTER = "default"


@dataclass(frozen=True)
class AdapterPiece:
    """One tensor of an adapter."""

    name: str
    parameter: nn.Parameter

    @property
    def shape(self) -> list[int]:
        return list(getattr(self.parameter, "ds_shape", self.parameter.shape))

    @property
    def numel(self) -> int:
        numel: int = getattr(self.parameter, "ds_numel", self.parameter.numel())
        return numel


class AdapterSource:
    """WeightSource over the LoRA matrices of `model`, cast to `dtype`; a bucket closes at `bucket_bytes`."""

    def __init__(self, model: PeftModel, dtype: torch.dtype, bucket_bytes: int, *, is_main: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._is_main = is_main
        self.loss = MergeLoss()  # stays empty: nothing is merged

    def pieces(self, *, complete: bool) -> list[AdapterPiece]:
        """All LoRA matrices, whatever `complete` says: an adapter is always sent whole."""
        found = [
            AdapterPiece(name.replace(f".{ADAPTER}.", "."), parameter)
            for name, parameter in self._model.named_parameters()
            if f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name
        ]
        if not found:
            raise WeightSyncError("sync_mode: adapter: the model has no LoRA matrices to push")
        return found

    def buckets(self, *, complete: bool) -> Generator[Bucket, None, None]:
        for bucket in self._packed():
            with deepspeed.zero.GatheredParameters([piece.parameter for piece in bucket], modifier_rank=None):
                copies = [(piece.name, self._copy(piece)) for piece in bucket] if self._is_main else []
            yield copies

    def _packed(self) -> Generator[list[AdapterPiece], None, None]:
        bucket: list[AdapterPiece] = []
        size = 0
        for piece in self.pieces(complete=True):
            needed = piece.numel * piece.parameter.element_size()
            if bucket and size + needed > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += needed
        if bucket:
            yield bucket

    def _copy(self, piece: AdapterPiece) -> Tensor:
        if list(piece.parameter.shape) != piece.shape:
            raise WeightSyncError(f"{piece.name} was not gathered: shape {list(piece.parameter.shape)}, expected {piece.shape}")
        return piece.parameter.detach().to("cpu", self._dtype, copy=True).contiguous()
