"""The engines of a run, and how rows are laid out for each."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from peft import PeftConfig

from ebft_ds.config import RecipeConfig
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived import DerivedNumbers
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.feature_network import EngineFeatureNetwork
from ebft_ds.engine.loading import feature_model_config, load_actor, load_frozen_copy
from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.engine.sizes import token_cost
from ebft_ds.errors import ConfigError
from ebft_ds.features.layers import feature_layer_indices
from ebft_ds.packing.attention import packed_attention
from ebft_ds.packing.attention.choice import AttentionName
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.style import choose_row_style
from ebft_ds.trainers.trained_engine import trained_engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engines:
    """The actor, and where features and the KL reference come from."""

    actor: ZeroEngine
    frozen_copy: ZeroEngine | None
    """None: the actor with its adapters off gives the features."""
    layer_indices: list[int]
    packer: RowPacker
    """Rows of the actor."""
    feature_packer: RowPacker
    """Rows of the feature network."""
    kl_reference: ZeroEngine | None = None
    """None: the actor with its adapters off (or no KL term)."""

    @property
    def feature_network(self) -> EngineFeatureNetwork:
        return EngineFeatureNetwork(self.frozen_copy or self.actor)


def build_engines(
    config: RecipeConfig,
    derived: DerivedNumbers,
    *,
    hidden_size: int | None,
    num_layers: int,
    peft_config: PeftConfig | None,
    optimizer: torch.optim.Optimizer | None,
) -> Engines:
    """The actor's engine with its optimizer, and a frozen copy where one is needed."""
    feature_model = config.model.feature_model_name_or_path
    if feature_model not in (None, config.model.model_name_or_path):
        num_layers = feature_model_config(config.model).get_text_config().num_hidden_layers
    layer_indices = feature_layer_indices(config.method.ebft_feature_layers, num_layers)
    actor_config = build_deepspeed_config(config, derived, "actor", hidden_size)
    network = load_actor(config.model, config.peft, actor_config, chunk_size=config.loss.logprob_chunk_size, peft_config=peft_config)
    actor = trained_engine(
        network,
        actor_config,
        optim=config.optim,
        loss=config.loss,
        steps=derived.steps or config.run.max_steps,
        optimizer=optimizer,
    )
    packer = row_packer(config, network, actor.device, "policy")
    if config.peft.use_peft and feature_model is None:
        return Engines(actor, None, layer_indices, packer, packer)
    copy_config = build_deepspeed_config(config, derived, "feature", hidden_size)
    # Full fine-tuning has no adapters to switch off: the copy then is the KL reference as well, and needs its upper layers and head.
    whole = config.loss.beta > 0 and not config.peft.use_peft
    if whole and feature_model not in (None, config.model.model_name_or_path):
        raise ConfigError("beta > 0 in full fine-tuning takes the KL reference from the frozen copy: leave out feature_model_name_or_path")
    copy = ZeroEngine(load_frozen_copy(config.model, copy_config, deepest_layer=max(layer_indices), whole=whole), copy_config)
    feature_packer = row_packer(config, copy.network, copy.device, "features")
    return Engines(actor, copy, layer_indices, packer, feature_packer, copy if whole else None)


def row_packer(config: RecipeConfig, network: LanguageNetwork, device: torch.device, what: str) -> RowPacker:
    """The layout that the recipe asks for, or that the model allows; one line in the log says which, and why it is not shared.

    Raises:
        ConfigError: an explicit `packing` that this model does not support.
    """
    choice = choose_row_style(config, network.base_model.config)
    logger.info("%s: %s rows%s", what, choice.style, f" ({choice.reason})" if choice.reason else "")
    if choice.style == "padded":
        return RowPacker()
    return RowPacker(choice.style, packed_attention(_attention_name(config, network, device), device=device), token_cost(network))


def _attention_name(config: RecipeConfig, network: LanguageNetwork, device: torch.device) -> AttentionName:
    """The back end asked for; flex has no dropout, which would only be found out in the first training step."""
    name = config.run.packing_attention
    dropout = 0.0 if config.model.disable_dropout else network.base_model.config.get_text_config().to_dict().get("attention_dropout")
    if not dropout or name not in ("auto", "flex"):
        return name
    if name == "flex":
        raise ConfigError(f"packing_attention: flex has no dropout in attention, the model's is {dropout}; set disable_dropout: true")
    if device.type != "cpu":
        logger.info("packed rows: split attention, since the model's attention has dropout")
    return "auto" if device.type == "cpu" else "split"
