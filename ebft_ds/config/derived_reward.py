"""Numbers that follow from a reward recipe: batch and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebft_ds.config.derived import train_token_budget
from ebft_ds.config.recipe import RecipeConfig


@dataclass(frozen=True)
class RewardNumbers:
    """Sizes of one run. A row is a pair of responses, or a ranking of several."""

    world_size: int
    global_batch: int
    """Rows trained on in one optimizer step, over all ranks."""
    micro_batches_per_rank: int
    train_token_budget: int
    """Most tokens in one packed micro-batch."""
    rows: int | None
    """Training rows before any is left out; None: a stream."""
    steps_per_epoch: int | None
    steps: int | None
    """Steps of the whole run; None when neither max_steps nor the rows are known."""
    warmup_steps: int | None

    def table(self) -> list[tuple[str, str]]:
        """(label, value) rows for a terminal."""
        unknown = "unknown"
        return [
            ("ranks", str(self.world_size)),
            ("global batch", f"{self.global_batch} rows"),
            ("micro-batches per rank and step, padded rows", str(self.micro_batches_per_rank)),
            ("tokens in a packed micro-batch, at most", f"{self.train_token_budget:,}"),
            ("training rows", f"{self.rows:,}" if self.rows is not None else f"{unknown} (a stream)"),
            ("steps per pass over the rows", f"{self.steps_per_epoch:,}" if self.steps_per_epoch is not None else unknown),
            ("steps", f"{self.steps:,}" if self.steps is not None else unknown),
            ("learning-rate warm-up", f"{self.warmup_steps} steps" if self.warmup_steps is not None else unknown),
        ]


def derive_reward(config: RecipeConfig, world_size: int, rows: int | None = None) -> RewardNumbers:
    """The numbers of a run over `world_size` ranks with `rows` training rows (None: a stream)."""
    run = config.run
    batch = run.per_device_train_batch_size * run.gradient_accumulation_steps * world_size
    per_epoch = math.ceil(rows / batch) if rows is not None else None
    if run.max_steps >= 0:
        steps: int | None = run.max_steps
    else:
        steps = math.ceil(run.num_train_epochs * rows / batch) if rows is not None else None
    warmup: int | None = config.optim.warmup_steps
    if not warmup and config.optim.warmup_ratio:
        warmup = round(config.optim.warmup_ratio * steps) if steps is not None else None
    return RewardNumbers(
        world_size=world_size,
        global_batch=batch,
        micro_batches_per_rank=run.gradient_accumulation_steps,
        train_token_budget=train_token_budget(run, max_seq_length=2 * config.data.max_seq_length),
        rows=rows,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup,
    )
