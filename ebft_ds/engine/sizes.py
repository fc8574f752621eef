"""Parameters that one token passes through."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PretrainedConfig

from ebft_ds.engine.network import LanguageNetwork, decoder_layers
from ebft_ds.packing.cost import TokenCost

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


def expert_share(config: PretrainedConfig) -> float:
    """Experts per token over experts per block; 1 without experts, or where the configuration names them in no known way."""
    text = config.get_text_config()
    total, used = _first_number(text, EXPERTS), _first_number(text, EXPERTS_PER_TOKEN)
    return 1.0 if total is None or used is None else used / total


def _first_number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    # By attribute: configurations map further names to their own, which a dictionary of them does not show.
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def used_parameters(parameters: Iterable[tuple[str, nn.Parameter]], share: float) -> int:
    """Of whole parameters, however they are partitioned; of experts, the share that a token is sent to."""
    return round(sum(_whole(p) * (share if ".experts." in name else 1.0) for name, p in parameters))


def token_cost(network: LanguageNetwork) -> TokenCost:
    """What plans for this network balance: linear layers and attention, of its last block."""
    config = network.base_model.config.get_text_config()
    _, layers = decoder_layers(network.body)
    block = used_parameters(((f".{name}", p) for name, p in layers[-1].named_parameters()), expert_share(config))
    heads = config.num_attention_heads
    head_width = config.to_dict().get("head_dim") or config.hidden_size // heads
    return TokenCost.of_model(attention_width=heads * head_width, layer_parameters=block)


def _whole(parameter: nn.Parameter) -> int:
    numel: int = parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
    return numel
