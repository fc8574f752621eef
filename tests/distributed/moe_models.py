"""Tiny mixture-of-experts checkpoints whose router sends low token ids to experts 0 and 1, high ones to 2 and 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.distributed.small import LAYERS
from tools.random_model import make_random_model

HIGH = 256
"""Token ids from here on go to the other experts."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def moe_model(folder: Path, architecture: str) -> Path:
    """Width 32, two blocks, untied, four experts."""
    fields = {"num_layers": LAYERS, "hidden": 32, "num_heads": 2, "num_kv_heads": 1, "initializer_range": 0.15}
    make_random_model(folder, architecture=architecture, tie_word_embeddings=False, **fields, **ARCHITECTURES[architecture])  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:HIGH, 0] = 4.0
        model.model.embed_tokens.weight[HIGH:, 0] = -4.0
        for layer in model.model.layers:
            layer.mlp.gate.weight[:, 0] = torch.tensor([2.0, 2.0, -2.0, -2.0])
    model.save_pretrained(folder)
    return folder
