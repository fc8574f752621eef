"""From a loaded recipe to a finished job: what the launcher's module entry point and `ebft-ds` call on every rank."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch.distributed as dist

from ebft_ds.config import AsyncEBFTConfig, LoadedRecipe
from ebft_ds.config.checks import require_training_inputs
from ebft_ds.errors import DataError
from ebft_ds.trainers.async_ebft import AsyncEBFTTrainer


def run_task(loaded: LoadedRecipe, task: str) -> int:
    """`train`, `eval` or `export` as the recipe says; returns the exit code 0. Errors are raised (ebft_ds.errors)."""
    config = loaded.config
    require_training_inputs(config)
    assert config.model.model_name_or_path is not None
    assert config.run.output_dir is not None
    assert isinstance(config, AsyncEBFTConfig)
    trainer = AsyncEBFTTrainer(config.model.model_name_or_path, config)
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


def _evaluate(trainer: AsyncEBFTTrainer) -> None:
    """The table goes to stderr, the numbers as one JSON object to stdout (rank 0)."""
    result = trainer.evaluate(record=False)
    if result is None:
        raise DataError("there are no held-out prompts: set eval_dataset or eval_holdout")
    if dist.get_rank() == 0:
        values = {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in dataclasses.asdict(result).items()}
        print(json.dumps({"step": trainer.state.step} | values), flush=True)
