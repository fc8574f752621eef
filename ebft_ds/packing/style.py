"""Which row layout a run uses: what the recipe asks for, or the best that the model allows."""

from __future__ import annotations

from typing import Literal

from transformers import PretrainedConfig

from ebft_ds.errors import ConfigError
from ebft_ds.packing.support import PackingSupport, packing_support

_ALLOWED = {"shared": ("shared", "unshared", "padded"), "unshared": ("unshared", "padded"), "padded": ("padded",)}


def choose_row_style(
    packing: Literal["auto", "shared", "unshared", "padded"], config: PretrainedConfig, attn_implementation: str
) -> PackingSupport:
    """The style of a model's rows, and why it is not `shared` where it is not.

    Args:
        packing, attn_implementation: as in the recipe.
        config: of the model, as its checkpoint has it.

    Raises:
        ConfigError: `packing` asks for what this model does not support.
    """
    best = packing_support(config)
    if best.style != "padded" and attn_implementation == "flash_attention_2":
        best = PackingSupport("padded", "attn_implementation: flash_attention_2 keeps the model's own kernels; sdpa packs")
    if packing == "auto":
        return best
    if packing not in _ALLOWED[best.style]:
        raise ConfigError(f"packing: {packing} does not work with this model: {best.reason}; set packing: {best.style}, or auto")
    return PackingSupport(packing, None if packing == "shared" else "as packing says")
