"""What a model's config.json says, read as plain JSON: enough for checks and memory arithmetic, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebft_ds.errors import ModelError


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a causal language model. 0 where config.json does not say."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied_embeddings: bool
    num_experts: int

    @property
    def embedding_parameters(self) -> int:
        """Of the input embedding; the head has as many again unless tied."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Of one decoder block: attention with grouped keys and values, gated MLP, two norms (biases neglected)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size * max(1, self.num_experts)
        return attention + mlp + 2 * self.hidden_size + self.hidden_size * self.num_experts

    @property
    def parameters(self) -> int:
        """Of the whole model, by arithmetic."""
        heads = 1 if self.tied_embeddings else 2
        return heads * self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size


def read_model_facts(model: str) -> ModelFacts | None:
    """Facts of a model folder; None when `model` is no folder (a hub name). Errors: ModelError for an unusable folder."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise ModelError(f"model {model} is a file; give the folder that holds config.json")
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            raise ModelError(f"model {model} does not exist: there is no such folder, and it is not a hub name (owner/name)")
        return None
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model folder {model} has no config.json; is it a Hugging Face model folder?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    return facts_from_config(raw)


def facts_from_config(raw: Mapping[str, Any]) -> ModelFacts:
    """Facts from a configuration as a mapping; a nested text configuration counts."""
    text: Mapping[str, Any] = raw
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(raw.get(key), Mapping):
            text = raw[key]
            break
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    return ModelFacts(
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        num_layers=_number(text, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=hidden,
        vocab_size=_number(text, "vocab_size"),
        context_length=_number(text, "max_position_embeddings", "n_positions", "max_sequence_length"),
        intermediate_size=_number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=_number(text, "head_dim") or (hidden // heads if heads else 0),
        tied_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        num_experts=_number(text, "num_local_experts", "num_experts", "n_routed_experts"),
    )


def _number(text: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(text.get(key), int):
            return int(text[key])
    return 0
