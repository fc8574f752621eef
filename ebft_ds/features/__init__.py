"""Frozen features of completions and references: which layers, which tokens, how pooled, how whitened."""

from ebft_ds.features.eos import FeatureEos, feature_length, feature_span, resolve_feature_eos
from ebft_ds.features.layers import feature_layer_indices
from ebft_ds.features.pooling import FeatureNorm, pool_features, pool_hidden_states, unit_normalize
from ebft_ds.features.spans import EmbedMethod
from ebft_ds.features.whitening import WhitenedGroups, WhiteningKind, default_whitening_rtol, whiten_groups, whitening_kind

__all__ = [
    "EmbedMethod",
    "FeatureEos",
    "FeatureNorm",
    "WhitenedGroups",
    "WhiteningKind",
    "default_whitening_rtol",
    "feature_layer_indices",
    "feature_length",
    "feature_span",
    "pool_features",
    "pool_hidden_states",
    "resolve_feature_eos",
    "unit_normalize",
    "whiten_groups",
    "whitening_kind",
]
