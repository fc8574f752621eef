"""Training and held-out prompts."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import msgspec

from ebft_ds.config.sections import DataSection, RolloutSection
from ebft_ds.data.prompts import PromptDataset, load_prompt_dataset
from ebft_ds.data.sources import DataSource
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class TrainAndEval(msgspec.Struct, frozen=True):
    """`evaluation` is None where the recipe asks for none."""

    train: PromptDataset
    evaluation: PromptDataset | None


def load_train_and_eval(
    data: DataSection,
    rollout: RolloutSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    train_source: DataSource | None = None,
    eval_source: DataSource | None = None,
) -> TrainAndEval:
    """Both datasets as the section describes them; sources given here replace `train_dataset` and `eval_dataset`.

    `max_train_rows` limits the source's rows first, then `eval_holdout` rows are split off, chosen by `seed`.
    Raises `ConfigError` or `DataError`.
    """
    train = load_prompt_dataset(data, rollout, tokenizer, source=train_source, split=data.train_split, max_rows=data.max_train_rows)
    chosen_eval = data.eval_dataset if eval_source is None else eval_source
    if chosen_eval is None:
        return TrainAndEval(*split_holdout(train, data.eval_holdout, seed=seed)) if data.eval_holdout else TrainAndEval(train, None)
    if data.eval_holdout:
        raise ConfigError("eval_dataset and eval_holdout are both set: drop one of them.")
    evaluation = load_prompt_dataset(data, rollout, tokenizer, source=chosen_eval, split=data.eval_split)
    _report_overlap(train, evaluation)
    return TrainAndEval(train, evaluation)


def split_holdout(dataset: PromptDataset, count: int, *, seed: int) -> tuple[PromptDataset, PromptDataset]:
    """(training, held-out): `count` rows drawn by `seed`. Training rows with the prompt of a held-out row are left out, and counted.

    Raises `DataError` if no training row would remain.
    """
    order = list(range(len(dataset)))
    random.Random(f"held-out rows, seed {seed}").shuffle(order)
    held_out = sorted(order[:count])
    prompts = {tuple(dataset.prompt(row, index=0, epoch=0).token_ids) for row in held_out}
    rest = sorted(order[count:])
    kept = [row for row in rest if tuple(dataset.prompt(row, index=0, epoch=0).token_ids) not in prompts]
    if not kept:
        raise DataError(f"eval_holdout {count} leaves no training row of the {len(dataset)} usable ones of {dataset.report.source}.")
    # chat_rows of a part is not counted anew: it only says whether any row is chat, and both parts come from one source
    train_report = msgspec.structs.replace(dataset.report, usable=len(kept), held_out_duplicates=len(rest) - len(kept))
    eval_report = msgspec.structs.replace(dataset.report, usable=len(held_out))
    if len(rest) > len(kept):
        logger.warning("%s", train_report.summary())
    return dataset.subset(kept, train_report), dataset.subset(held_out, eval_report)


def _report_overlap(train: PromptDataset, evaluation: PromptDataset) -> None:
    held_out = {tuple(evaluation.prompt(row, index=0, epoch=0).token_ids) for row in range(len(evaluation))}
    shared = sum(tuple(train.prompt(row, index=0, epoch=0).token_ids) in held_out for row in range(len(train)))
    if shared:
        logger.warning("%d training prompts of %s are also in the evaluation data: its numbers will flatter", shared, train.report.source)


def eval_prompts(dataset: PromptDataset, limit: int) -> list[Prompt]:
    """The first `limit` rows as evaluation prompts, with indices -1, -2, ..."""
    return [dataset.prompt(row, index=-1 - row, epoch=0) for row in range(min(limit, len(dataset)))]
