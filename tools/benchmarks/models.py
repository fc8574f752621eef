"""The models of a comparison: one as transformers loads it, and one of ours with packed attention. Neither is sharded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from ebft_ds.config.sections import PeftSection
from ebft_ds.engine.loading import lora_config
from ebft_ds.engine.network import install_log_prob_head, install_score_head
from ebft_ds.packing.attention import install_packed_attention, packed_attention
from ebft_ds.packing.packer import RowPacker

CHUNK = 256
"""Positions per chunk of our log-prob head: the default of a run."""


def load_plain(model: Path, options: argparse.Namespace) -> PreTrainedModel:
    """A causal language model as anybody would load it."""
    disable_progress_bar()
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa")
    loaded.config.use_cache = False
    return loaded.to(options.device).requires_grad_(False).eval()


def load_ours(model: Path, options: argparse.Namespace) -> PreTrainedModel:
    """The same with our head and with an attention that serves packed rows."""
    loaded = load_plain(model, options)
    install_log_prob_head(loaded, CHUNK)
    install_packed_attention(loaded)
    return loaded


def load_plain_reward_model(model: Path, options: argparse.Namespace) -> PreTrainedModel:
    """A sequence classifier with one label, all of it trained; a head that the checkpoint lacks is the same for every call."""
    disable_progress_bar()
    set_verbosity_error()  # of the new head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
    loaded.config.use_cache = False
    return loaded.to(options.device)


def load_our_reward_model(model: Path, options: argparse.Namespace) -> PreTrainedModel:
    """The same with our head and with an attention that serves packed rows."""
    loaded = load_plain_reward_model(model, options)
    install_score_head(loaded)
    install_packed_attention(loaded)
    return loaded


def with_adapter(model: PreTrainedModel, rank: int) -> Any:
    """PEFT around the model as in a run: every linear layer. The adapter is random (the same for every call) and not zero anywhere."""
    wrapped = get_peft_model(model, lora_config(PeftSection(use_peft=True, lora_r=rank)), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return wrapped.train()


def row_packer(options: argparse.Namespace) -> RowPacker:
    """Rows of ours, as the options ask for."""
    if options.packing == "padded":
        return RowPacker()
    return RowPacker(options.packing, packed_attention(options.attention, device=torch.device(options.device)))
