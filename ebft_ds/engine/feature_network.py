"""The frozen feature network on an engine: the actor with its adapters off, or the frozen copy's own engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import FeatureWork
from ebft_ds.packing.rows import TokenRows


class EngineFeatureNetwork:
    """Adapters are always off: on a frozen copy there are none, and the actor's base weights never change."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def hidden_states(self, rows: TokenRows, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        return self._engine.features(FeatureWork(rows, layers, positions, use_adapters=False))
