"""From a loaded recipe to a finished run: what the launcher's module entry point and `ebft-ds train` call on every rank."""

from __future__ import annotations

import torch.distributed as dist

from ebft_ds.config import LoadedRecipe
from ebft_ds.config.checks import require_training_inputs
from ebft_ds.trainers.async_ebft import AsyncEBFTTrainer


def run_training(loaded: LoadedRecipe) -> int:
    """Train as the recipe says; returns the exit code 0. Errors are raised (ebft_ds.errors), with their own exit codes."""
    config = loaded.config
    require_training_inputs(config)
    assert config.model.model_name_or_path is not None
    trainer = AsyncEBFTTrainer(config.model.model_name_or_path, config)
    try:
        trainer.train()
    finally:
        trainer.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0
