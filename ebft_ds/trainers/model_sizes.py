"""How many parameters a token passes through, for the FLOPs of a step."""

from __future__ import annotations

from ebft_ds.engine.network import LanguageNetwork, decoder_layers
from ebft_ds.engine.sizes import expert_share, used_parameters
from ebft_ds.monitor.throughput import ModelSizes
from ebft_ds.sync.source import full_numel
from ebft_ds.trainers.engines import Engines


def model_sizes(engines: Engines) -> ModelSizes:
    """Of whole parameters, however they are partitioned; of experts, the share that a token is sent to."""
    actor = engines.actor.network
    head = list(actor.base_model.get_output_embeddings().parameters())
    trained_head = [p for p in head if p.requires_grad]  # a head trained beside an adapter keeps its frozen original, unused
    other = {id(p) for p in (*head, *actor.base_model.get_input_embeddings().parameters())}
    blocks = [(name, p) for name, p in actor.named_parameters() if id(p) not in other]
    share = expert_share(actor.base_model.config)
    features = (engines.frozen_copy or engines.actor).network
    _, layers = decoder_layers(features.body)
    frozen = [(name, p) for name, p in layers[: max(engines.layer_indices)].named_parameters() if not p.requires_grad]
    return ModelSizes(
        blocks=used_parameters(blocks, share),
        trained_blocks=used_parameters([(name, p) for name, p in blocks if p.requires_grad], share),
        head=sum(full_numel(p) for p in trained_head or head),
        trained_head=sum(full_numel(p) for p in trained_head),
        feature_blocks=used_parameters(frozen, expert_share(features.base_model.config)),
    )


def reward_model_sizes(network: LanguageNetwork) -> ModelSizes:
    """Of a reward model: its head is a vector, and it has no second network."""
    table = {id(p) for p in network.base_model.get_input_embeddings().parameters()}
    blocks = [(name, p) for name, p in network.named_parameters() if id(p) not in table and ".score." not in name]
    head = [p for name, p in network.named_parameters() if ".score." in name and p.requires_grad]
    share, size = expert_share(network.base_model.config), sum(full_numel(p) for p in head)
    return ModelSizes(
        blocks=used_parameters(blocks, share),
        trained_blocks=used_parameters([(name, p) for name, p in blocks if p.requires_grad], share),
        head=size,
        trained_head=size,
        feature_blocks=0,
    )
