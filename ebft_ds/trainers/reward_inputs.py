"""What a reward training is given, and every check that it can fail before an engine is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft_ds.collectives import Collectives
from ebft_ds.config import RewardConfig
from ebft_ds.config.checks import Surroundings, check_config, require_training_inputs
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived_reward import RewardNumbers, derive_reward
from ebft_ds.config.model_facts import ModelFacts
from ebft_ds.config.preflight import check_output_dir
from ebft_ds.data.preference import (
    PreferenceFields,
    PreferenceReader,
    PreferenceSource,
    RewardEncoder,
    RewardEncoding,
)
from ebft_ds.data.preference.recipe import FILE_NAME
from ebft_ds.data.preference.together import RowsTogether
from ebft_ds.data.preflight import load_checked_tokenizer, load_model_facts, row_notes
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.trainers.inputs import RunInputs

FIRST_ROWS = 4
DataCollator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""A user's own: raw rows to the arrays that RewardCollator gives."""


@dataclass(frozen=True)
class RewardInputs(RunInputs):
    """The constructor's objects."""

    train_source: PreferenceSource | None = None
    """None: as the configuration names it."""
    eval_sources: dict[str, PreferenceSource] = field(default_factory=dict)
    """Name -> rows; a single set has the name "". Empty: as the configuration names it."""
    data_collator: DataCollator | None = None


@dataclass(frozen=True)
class RewardChecked:
    """What the checks found out on the way."""

    facts: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    encoding: RewardEncoding
    reader: PreferenceReader | None
    """Rank 0's."""
    notes: list[str]


def check_reward_run(
    config: RewardConfig, inputs: RewardInputs, world_size: int, *, accelerators: int, reads: bool = True
) -> RewardChecked:
    """Everything that can be checked without an engine and without encoding a row. `reads`: this rank opens the training data.

    Errors: ConfigError, ModelError, DataError.
    """
    require_training_inputs(config, data_given=inputs.train_source is not None)
    check_output_dir(config)
    facts = load_model_facts(config)
    report = check_config(config, Surroundings(world_size, accelerators, facts, evaluation_given=bool(inputs.eval_sources)))
    report.raise_if_bad()
    tokenizer = load_checked_tokenizer(config, facts, inputs.tokenizer)
    encoding = RewardEncoding.of(config.reward, config.data)
    build_deepspeed_config(config, derive_reward(config, world_size), "actor", facts.hidden_size or None)
    notes = [*report.notes, *row_notes(config), *_encoding_notes(config, encoding), *_evaluation_notes(config, inputs)]
    reader = open_reader(config, inputs) if reads else None
    if reader is not None and inputs.data_collator is None:
        _look_at_first_rows(config, reader, RewardEncoder(tokenizer, encoding))
    return RewardChecked(facts, tokenizer, encoding, reader, notes)


def _look_at_first_rows(config: RewardConfig, reader: PreferenceReader, encoder: RewardEncoder) -> None:
    """Wrong columns are found out before the output folder is claimed. Errors: DataError, ModelError."""
    fields = PreferenceFields.of(config.reward, config.data)
    together = RowsTogether(encoder, Collectives(), fields=fields, bad_rows=config.data.bad_rows)
    together.encode([together.numbered(number, row, reader.where(number)) for number, row in reader.look(FIRST_ROWS)])


def open_reader(config: RewardConfig, inputs: RewardInputs) -> PreferenceReader:
    """The training rows. Errors: ConfigError, DataError."""
    source = inputs.train_source if inputs.train_source is not None else config.data.train_dataset
    assert source is not None
    return PreferenceReader(
        source, data=config.data, reward=config.reward, seed=config.run.seed, shuffle=config.data.shuffle, split=config.data.train_split
    )


def eval_sources(config: RewardConfig, inputs: RewardInputs, reader: PreferenceReader | None) -> dict[str, Any]:
    """Name -> source of every held-out set; the held-out rows of the training data are known to rank 0 (`reader`) alone."""
    if inputs.eval_sources:
        return dict(inputs.eval_sources)
    if config.data.eval_dataset is not None:
        return {"": config.data.eval_dataset}
    if config.data.eval_holdout:
        return {"": reader.held_out if reader is not None else None}
    return {}


def reward_numbers(config: RewardConfig, world_size: int, rows: int | None) -> RewardNumbers:
    """The derived numbers. Errors: ConfigError for a stream without max_steps, DataError for fewer rows than one step takes."""
    derived = derive_reward(config, world_size, rows)
    if derived.steps is None:
        raise ConfigError("max_steps is not set, and a stream has no known end; set max_steps")
    if rows is not None and rows < derived.global_batch:
        raise DataError(
            f"{rows} training rows are fewer than the {derived.global_batch} of one step; add rows or lower per_device_train_batch_size"
        )
    return derived


def _encoding_notes(config: RewardConfig, encoding: RewardEncoding) -> list[str]:
    """A reward model that is trained on brings the recipe that it was trained with."""
    assert config.model.model_name_or_path is not None
    folder = Path(config.model.model_name_or_path)
    if not (folder / FILE_NAME).is_file():
        return []
    former = RewardEncoding.load(folder)
    changed = [
        name
        for name in encoding.__struct_fields__
        if name not in ("mean", "std", "normalize") and getattr(former, name) != getattr(encoding, name)
    ]
    return (
        [f"{folder} was trained with another encoding: {', '.join(changed)} differ; this run's recipe is used and saved"] if changed else []
    )


def _evaluation_notes(config: RewardConfig, inputs: RewardInputs) -> list[str]:
    if inputs.eval_sources or config.data.eval_dataset or config.data.eval_holdout:
        return []
    return ["no held-out rows (eval_dataset or eval_holdout): no accuracy, and no mean and std of rewards with the exported model"]
