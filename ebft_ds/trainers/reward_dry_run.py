"""`--dry-run` of a reward recipe: every check that a training makes at its start, on a first batch and all held-out rows."""

from __future__ import annotations

from ebft_ds.collectives import Collectives
from ebft_ds.config import RewardConfig
from ebft_ds.config.derived_reward import RewardNumbers
from ebft_ds.trainers.reward_inputs import RewardInputs, check_reward_run, reward_numbers
from ebft_ds.trainers.reward_parts import held_out_rows, row_feed


def check_reward_data(config: RewardConfig, *, world_size: int, accelerators: int) -> tuple[RewardNumbers, list[str]]:
    """The derived numbers, and what is worth knowing. Errors: whatever would stop the training at its start."""
    inputs = RewardInputs(config.model.model_name_or_path or "", None, None, None, None)
    checked = check_reward_run(config, inputs, world_size, accelerators=accelerators)
    derived = reward_numbers(config, world_size, checked.reader.rows if checked.reader is not None else None)
    alone = Collectives()
    held_out = {name or "held out": len(rows) for name, rows in held_out_rows(config, checked, inputs, alone).items()}
    feed = row_feed(config, checked, inputs, alone)
    feed.next_rows(derived.global_batch)
    notes = [f"{name}: {count} rows" for name, count in held_out.items()]
    return derived, [*checked.notes, *notes, f"the first batch: {feed.counts().summary()}"]
