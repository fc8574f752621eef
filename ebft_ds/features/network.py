"""What the scorer needs of the frozen feature network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ebft_ds.packing.padded import PaddedRows


class FeatureNetwork(Protocol):
    """The actor with its adapters off, or a frozen copy. Every call is a ZeRO-3 forward: collective, the same number on every rank."""

    @property
    def device(self) -> torch.device: ...

    def hidden_states(self, rows: PaddedRows, layers: Sequence[int]) -> list[Tensor]:
        """One [B, T, H] tensor per layer index (k = output of block k, L = after the final norm), without gradient, in eval mode."""
        ...
