"""Memory of one rank by arithmetic from config.json: an estimate to plan by, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ebft_ds.config.derived import DerivedNumbers
from ebft_ds.config.derived_reward import RewardNumbers
from ebft_ds.config.engine_choice import rollout_engine_of
from ebft_ds.config.model_facts import ModelFacts
from ebft_ds.config.recipe import RecipeConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER_AND_MOMENTS = 12
"""float32 master weight and two Adam moments."""
_ACTIVATIONS_PER_TOKEN_AND_LAYER = 16
"""Tensors of hidden size kept for the backward of one block with a fused attention kernel (about; a gated MLP counts 3 to 4 times)."""


@dataclass(frozen=True)
class MemoryItem:
    """One line of the estimate."""

    label: str
    bytes: int
    where: str


def adapter_parameters(config: RecipeConfig, facts: ModelFacts) -> int:
    """Trained parameters of a LoRA on all linear layers of a decoder with a gated MLP."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    heads, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    widths = 2 * (hidden + heads) + 2 * (hidden + kv) + 3 * (hidden + inner)
    return facts.num_layers * config.peft.lora_r * widths


def deepest_layer(config: RecipeConfig, facts: ModelFacts) -> int:
    """Blocks that a frozen copy holds."""
    layers = [value if isinstance(value, int) else int(value * facts.num_layers + 1e-9) for value in config.method.ebft_feature_layers]
    return min(facts.num_layers, max([1, *layers]))


def estimate_memory(config: RecipeConfig, facts: ModelFacts, derived: DerivedNumbers | RewardNumbers) -> list[MemoryItem]:
    """Items of one rank, and of the rollout engine. A reward model has neither that nor features."""
    size, ranks = _BYTES[config.model.dtype], derived.world_size
    trained = adapter_parameters(config, facts) if config.peft.use_peft else facts.parameters
    held = facts.parameters + (trained if config.peft.use_peft else 0)
    items = [
        MemoryItem("actor weights, partitioned", held * size // ranks, "each rank"),
        MemoryItem("gradients, partitioned", trained * size // ranks, "each rank"),
        MemoryItem("master weights and Adam moments", trained * _MASTER_AND_MOMENTS // ranks, "each rank"),
        MemoryItem("layers gathered at once", 2 * max(facts.layer_parameters, facts.embedding_parameters) * size, "each rank"),
    ]
    if isinstance(derived, RewardNumbers):
        return [*items, MemoryItem("activations of one micro-batch", _activations(config, facts, derived, size), "each rank")]
    if not config.peft.use_peft or config.model.feature_model_name_or_path:
        copied = facts.embedding_parameters + deepest_layer(config, facts) * facts.layer_parameters
        items.append(MemoryItem("frozen feature copy, partitioned", copied * size // ranks, "each rank"))
    items += [
        MemoryItem("activations of one micro-batch", _activations(config, facts, derived, size), "each rank"),
        MemoryItem("feature forward", config.method.scoring_token_budget * facts.hidden_size * size * 8, "each rank"),
        MemoryItem("log-prob head", _head(config, facts, size), "each rank"),
        MemoryItem("weight push, two buckets", int(2 * config.rollout.sync_bucket_mb * 2**20), "rank 0"),
    ]
    if config.method.ebft_rl_coef > 0:
        items.append(_server(config, facts) if rollout_engine_of(config) == "vllm" else _embedded(config, facts))
    return items


def _activations(config: RecipeConfig, facts: ModelFacts, derived: DerivedNumbers | RewardNumbers, size: int) -> int:
    """Of a full micro-batch: packed rows up to the token budget, padded ones up to their number as well."""
    tokens = derived.train_token_budget
    if config.run.packing == "padded":
        responses = 2 if isinstance(derived, RewardNumbers) else 1
        tokens = min(tokens, config.run.per_device_train_batch_size * responses * config.data.max_seq_length)
    per_layer = tokens * facts.hidden_size * size
    if config.model.gradient_checkpointing:
        return per_layer * (facts.num_layers + _ACTIVATIONS_PER_TOKEN_AND_LAYER)
    return per_layer * facts.num_layers * _ACTIVATIONS_PER_TOKEN_AND_LAYER


def _head(config: RecipeConfig, facts: ModelFacts, size: int) -> int:
    """One chunk of logits in float32, before that in `dtype`, once more for the entropy; the float32 gradient of a trained head."""
    per_logit = 4 + (4 if config.loss.log_entropy else 0) + (size if size < 4 else 0)
    trained = not config.peft.use_peft or "lm_head" in config.peft.lora_modules_to_save
    return facts.vocab_size * (config.loss.logprob_chunk_size * per_logit + (4 * facts.hidden_size if trained else 0))


def _server(config: RecipeConfig, facts: ModelFacts) -> MemoryItem:
    """Its key/value cache takes what `vllm_gpu_memory_utilization` leaves, or `vllm_kv_cache_memory_bytes`."""
    shards = config.vllm.vllm_tensor_parallel_size * config.vllm.vllm_pipeline_parallel_size
    size = _BYTES[config.rollout.rollout_dtype or config.model.dtype]
    return MemoryItem("weights, beside its key/value cache", facts.parameters * size // shards, "vLLM, each worker")


def _embedded(config: RecipeConfig, facts: ModelFacts) -> MemoryItem:
    size = _BYTES[config.rollout.rollout_dtype or config.model.dtype]
    cache = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * size
    held = facts.parameters * size + config.rollout.rollout_batch_size * config.data.max_seq_length * cache
    return MemoryItem("weights and key/value cache", held, "rollout process")
