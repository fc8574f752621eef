"""torch.compile under ZeRO-3, block by block.

DeepSpeed's `engine.compile()` hands the whole network to dynamo, with a gather hook around every submodule: it traces the hooks, compiles
them anew for each module, and does not finish a first step. Here ZeRO-3 gathers each decoder block whole, so that no hook lies inside it,
and what is compiled is the block's own forward.
"""

from __future__ import annotations

import torch
from deepspeed.utils import set_z3_leaf_module
from peft import PeftModel

from ebft_ds.engine.network import LanguageNetwork, decoder_layers


def compile_blocks(network: LanguageNetwork) -> int:
    """Compiles the blocks of a network, for rows of any length; returns how many. Call it before the engine is built."""
    _, layers = decoder_layers(network.body)
    if isinstance(network.model, PeftModel):
        # No input of the first block would need a gradient, and ZeRO-3 would let go of a leaf module's parameters before its backward.
        network.base_model.enable_input_require_grads()
    for layer in layers:
        set_z3_leaf_module(layer, True)
        layer.forward = torch.compile(layer.forward, dynamic=True)
    return len(layers)
