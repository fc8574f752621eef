"""Small models with random weights, for tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from tools.demo_text import distinct_examples
from tools.tiny_tokenizer import END, build_tokenizer


def make_random_model(
    output: Path,
    *,
    architecture: str = "llama",
    tie_word_embeddings: bool = True,
    num_layers: int = 4,
    hidden: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 512,
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Write an untrained float32 checkpoint with tokenizer and generation configuration to `output`, and return it.

    `architecture` is a transformers model type with Llama's configuration names (llama, qwen2, qwen3, mistral, gemma2, olmo2, ...);
    `config_overrides` go to its configuration. `vocab_size` defaults to the tokenizer's, which defaults to one trained on the demo text.
    """
    if tokenizer is None:
        found = distinct_examples(random.Random(seed), 200)
        tokenizer = build_tokenizer([f"{e.question} {e.reference}" for e in found], vocab_size=512)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer) if vocab_size is None else vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 8 * ((hidden * 8 // 3 + 7) // 8),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **config_overrides,
    }
    config = CONFIG_MAPPING[architecture](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_checkpoint(model, tokenizer, output)
    return output


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Model, tokenizer, and a generation configuration that stops at EOS and at the end of a turn."""
    stops = [i for i in (tokenizer.eos_token_id, tokenizer.get_vocab().get(END)) if i is not None]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
