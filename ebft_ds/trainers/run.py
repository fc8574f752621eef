"""From a loaded recipe to a finished job: what the launcher's module entry point and `ebft-ds` call on every rank."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ebft_ds.config import AsyncEBFTConfig, LoadedRecipe, RecipeConfig, RewardConfig
from ebft_ds.config.checks import require_training_inputs
from ebft_ds.errors import DataError
from ebft_ds.trainers.async_ebft import AsyncEBFTTrainer
from ebft_ds.trainers.reward import RewardTrainer


def run_task(loaded: LoadedRecipe, task: str) -> int:
    """`train`, `eval` or `export` as the recipe says; returns the exit code 0. Errors are raised (ebft_ds.errors)."""
    config = loaded.config
    require_training_inputs(config)
    assert config.model.model_name_or_path is not None
    assert config.run.output_dir is not None
    trainer = _trainer(config, config.model.model_name_or_path)
    try:
        if task == "eval":
            _evaluate(trainer)
        elif task == "export":
            trainer.export(Path(config.run.output_dir) / "final")
        else:
            trainer.train()
    finally:
        trainer.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _trainer(config: RecipeConfig, model: str) -> AsyncEBFTTrainer | RewardTrainer:
    """The one of the recipe's mode."""
    if isinstance(config, RewardConfig):
        return RewardTrainer(model, config)
    assert isinstance(config, AsyncEBFTConfig)
    return AsyncEBFTTrainer(model, config)


def _evaluate(trainer: AsyncEBFTTrainer | RewardTrainer) -> None:
    """The table goes to stderr, the numbers as one JSON object to stdout (rank 0)."""
    numbers: dict[str, Any] | None = None
    if isinstance(trainer, RewardTrainer):
        found = trainer.evaluate(record=False)
        values = {key: value for name, one in found.items() for key, value in one.to_metrics(f"{name}/" if name else "").items()}
        numbers = values or None
    else:
        result = trainer.evaluate(record=False)
        numbers = None if result is None else dataclasses.asdict(result)
    if numbers is None:
        raise DataError("there is nothing held out: set eval_dataset or eval_holdout")
    if dist.get_rank() == 0:
        plain = {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in numbers.items()}
        print(json.dumps({"step": trainer.state.step} | plain), flush=True)
