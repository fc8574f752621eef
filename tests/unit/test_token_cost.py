"""What plans balance follows from the model's own sizes."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.engine.sizes import expert_share, token_cost


def test_a_pair_costs_its_share_of_the_blocks_operations() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6
    )
    network = LanguageNetwork(AutoModelForCausalLM.from_config(config))
    block = 16 * 6 * (2 * 4 + 2 * 2) + 3 * 16 * 24 + 2 * 16
    assert token_cost(network).per_pair == pytest.approx(4 * 4 * 6 / (2 * block))


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    def cost(experts: int) -> float:
        config = Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, moe_intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=8, num_experts=experts, num_experts_per_tok=2,
        )  # fmt: skip
        return token_cost(LanguageNetwork(AutoModelForCausalLM.from_config(config))).per_pair

    assert cost(8) == pytest.approx(cost(4), rel=0.01), "only the router grows"


def test_names_of_experts_differ() -> None:
    config = LlamaConfig()
    config.num_experts, config.top_k_experts = 8, 2
    assert expert_share(config) == 0.25
    config.top_k_experts = None
    assert expert_share(config) == 1.0
