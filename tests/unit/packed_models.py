"""Small models in memory, sequences to pack, and the same sequences forwarded one by one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ebft_ds.engine.network import FeatureWork, LanguageNetwork, LogProbWork, install_log_prob_head
from ebft_ds.packing.padded import pad_rows
from ebft_ds.packing.rows import RowBatch
from tests.unit.small_architectures import ARCHITECTURES

WINDOW = 5
LAYERS = 2
LORA_TARGETS = ["q_proj", "v_proj", "qkv_proj", "query_key_value", "o_proj", "dense_4h_to_h", "down_proj", "c_attn"]
MIXED = ["sliding_attention", "full_attention"]
# Windows shorter than the sequences, wherever the model has them.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "layer_types": MIXED, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": MIXED},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED},
}


@dataclass(frozen=True)
class Sequence:
    group: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completion_ids]


def some_sequences() -> list[Sequence]:
    """Three groups: three branches, one sequence alone, two branches; the longest sequences are longer than the window."""
    ids = torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(3)).tolist()

    def take(count: int) -> tuple[int, ...]:
        return tuple(ids.pop() for _ in range(count))

    found = []
    for group, (prompt_length, branches) in enumerate([(7, (3, 1, 6)), (2, (9,)), (5, (4, 4))]):
        prompt = take(prompt_length)
        found += [Sequence(group, prompt, take(length)) for length in branches]
    return found


def small_model(architecture: str, implementation: str = "sdpa", **fields: Any) -> PreTrainedModel:
    """Weights large enough that who attends to whom shows in the numbers."""
    settings: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = CONFIG_MAPPING[architecture](**(settings | ARCHITECTURES.get(architecture, {}) | WINDOWED.get(architecture, {}) | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    return model.eval()


def as_network(model: PreTrainedModel, *, lora: bool) -> LanguageNetwork:
    """As the loader builds it; the adapter does not start at zero."""
    model = copy.deepcopy(model)
    install_log_prob_head(model, chunk_size=8)
    if not lora:
        return LanguageNetwork(model)
    model.enable_input_require_grads()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=LORA_TARGETS))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return LanguageNetwork(adapted)


def packed_features(network: LanguageNetwork, batch: RowBatch, layers: list[int], *, adapters: bool = False) -> list[Tensor]:
    """Hidden states of all tokens of all sequences, in order."""
    lengths = [(place, place.prompt_length + place.branch_length) for place in batch.places]
    positions = torch.tensor([place.flat(t) for place, length in lengths for t in range(length)])
    return network(FeatureWork(batch.rows, layers, positions, adapters))


def separate_features(network: LanguageNetwork, sequences: list[Sequence], layers: list[int], *, adapters: bool = False) -> list[Tensor]:
    found = [network(FeatureWork(pad_rows([s.ids]), layers, torch.arange(len(s.ids)), adapters)) for s in sequences]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def packed_log_probs(network: LanguageNetwork, batch: RowBatch, sequences: list[Sequence]) -> Tensor:
    """Of every completion token of every sequence, in order."""
    positions = [place.predictor(t) for place in batch.places for t in range(place.branch_length)]
    targets = torch.tensor([token for s in sequences for token in s.completion_ids])
    return network(LogProbWork(batch.rows, torch.tensor(positions), targets, torch.ones(len(positions))))[0]


def separate_log_probs(network: LanguageNetwork, sequences: list[Sequence]) -> Tensor:
    found = []
    for s in sequences:
        positions = torch.arange(len(s.prompt_ids) - 1, len(s.ids) - 1)
        found.append(network(LogProbWork(pad_rows([s.ids]), positions, torch.tensor(s.completion_ids), torch.ones(len(positions))))[0])
    return torch.cat(found)


def gradients(network: LanguageNetwork, log_probs: Tensor) -> dict[str, Tensor]:
    """Of a weighted sum of the log-probs."""
    network.zero_grad(set_to_none=True)
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None}


def largest_gap(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest wanted value (or to `floor`, where all wanted values are rounding errors)."""
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), floor)
