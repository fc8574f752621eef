"""The feature forwards of one step: planned over ranks, laid out as rows, pooled; the same number of them on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ebft_ds.features.network import FeatureNetwork
from ebft_ds.features.pooling import pool_features
from ebft_ds.features.scoring_layout import FeatureSequence
from ebft_ds.features.spans import feature_spans
from ebft_ds.packing.packer import RowPacker


@dataclass(frozen=True)
class Pooling:
    """Which features are taken of the hidden states."""

    layers: list[int]
    method: str
    norm: str


@dataclass
class Forwarded:
    """What this rank forwarded. Dummy rows are not counted."""

    features: dict[int, Tensor] = field(default_factory=dict)
    """Sequence -> [width], float32, CPU."""
    width: int = 0
    """Of the features, also on a rank that made none."""
    dtype: torch.dtype = torch.float32
    """What the network computed in."""
    real_tokens: int = 0
    padded_tokens: int = 0
    unshared_tokens: int = 0


def forward_features(
    sequences: Sequence[FeatureSequence],
    micro_batches: Sequence[Sequence[int]],
    network: FeatureNetwork,
    packer: RowPacker,
    pooling: Pooling,
) -> Forwarded:
    """Collective: every rank brings the same number of micro-batches (of indices into `sequences`); an empty one runs the dummy row."""
    done = Forwarded()
    for batch in micro_batches:
        chosen = [sequences[i] for i in batch]
        built = packer.build(chosen, device=network.device)
        spans = feature_spans(built.places, [s.tokens for s in chosen], pooling.method).to(network.device)
        hidden = network.hidden_states(built.rows, pooling.layers, spans.positions)
        done.width = spans.slots * sum(states.shape[1] for states in hidden)
        done.dtype = hidden[0].dtype
        if not batch:
            continue
        done.real_tokens += built.rows.real_tokens
        done.padded_tokens += built.rows.input_ids.numel()
        done.unshared_tokens += built.unshared_tokens
        pooled = pool_features(hidden, spans, norm=pooling.norm).float()
        done.features |= dict(zip(batch, pooled.cpu(), strict=True))
    return done
