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

EmbedMethod = Literal["last_token", "mean_pooling", "completion_mean", "concat"]
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
    first = _first_position(completion_start, method, prompt_start)
    _check_spans(first, completion_start, completion_length, hidden.shape[1])
    if method in ("mean_pooling", "completion_mean"):
        return _mean(hidden, first, completion_start + completion_length, completion_length > 0)
    offsets = _offsets(completion_length, method)
    positions = (completion_start[:, None] + offsets).clamp(0, hidden.shape[1] - 1)
    picked = _widen(hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2])))
    return picked.masked_fill((completion_length == 0)[:, None, None], 0.0).flatten(1)


def pool_features(
    layers: Sequence[Float[Tensor, "b t h"]],
    completion_start: Int[Tensor, " b"],
    completion_length: Int[Tensor, " b"],
    method: EmbedMethod | str,
    *,
    prompt_start: Int[Tensor, " b"] | None = None,
    norm: FeatureNorm | str = "pooled",
) -> Float[Tensor, "b d"]:
    """Unit-norm features from the selected layers, concatenated; D = L*H, or 3*L*H for `concat` (position-major).

    `norm` (`ebft_feature_norm`):
        `pooled`: concatenate, pool, then one L2 normalisation.
        `token`: each token's concatenated state is L2-normalised before pooling (the authors' code), the pooled vector again after it.
        `per_layer`: each layer's pooled state is L2-normalised, then divided by sqrt(L), so that every layer weighs the same.

    Computed and returned in float32 (float64 for float64 input). Length 0 gives zeros. Spans and errors as in
    `pool_hidden_states`; an unknown `norm` or no layer is a ConfigError.
    """
    if not layers:
        raise ConfigError("no hidden states were given: select at least one feature layer")
    if norm not in get_args(FeatureNorm):
        raise ConfigError(f"ebft_feature_norm is {norm!r}; use one of {', '.join(get_args(FeatureNorm))}")
    token_norm = _token_norms(layers) if norm == "token" else None
    pooled: list[Tensor] = []
    for layer in layers:
        states = layer if token_norm is None else _widen(layer) / token_norm[:, :, None]
        vector = pool_hidden_states(states, completion_start, completion_length, method, prompt_start=prompt_start)
        pooled.append(unit_normalize(vector) / math.sqrt(len(layers)) if norm == "per_layer" else vector)
    width = layers[0].shape[2]
    by_position = [vector.unflatten(1, (-1, width)) for vector in pooled]
    features = torch.cat(by_position, dim=2).flatten(1)
    return features if norm == "per_layer" else unit_normalize(features)


def _widen(states: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """At least float32: half precision would lose the differences between completions."""
    return states if states.dtype == torch.float64 else states.float()


def _first_position(completion_start: Int[Tensor, " b"], method: str, prompt_start: Int[Tensor, " b"] | None) -> Int[Tensor, " b"]:
    if method not in get_args(EmbedMethod):
        raise ConfigError(f"ebft_embed_method is {method!r}; use one of {', '.join(get_args(EmbedMethod))}")
    if method != "mean_pooling":
        return completion_start
    if prompt_start is None:
        raise ConfigError("mean_pooling averages over prompt and completion: pass prompt_start")
    return prompt_start


def _check_spans(first: Int[Tensor, " b"], start: Int[Tensor, " b"], length: Int[Tensor, " b"], width: int) -> None:
    outside = (length < 0) | ((length > 0) & ((first < 0) | (start < first) | (start + length > width)))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise DataError(
            f"row {row}: completion tokens [{int(start[row])}, {int(start[row] + length[row])}) after first token {int(first[row])} "
            f"do not lie inside the {width} positions of the hidden states"
        )


def _mean(hidden: Float[Tensor, "b t h"], first: Int[Tensor, " b"], end: Int[Tensor, " b"], nonempty: Tensor) -> Float[Tensor, "b h"]:
    position = torch.arange(hidden.shape[1], device=hidden.device)
    inside = (position >= first[:, None]) & (position < end[:, None]) & nonempty[:, None]
    # masked_fill, not a product with 0: padding may hold NaN
    total = _widen(hidden).masked_fill(~inside[:, :, None], 0.0).sum(dim=1)
    return total / inside.sum(dim=1, keepdim=True).clamp_min(1)


def _offsets(length: Int[Tensor, " b"], method: str) -> Int[Tensor, "b p"]:
    last = (length - 1).clamp_min(0)
    if method == "last_token":
        return last[:, None]
    quarters = torch.arange(1, 4, device=length.device)
    return torch.minimum(length[:, None] * quarters // 4, last[:, None])


def _token_norms(layers: Sequence[Float[Tensor, "b t h"]]) -> Float[Tensor, "b t"]:
    squares = [_widen(layer).square().sum(dim=-1) for layer in layers]
    return torch.stack(squares).sum(dim=0).sqrt().clamp_min(NORM_EPS)
