"""Pooling hidden states into one feature per sequence, at token positions taken from known lengths (METHOD section 2).

Positions never come from pad ids, attention masks or the padding side. Whatever stands at other positions, NaN included,
has no influence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from ebft_ds.errors import ConfigError, DataError
from ebft_ds.features.spans import EmbedMethod, FeatureSpans, TokenRange, check_method, feature_spans
from ebft_ds.packing.rows import Place

FeatureNorm = Literal["pooled", "token", "per_layer"]

NORM_EPS = 1e-12
"""Smallest norm divided by; a zero vector stays zero."""


def unit_normalize(vectors: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """L2-normalise the last axis; zero vectors stay zero."""
    norms: Tensor = vector_norm(vectors, dim=-1, keepdim=True).clamp_min(NORM_EPS)
    return vectors / norms


def pool_hidden_states(
    hidden: Float[Tensor, "b t h"],
    completion_start: Int[Tensor, " b"],
    completion_length: Int[Tensor, " b"],
    method: EmbedMethod | str,
    *,
    prompt_start: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b d"]:
    """Pool one layer's hidden states; D = H, or 3H for `concat`.

    Args:
        hidden: hidden states, padded on either side.
        completion_start: absolute position in T of the first completion token.
        completion_length: completion tokens that count (a final EOS that should not count is left out by the caller).
        method: `last_token`; `completion_mean`; `mean_pooling` (prompt and completion); `concat` (the tokens at a quarter, half
            and three quarters of the completion: offsets floor(q * length), clamped, in this order).
        prompt_start: absolute position of the first prompt token, required by `mean_pooling`, where prompt and completion touch.

    Returns:
        Pooled states in float32 (float64 for float64 input). Length 0 gives zeros.

    Raises:
        ConfigError: unknown method, or `mean_pooling` without `prompt_start`.
        DataError: a span that does not lie inside T.
    """
    check_method(method)
    if method == "mean_pooling" and prompt_start is None:
        raise ConfigError("mean_pooling averages over prompt and completion: pass prompt_start")
    width = hidden.shape[1]
    starts, lengths = completion_start.tolist(), completion_length.tolist()
    firsts = starts if prompt_start is None or method != "mean_pooling" else prompt_start.tolist()
    for row, (first, start, length) in enumerate(zip(firsts, starts, lengths, strict=True)):
        if length < 0 or (length > 0 and not 0 <= first <= start <= start + length <= width):
            raise DataError(
                f"row {row}: completion tokens [{start}, {start + length}) after first token {first} "
                f"do not lie inside the {width} positions of the hidden states"
            )
    places = [Place(b * width, width, (b + 1) * width, 0) for b in range(hidden.shape[0])]
    ranges = [TokenRange(start, length, first) for first, start, length in zip(firsts, starts, lengths, strict=True)]
    spans = feature_spans(places, ranges, method).to(hidden.device)
    return pool_spans(hidden.flatten(0, 1)[spans.positions], spans)


def pool_spans(states: Float[Tensor, "n h"], spans: FeatureSpans) -> Float[Tensor, "f d"]:
    """Pool one layer's states at `spans.positions`; D = H, or 3H for `concat`. At least float32; a feature without tokens is zero."""
    # Summed span by span, in order: the same on every device and in every run, which an unordered scatter-add would not be.
    sums: Tensor = torch.segment_reduce(_widen(states), "sum", lengths=spans.lengths, axis=0)
    sums = torch.cat([sums, sums.new_zeros(1, sums.shape[1])])
    pooled = sums[spans.pieces].sum(dim=1) / spans.counts[:, None]
    features: Tensor = pooled.view(-1, spans.slots * sums.shape[1])
    return features


def pool_features(
    layers: Sequence[Float[Tensor, "n h"]], spans: FeatureSpans, *, norm: FeatureNorm | str = "pooled"
) -> Float[Tensor, "f d"]:
    """Unit-norm features from the selected layers' states at `spans.positions`; D = L*H, or 3*L*H for `concat` (position-major).

    `norm` (`ebft_feature_norm`):
        `pooled`: concatenate, pool, then one L2 normalisation.
        `token`: each token's concatenated state is L2-normalised before pooling (the authors' code), the pooled vector again after it.
        `per_layer`: each layer's pooled state is L2-normalised, then divided by sqrt(L), so that every layer weighs the same.

    Computed and returned in float32 (float64 for float64 input). A feature without tokens is zero.

    Raises:
        ConfigError: an unknown `norm`, or no layer.
    """
    if not layers:
        raise ConfigError("no hidden states were given: select at least one feature layer")
    if norm not in get_args(FeatureNorm):
        raise ConfigError(f"ebft_feature_norm is {norm!r}; use one of {', '.join(get_args(FeatureNorm))}")
    token_norm = _token_norms(layers) if norm == "token" else None
    pooled: list[Tensor] = []
    for layer in layers:
        states = layer if token_norm is None else _widen(layer) / token_norm[:, None]
        vector = pool_spans(states, spans)
        pooled.append(unit_normalize(vector) / math.sqrt(len(layers)) if norm == "per_layer" else vector)
    width = layers[0].shape[1]
    by_position = [vector.unflatten(1, (-1, width)) for vector in pooled]
    features = torch.cat(by_position, dim=2).flatten(1)
    return features if norm == "per_layer" else unit_normalize(features)


def _widen(states: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """At least float32: half precision would lose the differences between completions."""
    return states if states.dtype == torch.float64 else states.float()


def _token_norms(layers: Sequence[Float[Tensor, "n h"]]) -> Float[Tensor, " n"]:
    squares = [_widen(layer).square().sum(dim=-1) for layer in layers]
    return torch.stack(squares).sum(dim=0).sqrt().clamp_min(NORM_EPS)
