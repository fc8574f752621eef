"""Which row layout a run uses: what the recipe asks for, or the best that the model allows."""

from __future__ import annotations

from transformers import PretrainedConfig

from ebft_ds.config import RecipeConfig
from ebft_ds.errors import ConfigError
from ebft_ds.packing.support import PackingSupport, packing_support

_ALLOWED = {"shared": ("shared", "unshared", "padded"), "unshared": ("unshared", "padded"), "padded": ("padded",)}


def choose_row_style(config: RecipeConfig, model_config: PretrainedConfig) -> PackingSupport:
    """The style of a model's rows, and why it is not `shared` where it is not.

    Args:
        config: the recipe (packing, attn_implementation, trust_remote_code).
        model_config: as the checkpoint has it.

    Raises:
        ConfigError: `packing` asks for what this model does not support.
    """
    packing, best = config.run.packing, _best(config, model_config)
    if packing == "auto":
        return best
    if packing not in _ALLOWED[best.style]:
        raise ConfigError(f"packing: {packing} does not work with this model: {best.reason}; set packing: {best.style}, or auto")
    return PackingSupport(packing, None if packing == "shared" else "as packing says")


def rotary_limit(model_config: PretrainedConfig) -> int | None:
    """Tokens from which on the longest sequence of a forward changes the rotary frequencies of all (dynamic and longrope scaling)."""
    text = model_config.get_text_config()
    rope = text.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return None
    limit = rope.get("original_max_position_embeddings") or text.to_dict().get("original_max_position_embeddings")
    return int(limit or text.max_position_embeddings)


def _best(config: RecipeConfig, model_config: PretrainedConfig) -> PackingSupport:
    best = packing_support(model_config)
    if best.style == "padded":
        return best
    if config.model.attn_implementation == "flash_attention_2":
        return PackingSupport("padded", "attn_implementation: flash_attention_2 keeps the model's own kernels; sdpa packs")
    if config.model.trust_remote_code and "AutoModelForCausalLM" in (model_config.to_dict().get("auto_map") or {}):
        return PackingSupport("padded", "its checkpoint brings model code, and how its tokens see each other is not known")
    return best
