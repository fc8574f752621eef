"""Tiny random checkpoints of many architectures."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from tools.demo_text import distinct_examples
from tools.random_model import make_random_model
from tools.tiny_tokenizer import build_tokenizer

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 16},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {  # it also saves a buffer
        **MOE,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@functools.cache
def _tokenizer() -> Any:
    found = distinct_examples(random.Random(0), 100)
    return build_tokenizer([f"{e.question} {e.reference}" for e in found], vocab_size=400)


def small_architecture(folder: Path, architecture: str, *, tied: bool) -> Path:
    """Two blocks of width 32."""
    fields: dict[str, Any] = {"num_layers": 2, "hidden": 32, "num_heads": 2, "num_kv_heads": 1, "tokenizer": _tokenizer()}
    if architecture in ("gpt_oss", "gpt_neox", "deepseek_v3"):
        fields["num_kv_heads"] = 2
    return make_random_model(folder, architecture=architecture, tie_word_embeddings=tied, **fields, **ARCHITECTURES[architecture])
