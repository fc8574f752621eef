"""A model small enough for many forwards on gloo, and rollouts over its vocabulary."""

from __future__ import annotations

import random
from pathlib import Path

from tools.random_model import make_random_model

LAYERS = 2
EOS = 1


def small_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Two blocks of width 32, with weights large enough that hidden states and log-probs differ clearly between tokens."""
    return make_random_model(
        folder, num_layers=LAYERS, hidden=32, num_heads=2, num_kv_heads=1, tie_word_embeddings=tied, initializer_range=0.15, seed=seed
    )


def token_rows(seed: int, lengths: list[int]) -> list[list[int]]:
    """Rows of random ids that are no special tokens."""
    source = random.Random(seed)
    return [[source.randrange(20, 200) for _ in range(length)] for length in lengths]
