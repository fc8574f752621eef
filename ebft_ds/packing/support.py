"""Which row layout a model can take, judged by its configuration and its class in transformers, before any weight is read.

In shared rows tokens of different sequences stand side by side, so nothing but attention may look at other tokens, and attention must
be the one of the row. What cannot be known here is caught in the forward: blocks that did not use the row's attention, layers that ask
it for something it does not compute.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from ebft_ds.packing.rows import RowStyle

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# What a model's file passes to its attention, and what that is.
UNSUPPORTED_ARGUMENTS = {
    "s_aux=": "its attention has sinks",
    "position_bias=": "its attention adds a bias by position",
    "block_indices=": "its attention chooses blocks of keys",
    '_attn_implementation in ("eager", "sdpa")': "its attention chooses keys",
    "prepare_dynamic_mask": "its attention makes masks of its own",
}
NOT_HANDED_DOWN = {"nemotron", "moshi", "mllama", "mllama_text_model", "longcat_flash"}
"""Model types whose blocks drop the keyword arguments they do not know, or are not all attention with an index of their own."""


@dataclass(frozen=True)
class PackingSupport:
    """The densest row layout a model takes, and why no denser one."""

    style: RowStyle
    reason: str | None
    """For the log, and for the error of a run that asks for more; None for shared rows."""


def packing_support(config: PretrainedConfig) -> PackingSupport:
    """Shared rows for models whose tokens meet in causal attention only, otherwise padded ones with the reason."""
    reason = _reason(config)
    return PackingSupport("shared", None) if reason is None else PackingSupport("padded", f"{config.model_type}: {reason}")


def _reason(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "an encoder-decoder"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "not a causal language model of transformers' own, so how its tokens see each other is not known"
    text = config.get_text_config()
    found = vars(text)
    other = sorted(set(map(str, found.get("layer_types") or ())) - ATTENTION_LAYERS)
    if other:
        return f"it has layers of type {', '.join(other)}"
    if found.get("alibi"):
        return "its attention goes by the index in the row (ALiBi)"
    if found.get("reorder_and_upcast_attn"):
        return "its own attention asks by name which one runs (reorder_and_upcast_attn)"
    if found.get("is_causal") is False or found.get("use_bidirectional_attention"):
        return "its attention is not causal"
    if config.model_type in NOT_HANDED_DOWN:
        return "its blocks do not hand a packed row down to their attention"
    windowed = bool(found.get("sliding_window"))
    return _class_reason(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], windowed)


@functools.cache
def _class_reason(cls: type[PreTrainedModel], windowed: bool) -> str | None:
    if cls._is_stateful:
        return "it carries a state from token to token"
    if not cls._supports_attention_backend or not cls._can_set_attn_implementation():
        return "its layers do not take another attention"
    source = inspect.getsource(sys.modules[cls.__module__])
    for text, reason in UNSUPPORTED_ARGUMENTS.items():
        if text in source:
            return reason
    if windowed and ("sliding_window=" in source) != ("create_sliding_window_causal_mask" in source):
        return "its layers do not say whether they use the sliding window"
    return None
