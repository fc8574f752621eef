"""Checks of tokenizer, vocabulary and data before engines are built: what `--dry-run` runs, and a training at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ebft_ds.config import RecipeConfig
from ebft_ds.config.checks import Surroundings, check_config, require_training_inputs
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived import DerivedNumbers, derive
from ebft_ds.config.model_facts import ModelFacts, facts_from_config
from ebft_ds.config.preflight import check_model_files, check_output_dir
from ebft_ds.data.prompts import check_vocabulary
from ebft_ds.data.sources import DataSource
from ebft_ds.data.split import TrainAndEval, load_train_and_eval
from ebft_ds.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preflight:
    """What the checks found out on the way."""

    facts: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    data: TrainAndEval
    derived: DerivedNumbers
    notes: list[str]


def run_preflight(
    config: RecipeConfig,
    *,
    world_size: int,
    accelerators: int | None = None,
    train_source: DataSource | None = None,
    eval_source: DataSource | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_functions: int = 0,
) -> Preflight:
    """Everything that can be checked without building an engine. Sources and tokenizer given as objects replace the named ones.

    Errors: ConfigError, ModelError or DataError.
    """
    require_training_inputs(config, data_given=train_source is not None)
    check_output_dir(config)
    facts = load_model_facts(config)
    report = check_config(config, Surroundings(world_size, accelerators, facts, reward_functions, eval_source is not None))
    report.raise_if_bad()
    tokenizer = load_checked_tokenizer(config, facts, tokenizer)
    data = load_train_and_eval(
        config.data, config.rollout, tokenizer, seed=config.run.seed, train_source=train_source, eval_source=eval_source
    )
    derived = derive(config, world_size, rows=len(data.train))
    notes = row_notes(config)
    build_deepspeed_config(config, derived, "actor", facts.hidden_size or None)
    if not config.peft.use_peft or config.model.feature_model_name_or_path:
        build_deepspeed_config(config, derived, "feature", facts.hidden_size or None)
    return Preflight(facts, tokenizer, data, derived, report.notes + notes + _data_notes(config, data, derived))


def load_model_facts(config: RecipeConfig) -> ModelFacts:
    """Sizes of the model, from its folder or (for a hub name) through transformers. Errors: ModelError."""
    facts = check_model_files(config)
    if facts is not None:
        return facts
    from transformers import AutoConfig

    name = config.model.model_name_or_path
    try:
        loaded = AutoConfig.from_pretrained(name, revision=config.model.model_revision, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name} cannot be found, neither as a folder nor on the hub: {_first_line(error)}") from None
    return facts_from_config(loaded.to_dict())


def load_checked_tokenizer(
    config: RecipeConfig, facts: ModelFacts, given: PreTrainedTokenizerBase | None = None
) -> PreTrainedTokenizerBase:
    """The given or the model's tokenizer, held against vocabulary, stop ids and the feature model's tokenizer. Errors: ModelError."""
    name = config.model.model_name_or_path
    assert name is not None
    tokenizer = given if given is not None else load_tokenizer(name, config.model.model_revision, config.model.trust_remote_code)
    if facts.vocab_size:
        check_vocabulary(tokenizer, facts.vocab_size)
        beyond = [token for token in config.rollout.stop_token_ids or [] if token >= facts.vocab_size]
        if beyond:
            raise ConfigError(f"stop_token_ids: {beyond} is outside the model's vocabulary of {facts.vocab_size}")
    feature_name = config.model.feature_model_name_or_path
    if feature_name is not None and feature_name != name:
        other = load_tokenizer(feature_name, None, config.model.trust_remote_code)
        if other.get_vocab() != tokenizer.get_vocab():
            raise ModelError(f"the tokenizer of feature_model_name_or_path {feature_name} is not that of {name}; token ids would differ")
    return tokenizer


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. Errors: ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:  # what transformers raises for missing or broken files
        hint = "it needs tokenizer.json or its vocabulary files" if Path(name).is_dir() else "is the name right?"
        raise ModelError(f"the tokenizer of {name} cannot be loaded ({hint}): {_first_line(error)}") from None
    return tokenizer


def row_notes(config: RecipeConfig) -> list[str]:
    """How rows will be laid out. Errors: ConfigError for a `packing` that the model does not support."""
    from transformers import AutoConfig

    from ebft_ds.packing.style import choose_row_style, rotary_limit

    notes: list[str] = []
    for name in dict.fromkeys([config.model.model_name_or_path, config.model.feature_model_name_or_path]):
        if name is None:
            continue
        revision = config.model.model_revision if name == config.model.model_name_or_path else None
        loaded = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=config.model.trust_remote_code)
        choice = choose_row_style(config, loaded)
        notes.append(f"rows of {name}: {choice.style}" + (f" ({choice.reason})" if choice.reason else ""))
        if (trained := rotary_limit(loaded)) is not None and trained < config.data.max_seq_length:
            notes.append(
                f"{name}: in a micro-batch with a sequence of more than {trained} tokens the longest one chooses the rotary frequencies of "
                f"all, so log-probs and features depend on the neighbours; max_seq_length: {trained} avoids it"
            )
    return notes


def _data_notes(config: RecipeConfig, data: TrainAndEval, derived: DerivedNumbers) -> list[str]:
    if len(data.train) < derived.groups_per_step:
        raise DataError(
            f"{len(data.train)} usable rows are fewer than the {derived.groups_per_step} prompts of one step; "
            "add rows or lower per_device_train_batch_size"
        )
    notes = [data.train.report.summary()]
    if data.evaluation is not None:
        notes.append("held out: " + data.evaluation.report.summary())
    elif config.monitor.eval_at_start or config.monitor.eval_at_end:
        notes.append("no held-out prompts (eval_dataset or eval_holdout): there will be no table before and after")
    return notes


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
