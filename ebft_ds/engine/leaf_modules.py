"""Parts of a network that ZeRO-3 must gather at once, not submodule by submodule."""

from __future__ import annotations

import logging

from deepspeed.utils import set_z3_leaf_module
from peft.tuners.lora import ParamWrapper
from torch import nn

logger = logging.getLogger(__name__)


def is_expert_block(module: nn.Module) -> bool:
    """The blocks' classes go by many names; all keep their experts under this one."""
    return "experts" in dict(module.named_children())


def mark_leaf_modules(network: nn.Module) -> list[str]:
    """Marks mixture-of-experts blocks and adapters on bare parameters; returns their names. Call it before `deepspeed.initialize`.

    An expert that gets tokens on one rank and none on another would be gathered, and its gradient reduced, on one of them alone: a
    hang. An adapter on a bare parameter (PEFT's ParamWrapper) changes the weight before the module that owns it is entered, and would
    find an empty shard.
    """
    found: list[str] = []
    for name, module in network.named_modules():
        if any(name.startswith(f"{leaf}.") for leaf in found):
            continue
        if is_expert_block(module) or isinstance(module, ParamWrapper):
            set_z3_leaf_module(module, True)
            found.append(name)
    if found:
        logger.info("ZeRO-3 gathers %d modules whole (%s, ...)", len(found), found[0])
    return found
