"""The frozen feature network on an engine: the actor with its adapters off, or the frozen copy's own engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import FeatureWork
from ebft_ds.packing.padded import pad_rows
from ebft_ds.packing.rows import TokenRows

PROBE_TOKENS = 64


class EngineFeatureNetwork:
    """Adapters are always off: on a frozen copy there are none, and the actor's base weights never change."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def hidden_states(self, rows: TokenRows, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        return self._engine.features(FeatureWork(rows, layers, positions, use_adapters=False))

    def identity(self, layers: Sequence[int]) -> str:
        """Digest of the states of one fixed sequence, bit for bit: weights, dtype and kernels show in them, wherever ZeRO-3 keeps the
        weights. So a model that was replaced in its folder is another one (embeddings of tokens that the sequence lacks do not show)."""
        vocabulary = self._engine.network.base_model.config.get_text_config().vocab_size
        ids = [7919 * (i + 1) % vocabulary for i in range(PROBE_TOKENS)]
        states = self.hidden_states(pad_rows([ids], device=self.device), layers, torch.arange(PROBE_TOKENS, device=self.device))
        digest = hashlib.blake2b(digest_size=16)
        for layer in states:
            digest.update(str(layer.dtype).encode())
            digest.update(layer.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
