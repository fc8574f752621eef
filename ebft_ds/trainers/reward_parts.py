"""Building a reward training: from a checked configuration to engine, rows and evaluation, wired together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ebft_ds.checkpoint.state import CheckpointStore
from ebft_ds.collectives import Collectives
from ebft_ds.config import RewardConfig
from ebft_ds.config.derived_reward import RewardNumbers
from ebft_ds.data.preference import (
    EncodedResponses,
    PreferenceFeed,
    PreferenceFields,
    RewardEncoder,
    RewardEncoding,
    read_evaluation_rows,
)
from ebft_ds.errors import Preempted
from ebft_ds.rewards.preference_loss import PreferenceLoss
from ebft_ds.trainers.reward_engine import RewardEngine, build_reward_engine
from ebft_ds.trainers.reward_evaluation import HeldOutRewards
from ebft_ds.trainers.reward_feed import CollatedFeed, RowFeed
from ebft_ds.trainers.reward_inputs import RewardChecked, RewardInputs, eval_sources, reward_numbers
from ebft_ds.trainers.reward_step import RewardStep
from ebft_ds.trainers.stop_signal import StopSignal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardParts:
    """Everything the training loop uses."""

    collectives: Collectives
    derived: RewardNumbers
    tokenizer: PreTrainedTokenizerBase
    encoding: RewardEncoding
    reward: RewardEngine
    feed: RowFeed
    step: RewardStep
    held_out: HeldOutRewards
    checkpoints: CheckpointStore
    stop: StopSignal

    def check_stop(self) -> None:
        """Collective, cheap: Preempted on every rank once any rank has got a stop signal."""
        check_stop(self.stop, self.collectives)


def check_stop(stop: StopSignal, collectives: Collectives) -> None:
    """See RewardParts.check_stop."""
    if collectives.max_int(int(stop.requested)):
        raise Preempted("a stop signal arrived")


def build_reward_parts(
    config: RewardConfig,
    checked: RewardChecked,
    inputs: RewardInputs,
    collectives: Collectives,
    stop: StopSignal,
    *,
    optimizer: torch.optim.Optimizer | None,
) -> RewardParts:
    """Everything but the loop. Held-out rows are read before the engine is built: bad ones are found out soon."""
    assert config.run.output_dir is not None
    rows = checked.reader.rows if checked.reader is not None else None
    known = collectives.max_int(-1 if rows is None else rows)
    derived = reward_numbers(config, collectives.world_size, None if known < 0 else known)
    held_out = held_out_rows(config, checked, inputs, collectives)
    feed = row_feed(config, checked, inputs, collectives)
    reward = build_reward_engine(
        config, derived, hidden_size=checked.facts.hidden_size or None, peft_config=inputs.peft_config, optimizer=optimizer
    )
    loss = PreferenceLoss.of(config.reward)

    def stop_if_asked() -> None:
        check_stop(stop, collectives)

    step = RewardStep(reward, collectives, loss=loss, run=config.run, derived=derived, check_stop=stop_if_asked)
    store = CheckpointStore(
        Path(config.run.output_dir) / "checkpoints",
        collectives,
        adapters_only=config.peft.use_peft,
        keep=config.checkpoint.save_total_limit,
    )
    return RewardParts(
        collectives=collectives,
        derived=derived,
        tokenizer=RewardEncoder(checked.tokenizer, checked.encoding).tokenizer,  # with the recipe's own chat template
        encoding=checked.encoding,
        reward=reward,
        feed=feed,
        step=step,
        held_out=HeldOutRewards(reward, collectives, loss, config, held_out, stop_if_asked),
        checkpoints=store,
        stop=stop,
    )


def held_out_rows(
    config: RewardConfig, checked: RewardChecked, inputs: RewardInputs, collectives: Collectives
) -> dict[str, Sequence[EncodedResponses]]:
    """Collective: every set's rows, encoded, on every rank. Errors: DataError."""
    return {
        name: read_evaluation_rows(
            source,
            data=config.data,
            reward=config.reward,
            encoder=RewardEncoder(checked.tokenizer, checked.encoding),
            collectives=collectives,
            split=config.data.eval_split,
            max_rows=config.reward.eval_max_rows,
            name=f"evaluation set {name}" if name else "evaluation",
        )
        for name, source in eval_sources(config, inputs, checked.reader).items()
    }


def row_feed(config: RewardConfig, checked: RewardChecked, inputs: RewardInputs, collectives: Collectives) -> RowFeed:
    """The training rows."""
    if inputs.data_collator is not None:
        return CollatedFeed(
            checked.reader,
            inputs.data_collator,
            collectives,
            max_length=config.data.max_seq_length,
            vocab_size=checked.facts.vocab_size or None,
        )
    return PreferenceFeed(
        checked.reader,
        RewardEncoder(checked.tokenizer, checked.encoding),
        collectives,
        fields=PreferenceFields.of(config.reward, config.data),
        bad_rows=config.data.bad_rows,
    )
