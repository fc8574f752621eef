"""A network to be trained, with its optimizer and schedule, as a ZeRO-3 engine."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ebft_ds.config.sections import LossSection, OptimSection
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.engine.optimizer import build_optimizer, parameter_groups
from ebft_ds.engine.schedule import learning_rate_factor

logger = logging.getLogger(__name__)


def trained_engine(
    network: LanguageNetwork,
    deepspeed_config: dict[str, Any],
    *,
    optim: OptimSection,
    loss: LossSection,
    steps: int,
    optimizer: torch.optim.Optimizer | None,
) -> ZeroEngine:
    """`optimizer`: the user's own over the network's parameters; None: AdamW by the recipe's groups. `steps`: of the whole run."""
    if optimizer is None:
        offloaded = "offload_optimizer" in deepspeed_config["zero_optimization"]
        groups = parameter_groups(network.named_parameters(), optim)
        logger.info("parameter groups: %s", ", ".join(f"{g['name']} ({len(g['params'])} tensors, lr {g['lr']:g})" for g in groups))
        optimizer = build_optimizer(groups, optim, offloaded=offloaded)
    return ZeroEngine(network, deepspeed_config, optimizer=optimizer, learning_rate_factor=learning_rate_factor(optim, loss, steps))
