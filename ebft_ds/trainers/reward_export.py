"""A trained reward model as a folder that AutoModelForSequenceClassification, `ebft-ds score` and vLLM load."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from ebft_ds.checkpoint.export import export_final
from ebft_ds.config import RewardConfig
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.reward_padding import tokenizer_with_pad
from ebft_ds.trainers.reward_parts import RewardParts


def export_reward_model(config: RewardConfig, parts: RewardParts, scale: RewardScale | None, target: Path) -> Path:
    """Collective. `final/` with its tokenizer and reward_encoding.json; with PEFT also `adapter/`. Errors: as `export_final`.

    Args:
        scale: of the rewards on held-out rows; None: not measured.
    """
    network = parts.reward.engine.network
    model = network.base_model
    model.config.architectures = [type(model).__name__]  # the checkpoint's may be a causal model's
    text_config = model.config.get_text_config()
    tokenizer = tokenizer_with_pad(parts.tokenizer, parts.encoding, text_config.vocab_size)
    model.config.pad_token_id = text_config.pad_token_id = tokenizer.pad_token_id
    measured = scale is not None and scale.usable
    encoding = msgspec.structs.replace(
        parts.encoding, mean=scale.mean if scale and measured else None, std=scale.std if scale and measured else None
    )
    return export_final(
        network,
        tokenizer,
        target,
        parts.collectives,
        dtype=getattr(torch, config.model.dtype),
        merged=config.checkpoint.export_merged,
        generation_config=None,
        write_beside=encoding.save,
    )
