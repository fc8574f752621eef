"""How the attention of a packed row reaches a model's layers: a function in transformers' attention registry.

The model's implementation becomes `ebft_sdpa` or `ebft_eager` (flash attention's keep their names). With a packed row among its
arguments the function calls the row's attention; without one it hands over to what the model had, unchanged, masks included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ebft_ds.errors import ModelError
from ebft_ds.packing.attention.scores import capped_attention
from ebft_ds.packing.packed import PackedRow
from ebft_ds.packing.support import packing_support

PREFIX = "ebft_"
# What a layer may pass that changes its result and that no packed attention computes.
NOT_HONOURED = ("s_aux", "position_bias", "cache", "output_attentions", "block_indices", "indices", "head_mask")

_wrapped: set[str] = set()
"""Implementations registered anew under their own name."""

AttentionOutput = tuple[Tensor, Tensor | None]


def install_packed_attention(model: PreTrainedModel) -> None:
    """Makes the model's attention layers take packed rows. Padded rows give the same bits as before.

    Before PEFT and DeepSpeed see the model. Does nothing to a model that `packing_support` does not give shared rows, to one whose code
    is not transformers' own (its packed forward is refused by `PackedRow.check_forward`), and nothing the second time.

    Raises:
        ModelError: the model should support it and refuses it.
    """
    if packing_support(model.config).style == "padded":
        return
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    known: Any = tuple(mapping.get(type(model.config), ()) for mapping in mappings)
    if not isinstance(model, known):
        return
    wanted = {"": _register(model.config._attn_implementation)}
    for name in model.config.sub_configs:
        sub_config = getattr(model.config, name)
        if isinstance(sub_config, PretrainedConfig) and sub_config._attn_implementation is not None:
            wanted[name] = _register(sub_config._attn_implementation)
    model.set_attn_implementation(wanted)
    if model.config.get_text_config()._attn_implementation not in wanted.values():
        raise ModelError(f"{type(model).__name__} does not take another attention. Set packing: padded")


def _register(base: str) -> str:
    """Registers the implementation around `base`, and returns its name."""
    if base.startswith(PREFIX) or base in _wrapped:
        return base
    if base not in ("sdpa", "eager"):
        # transformers loads flash attention's kernels by the name in the configuration: it keeps its name, and hands over by itself
        AttentionInterface.register(base, _attention_function(base, ALL_ATTENTION_FUNCTIONS[base]))
        _wrapped.add(base)
        return base
    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _attention_function(base, None if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _attention_function(base: str, function: Callable[..., AttentionOutput] | None) -> Callable[..., AttentionOutput]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> AttentionOutput:
        row = kwargs.pop("packed_row", None)
        if row is not None:
            return _packed(row, module, query, key, value, attention_mask, kwargs), None
        if base == "sdpa" and kwargs.get("softcap") is not None:
            return _capped(module, query, key, value, attention_mask, kwargs), None
        return (function or _own_eager(module))(module, query, key, value, attention_mask, **kwargs)

    return attention


def _own_eager(module: nn.Module) -> Callable[..., AttentionOutput]:
    """Every model file of transformers defines its own."""
    for cls in type(module).__mro__:
        own = vars(sys.modules[cls.__module__]).get("eager_attention_forward")
        if own is not None:
            function: Callable[..., AttentionOutput] = own
            return function
    raise ModelError(f"{type(module).__name__} has no eager attention of its own: set attn_implementation: sdpa")


def _packed(
    row: PackedRow, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    refused = [name for name in NOT_HONOURED if kwargs.get(name) is not None and kwargs[name] is not False]
    if mask is not None and mask.shape != (1, 1, 1, 1):  # the row's own stand-in has this shape
        refused.append("a mask of its own")
    if not _causal(module, kwargs):
        refused.append("is_causal=False")
    if refused:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(refused)} to its attention, which packed rows do not honour. Set packing: padded"
        )
    output = row.attention(
        query,
        key,
        value,
        scaling=kwargs.get("scaling"),
        dropout=kwargs.get("dropout", 0.0),
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    row.served.add(int(module.layer_idx))  # type: ignore[arg-type]
    return output


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _capped(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """Padded rows of a model with a soft cap on sdpa, which transformers' own function ignores without a word."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and queries > 1 and _causal(module, kwargs):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    output = capped_attention(
        query, key, value, mask, scaling=kwargs.get("scaling"), dropout=kwargs.get("dropout", 0.0), softcap=kwargs["softcap"]
    )
    return output.transpose(1, 2).contiguous()
