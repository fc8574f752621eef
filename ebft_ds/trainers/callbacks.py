"""Hooks into a run. A callback overrides what it needs; every method is called on every rank, in the order of the list.

Hooks see what flows and may ask the loop for something through TrainerControl; they never change groups, rewards or weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ebft_ds.monitor.summary import EvalResult
from ebft_ds.rewards.preference_results import PreferenceResults
from ebft_ds.types import RolloutGroup, ScoredGroup


class TrainerState(msgspec.Struct):
    """Where a run is; saved in checkpoints."""

    step: int = 0
    """Optimizer steps taken = the policy version."""
    prompts_seen: int = 0
    """Prompts trained on, resumes included."""
    total_steps: int = 0


@dataclass
class TrainerControl:
    """Requests of callbacks, granted after the current step if any rank's callback asks."""

    should_save: bool = False
    should_evaluate: bool = False
    should_stop: bool = False


class TrainerCallback:
    """Base class: every hook does nothing."""

    def on_train_begin(self, state: TrainerState, control: TrainerControl) -> None:
        """Everything is built and, on a resume, loaded."""

    def on_groups(self, state: TrainerState, groups: Sequence[RolloutGroup]) -> None:
        """The step's groups have arrived, unscored."""

    def on_scored(self, state: TrainerState, groups: Sequence[ScoredGroup]) -> None:
        """The step's groups are scored."""

    def on_step_end(self, state: TrainerState, control: TrainerControl, metrics: dict[str, float | None]) -> None:
        """After the optimizer step and the merge check, before logging: entries added under `custom/` are written too."""

    def on_evaluate(self, state: TrainerState, result: EvalResult | dict[str, PreferenceResults]) -> None:
        """An evaluation on held-out prompts is done; of a reward model: results by the name of the set ("" for a single one)."""

    def on_save(self, state: TrainerState, checkpoint: Path) -> None:
        """A checkpoint is complete."""

    def on_train_end(self, state: TrainerState) -> None:
        """After the last step, before the export."""
