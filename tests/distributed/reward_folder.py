"""A finished reward model on disk: random weights, and a tokenizer, template and recipe of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from ebft_ds.data.preference import RewardEncoding
from tests.unit.small_tokenizers import chatml
from tools.random_model import make_random_model


def make_reward_model(folder: Path, *, seed: int = 1, **recipe: Any) -> Path:
    """Weights large enough that rewards differ clearly; `recipe` goes to its RewardEncoding."""
    tokenizer = chatml()
    make_random_model(folder, tokenizer=tokenizer, num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, initializer_range=0.15, seed=seed)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    RewardEncoding(**({"max_length": 64, "system_prompt": "Judge."} | recipe)).save(folder)
    return folder
