"""Rotary tables in float32.

Under zero.Init every floating-point buffer takes the model's dtype. bfloat16 inverse frequencies shift logits by 0.04 at 300
tokens, so the tables are computed again, the way the architecture does, and put back after the engine is built.
"""

from __future__ import annotations

import torch
from torch import nn


def restore_rotary_buffers(model: nn.Module) -> int:
    """Recomputes the `*inv_freq` buffers of every rotary module in float32, in place. Returns how many modules were restored."""
    restored = 0
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        config = getattr(module, "config", None)
        if not names or config is None:
            continue
        device = getattr(module, names[0]).device
        fresh = type(module)(config=config).to(device)
        for name in names:
            table = getattr(fresh, name).to(device, torch.float32)
            module.register_buffer(name, table, persistent=False)
            if hasattr(module, f"original_{name}"):
                setattr(
                    module, f"original_{name}", table.clone() if isinstance(getattr(module, f"original_{name}"), torch.Tensor) else table
                )
        restored += 1
    return restored
