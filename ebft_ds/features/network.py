"""What the scorer needs of the frozen feature network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ebft_ds.packing.rows import TokenRows


class FeatureNetwork(Protocol):
    """The actor with its adapters off, or a frozen copy. Every call is a ZeRO-3 forward: collective, the same number on every rank."""

    @property
    def device(self) -> torch.device: ...

    def hidden_states(self, rows: TokenRows, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        """At flat `positions` (int64 [N]) of the rows, one [N, H] tensor per layer index (k = output of block k, L = after the final
        norm), without gradient, in eval mode."""
        ...

    def identity(self, layers: Sequence[int]) -> str:
        """What tells this network's states at `layers` from another network's, whatever the files are called. Collective; needed only
        where features are kept."""
        ...
