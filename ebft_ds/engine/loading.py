"""Loading models straight into ZeRO-3 shards: the actor, and the frozen copy that gives features (and the KL reference)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ebft_ds.config.sections import ModelSection, PeftSection
from ebft_ds.engine.leaf_modules import is_expert_block
from ebft_ds.engine.liger import apply_liger_kernels
from ebft_ds.engine.network import LanguageNetwork, install_log_prob_head
from ebft_ds.errors import ConfigError, ModelError
from ebft_ds.packing.attention import install_packed_attention

logger = logging.getLogger(__name__)


@contextmanager
def sharded_loading(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """from_pretrained inside loads each parameter into its ZeRO-3 partition.

    transformers only keeps a weak reference: the object must live as long as the loading does.
    """
    handle = HfDeepSpeedConfig(deepspeed_config)
    try:
        yield
    finally:
        del handle
        unset_hf_deepspeed_config()


def load_model_config(name_or_path: str, section: ModelSection) -> PretrainedConfig:
    """The checkpoint's configuration; a missing or unreadable one is a ModelError that names the path."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name_or_path, revision=section.model_revision, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model configuration at {_where(name_or_path)}: {error}") from error
    return config


def _where(name_or_path: str) -> str:
    path = Path(name_or_path)
    return str(path.resolve()) if path.exists() else f"{name_or_path!r} (no such folder; taken as a hub name)"


def load_actor(
    model: ModelSection, peft: PeftSection, deepspeed_config: dict[str, Any], *, chunk_size: int, peft_config: PeftConfig | None = None
) -> LanguageNetwork:
    """The trained network: full, or with a fresh adapter (`peft_config` replaces the one the section describes)."""
    assert model.model_name_or_path is not None
    config = load_model_config(model.model_name_or_path, model)
    with sharded_loading(deepspeed_config):
        causal_lm = _from_pretrained(AutoModelForCausalLM, model.model_name_or_path, model, config)
    if model.disable_dropout:
        disable_dropout(causal_lm)
    if model.use_liger_kernel:
        apply_liger_kernels(causal_lm)
    install_packed_attention(causal_lm)
    install_log_prob_head(causal_lm, chunk_size)
    causal_lm.config.use_cache = False
    if model.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=model.gradient_checkpointing_kwargs)
    if peft.use_peft and (model.gradient_checkpointing or any(map(is_expert_block, causal_lm.modules()))):
        # With frozen embeddings no input of the first block needs a gradient: reentrant checkpointing would cut the graph, and ZeRO-3
        # would let go of a leaf module's parameters before its backward.
        causal_lm.enable_input_require_grads()
    if not peft.use_peft:
        return LanguageNetwork(causal_lm)
    with sharded_loading(deepspeed_config):  # PEFT looks there whether it must gather the weights that DoRA takes its magnitudes from
        try:
            return LanguageNetwork(get_peft_model(causal_lm, peft_config or lora_config(peft), autocast_adapter_dtype=False))
        except ValueError as error:  # say, dropout or DoRA on experts, which PEFT can only adapt as bare parameters
            raise ConfigError(f"PEFT refuses this adapter on {type(causal_lm).__name__}: {error}") from error


def lora_config(section: PeftSection) -> PeftConfig:
    """PEFT's configuration of our adapter."""
    targets = section.lora_target_modules
    if not isinstance(targets, str) and "lm_head" in targets:
        raise ConfigError("lora_target_modules: lm_head cannot carry an adapter here; train it whole with lora_modules_to_save=[lm_head]")
    return LoraConfig(
        r=section.lora_r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=targets,
        modules_to_save=section.lora_modules_to_save or None,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        task_type="CAUSAL_LM",
    )


def feature_model_config(model: ModelSection) -> PretrainedConfig:
    """Configuration of the checkpoint that the frozen copy is made of."""
    return load_model_config(*_feature_source(model))


def _feature_source(model: ModelSection) -> tuple[str, ModelSection]:
    source = model.feature_model_name_or_path or model.model_name_or_path
    assert source is not None
    if source != model.model_name_or_path:
        model = model.model_copy(update={"model_revision": None})  # the revision is one of the actor's repository
    return source, model


def load_frozen_copy(model: ModelSection, deepspeed_config: dict[str, Any], *, deepest_layer: int, whole: bool) -> LanguageNetwork:
    """The frozen copy: only blocks up to `deepest_layer` and no head, or the whole causal model when it also gives the KL reference."""
    source, model = _feature_source(model)
    config = load_model_config(source, model)
    depth: int = config.get_text_config().num_hidden_layers
    if not whole:
        keep_layers(config.get_text_config(), deepest_layer)
    with sharded_loading(deepspeed_config):
        network = _from_pretrained(AutoModelForCausalLM if whole else AutoModel, source, model, config)
    if model.use_liger_kernel:
        apply_liger_kernels(network)
    install_packed_attention(network)
    if whole:
        install_log_prob_head(network, chunk_size=512)
    network.requires_grad_(False)
    network.eval()
    return LanguageNetwork(network, depth)


def keep_layers(config: PretrainedConfig, count: int) -> None:
    """Cuts a text configuration down to its first `count` blocks, per-layer lists included."""
    total = config.num_hidden_layers
    if count > total:  # transformers would make up the missing blocks at random
        raise ConfigError(f"feature layer {count} is asked of a feature model of {total} layers; see ebft_feature_layers")
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == total and ("layer" in name or "types" in name or "window" in name):
            setattr(config, name, value[:count])
    config.num_hidden_layers = count


def _from_pretrained(auto_class: Any, source: str, model: ModelSection, config: PretrainedConfig) -> PreTrainedModel:
    try:
        network: PreTrainedModel = auto_class.from_pretrained(
            source,
            config=config,
            revision=model.model_revision,
            dtype=getattr(torch, model.dtype),
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot load the model at {_where(source)}: {error}") from error
    return network


FUNCTIONAL_NOISE = ("attention_dropout", "residual_dropout", "router_jitter_noise", "input_jitter_noise", "jitter_noise")
"""Attributes of modules that draw without a Dropout module."""


def disable_dropout(model: nn.Module) -> None:
    """Rewards are made without dropout and sampling runs without it; training with it would only widen the off-policy gap."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in FUNCTIONAL_NOISE:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
