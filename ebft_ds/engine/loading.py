"""Loading models straight into ZeRO-3 shards: the actor, and the frozen copy that gives features (and the KL reference)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ebft_ds.config.sections import ModelSection, PeftSection
from ebft_ds.engine.leaf_modules import is_expert_block
from ebft_ds.engine.liger import apply_liger_kernels
from ebft_ds.engine.network import LanguageNetwork, install_log_prob_head, install_score_head
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
    install_log_prob_head(causal_lm, chunk_size)
    _prepare_for_training(causal_lm, model, peft)
    return _with_adapter(causal_lm, peft, deepspeed_config, peft_config or (lora_config(peft) if peft.use_peft else None))


def load_reward_model(
    model: ModelSection,
    peft: PeftSection,
    deepspeed_config: dict[str, Any],
    *,
    seed: int = 0,
    peft_config: PeftConfig | None = None,
    trained: bool = True,
) -> LanguageNetwork:
    """A sequence classifier with one label and a ScoreHead: of a reward model, or of a causal model's body with a new head.

    The new head is drawn from N(0, 1/(hidden + 1)), the same on every rank and for every world size. With an adapter the head is
    trained and saved beside it (`modules_to_save`). `trained=False`: frozen, in eval mode, which needs a checkpoint with a head.

    Raises:
        ModelError: no such model, a model class without a classifier, more than one label, or (frozen) no head in the checkpoint.
    """
    assert model.model_name_or_path is not None
    config = load_model_config(model.model_name_or_path, model)
    _require_one_label(config, model.model_name_or_path)
    config.num_labels = 1
    with sharded_loading(deepspeed_config):
        network, missing = _from_pretrained_reporting(AutoModelForSequenceClassification, model.model_name_or_path, model, config)
    strange = [name for name in missing if not name.startswith("score.")]
    if strange:
        raise ModelError(f"{_where(model.model_name_or_path)} lacks {', '.join(strange[:3])} ({len(strange)} weights): not a whole model")
    if missing and not trained:
        raise ModelError(
            f"{_where(model.model_name_or_path)} has no weight score.weight: it is no reward model; train one with mode: reward"
        )
    install_score_head(network)
    if missing:
        _draw_head(network.score, seed)
        logger.info("the head `score` is new: %s", model.model_name_or_path)
    if not trained:
        install_packed_attention(network)
        network.requires_grad_(False)
        network.eval()
        return LanguageNetwork(network)
    _prepare_for_training(network, model, peft)
    adapter = peft_config or (lora_config(peft, reward=True) if peft.use_peft else None)
    return _with_adapter(network, peft, deepspeed_config, adapter)


def _require_one_label(config: PretrainedConfig, name: str) -> None:
    """A classifier of several classes would silently lose its head. (A causal model's configuration states two labels by default.)"""
    is_classifier = any("SequenceClassification" in architecture for architecture in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        raise ModelError(f"{_where(name)} is a classifier of {config.num_labels} labels; a reward model has one")


def _draw_head(head: nn.Module, seed: int) -> None:
    """In the whole weight: each rank drawing its own shard would make the head depend on the world size."""
    generator = torch.Generator().manual_seed(seed)
    weight: nn.Parameter = head.weight  # type: ignore[assignment]
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if weight.numel():
            drawn = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1] + 1)
            weight.data.copy_(drawn)


def _prepare_for_training(network: PreTrainedModel, model: ModelSection, peft: PeftSection) -> None:
    if model.disable_dropout:
        disable_dropout(network)
    if model.use_liger_kernel:
        apply_liger_kernels(network)
    install_packed_attention(network)
    network.config.use_cache = False
    if model.gradient_checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=model.gradient_checkpointing_kwargs)
    if peft.use_peft and (model.gradient_checkpointing or any(map(is_expert_block, network.modules()))):
        # With frozen embeddings no input of the first block needs a gradient: reentrant checkpointing would cut the graph, and ZeRO-3
        # would let go of a leaf module's parameters before its backward.
        network.enable_input_require_grads()


def _with_adapter(
    network: PreTrainedModel, peft: PeftSection, deepspeed_config: dict[str, Any], adapter: PeftConfig | None
) -> LanguageNetwork:
    if not peft.use_peft or adapter is None:
        return LanguageNetwork(network)
    with sharded_loading(deepspeed_config):  # PEFT looks there whether it must gather the weights that DoRA takes its magnitudes from
        try:
            return LanguageNetwork(get_peft_model(network, adapter, autocast_adapter_dtype=False))
        except ValueError as error:  # say, dropout or DoRA on experts, which PEFT can only adapt as bare parameters
            raise ConfigError(f"PEFT refuses this adapter on {type(network).__name__}: {error}") from error


def lora_config(section: PeftSection, *, reward: bool = False) -> PeftConfig:
    """PEFT's configuration of our adapter; a reward model's head is trained beside it."""
    targets = section.lora_target_modules
    if not isinstance(targets, str) and "lm_head" in targets:
        raise ConfigError("lora_target_modules: lm_head cannot carry an adapter here; train it whole with lora_modules_to_save=[lm_head]")
    return LoraConfig(
        r=section.lora_r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=targets,
        modules_to_save=list(dict.fromkeys([*section.lora_modules_to_save, *(["score"] if reward else [])])) or None,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        task_type="SEQ_CLS" if reward else "CAUSAL_LM",
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
        install_log_prob_head(network, chunk_size=256)
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
    return _from_pretrained_reporting(auto_class, source, model, config)[0]


def _from_pretrained_reporting(
    auto_class: Any, source: str, model: ModelSection, config: PretrainedConfig
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of weights that its checkpoint does not have."""
    try:
        network, report = auto_class.from_pretrained(
            source,
            config=config,
            revision=model.model_revision,
            dtype=getattr(torch, model.dtype),
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot load the model at {_where(source)}: {error}") from error
    return network, sorted(report["missing_keys"])


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
