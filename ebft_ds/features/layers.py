"""Which hidden states carry the features (METHOD section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebft_ds.errors import ConfigError


def feature_layer_indices(fractions: Sequence[float | int], num_layers: int) -> list[int]:
    """Indices into `hidden_states` for depth fractions or layer numbers.

    Index k is the output of block k; index `num_layers` is the output after the final norm; index 0 (the embeddings) is
    never chosen. A float f in (0, 1] picks clamp(floor(f * num_layers + 1e-9), 1, num_layers). An int in [1, num_layers]
    is a layer number, so `1` is the first block and `1.0` the last layer.

    Order and duplicates are kept: fractions that fall on one layer of a shallow model repeat it, so the feature width
    depends on the number of entries alone.

    Raises:
        ConfigError: no entry, or an entry that is neither a fraction in (0, 1] nor a layer number of this model.
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers is {num_layers}; a model with at least one layer is needed")
    if not fractions:
        raise ConfigError("ebft_feature_layers is empty: name at least one depth fraction in (0, 1] or layer number")
    return [_layer_index(entry, num_layers) for entry in fractions]


def _layer_index(entry: float | int, num_layers: int) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        raise ConfigError(f"ebft_feature_layers: {entry!r} is neither a fraction in (0, 1] nor a layer number")
    if isinstance(entry, int):
        if not 1 <= entry <= num_layers:
            raise ConfigError(f"ebft_feature_layers: layer number {entry} is not in 1..{num_layers} (a fraction is written 0.5 or 1.0)")
        return entry
    if not 0.0 < entry <= 1.0:  # NaN fails this too
        raise ConfigError(f"ebft_feature_layers: fraction {entry!r} is not in (0, 1]; a layer number is written as an integer")
    return min(max(math.floor(entry * num_layers + 1e-9), 1), num_layers)
