"""What a run is given, made ready: distributed job joined, configuration completed and checked, output folder claimed."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig, RecipeConfig
from ebft_ds.config.preflight import prepare_output_dir
from ebft_ds.config.resolved import write_resolved
from ebft_ds.data.preflight import Preflight, run_preflight
from ebft_ds.engine.build import accelerator_count, init_distributed
from ebft_ds.errors import ConfigError, EbftError, PeerError
from ebft_ds.monitor.environment import code_version, package_versions
from ebft_ds.monitor.logging_setup import setup_logging

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInputs:
    """The constructor's objects."""

    model: str | PreTrainedModel
    train_dataset: str | Dataset | list[dict[str, Any]] | None
    eval_dataset: str | Dataset | list[dict[str, Any]] | None
    tokenizer: PreTrainedTokenizerBase | None
    peft_config: PeftConfig | None
    reward_functions: int = 0
    """How many further objectives came as objects."""


class Checked(Protocol):
    """What a mode's checks found out on the way."""

    @property
    def notes(self) -> list[str]: ...


C = TypeVar("C", bound=RecipeConfig)
K = TypeVar("K", bound=Checked)


@dataclass(frozen=True)
class PreparedRun(Generic[C, K]):
    """A run that may start."""

    config: C
    checked: K
    collectives: Collectives


def prepare_run(args: C, inputs: RunInputs, check: Callable[[C, RunInputs, int], K], *, record: bool = True) -> PreparedRun[C, K]:
    """Collective. Every check that can fail does so here, on all ranks, before an engine or a process is built.

    `check` is the mode's: (configuration, inputs, world size) -> what it found. Without `record` the output folder is neither claimed
    nor cleared, and its config.resolved.yaml stays.

    Raises:
        ConfigError, ModelError, DataError: on the ranks that found it; the others raise PeerError.
    """
    collectives = init_distributed(args.engine.ddp_timeout)
    config = _complete(args, inputs)
    config = agree(collectives, lambda: _with_model_folder(config, inputs, collectives))
    checked = agree(collectives, lambda: check(config, inputs, collectives.world_size))
    if record:
        agree(collectives, lambda: prepare_output_dir(config) if collectives.is_main else None)
    assert config.run.output_dir is not None
    output_dir = Path(config.run.output_dir)
    setup_logging(collectives.rank, collectives.world_size, config.monitor.log_level, output_dir / "logs")
    for note in checked.notes:
        logger.info("%s", note)
    if record and collectives.is_main:
        code = code_version(Path(__file__).parent)
        commit = f"{code['commit']}{' with changes' if code['modified'] else ''}" if code else None
        write_resolved(output_dir / "config.resolved.yaml", config, sys.argv, package_versions(), commit)
    _seed(config.run.seed + collectives.rank)
    torch.use_deterministic_algorithms(config.engine.deterministic)
    return PreparedRun(config, checked, collectives)


def _complete(args: C, inputs: RunInputs) -> C:
    """The configuration with what the constructor's arguments say."""
    changes: dict[str, Any] = {}
    if isinstance(inputs.model, str):
        changes["model_name_or_path"] = inputs.model
    if isinstance(inputs.train_dataset, str):
        changes["train_dataset"] = inputs.train_dataset
    if isinstance(inputs.eval_dataset, str):
        changes["eval_dataset"] = inputs.eval_dataset
    if inputs.peft_config is not None:
        changes["use_peft"] = True
    return args.replace(**changes) if changes else args


def _with_model_folder(config: C, inputs: RunInputs, collectives: Collectives) -> C:
    """A model given as an object becomes a folder: the rollout process and the frozen copy load the very same weights from it.

    Rank 0 writes it; nobody reads it before `agree` has gathered all ranks.
    """
    if isinstance(inputs.model, str):
        return config
    if not config.run.output_dir:
        raise ConfigError("output_dir is not set; it receives checkpoints, metrics and the exported model")
    folder = Path(config.run.output_dir) / "initial_model"
    if collectives.is_main:
        inputs.model.save_pretrained(folder)
        if inputs.tokenizer is None:
            raise ConfigError("processing_class is not set: a model given as an object needs its tokenizer beside it")
        inputs.tokenizer.save_pretrained(folder)
    return config.replace(model_name_or_path=str(folder))


def check_ebft(config: AsyncEBFTConfig, inputs: RunInputs, world_size: int) -> Preflight:
    """The checks of an EBFT run. Errors: ConfigError, ModelError, DataError."""
    return run_preflight(
        config,
        world_size=world_size,
        accelerators=accelerator_count(),
        train_source=None if isinstance(inputs.train_dataset, str) else inputs.train_dataset,
        eval_source=None if isinstance(inputs.eval_dataset, str) else inputs.eval_dataset,
        tokenizer=inputs.tokenizer,
        reward_functions=inputs.reward_functions,
    )


def agree(collectives: Collectives, action: Any) -> Any:
    """Collective. Runs a rank's part; nobody goes on, and nobody is left waiting, when it failed anywhere."""
    error: EbftError | None = None
    result: Any = None
    try:
        result = action()
    except EbftError as caught:
        error = caught
    failed = collectives.max_int(int(error is not None))
    if error is not None:
        raise error
    if failed:
        raise PeerError("another rank cannot go on; its message names the cause")
    return result


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
