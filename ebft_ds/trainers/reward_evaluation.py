"""Evaluation of a reward model on held-out preference rows: each row forwarded once, the same numbers for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ebft_ds.collectives import Collectives
from ebft_ds.config import RewardConfig
from ebft_ds.data.preference import EncodedResponses
from ebft_ds.packing.whole_groups import WholeGroup
from ebft_ds.rewards.preference_loss import PreferenceLoss
from ebft_ds.rewards.preference_metrics import PreferenceTally, mean, standard_deviation
from ebft_ds.rewards.preference_results import PreferenceResults
from ebft_ds.trainers.reward_engine import RewardEngine
from ebft_ds.trainers.reward_scoring import score_groups
from ebft_ds.trainers.reward_step import roomy_budget, tally_of


@dataclass(frozen=True)
class EvaluatedSet:
    """The numbers of one set, and what they were made of."""

    results: PreferenceResults
    tally: PreferenceTally


@dataclass(frozen=True)
class RewardScale:
    """Mean and unbiased standard deviation of raw rewards on held-out rows."""

    mean: float
    std: float

    @property
    def usable(self) -> bool:
        return math.isfinite(self.std) and self.std > 0

    def normalized(self, reward: float) -> float:
        return (reward - self.mean) / self.std


@dataclass(frozen=True)
class RewardEvaluation:
    """What all sets gave. A single set has the name ""."""

    sets: dict[str, EvaluatedSet]
    scale: RewardScale

    def results(self) -> dict[str, PreferenceResults]:
        return {name: one.results for name, one in self.sets.items()}

    def accuracies(self) -> dict[str, float]:
        """Of the sets that have one (a set of ties has none)."""
        return {name: one.accuracy for name, one in self.results().items() if not math.isnan(one.accuracy)}

    def to_metrics(self) -> dict[str, float]:
        """`eval/<key>`, of named sets `eval/<set>/<key>`."""
        return {key: value for name, one in self.sets.items() for key, value in one.results.to_metrics(prefix_of(name)).items()}


def prefix_of(name: str) -> str:
    return f"eval/{name}/" if name else "eval/"


@dataclass(frozen=True)
class HeldOutRewards:
    """Collective: every rank holds all rows of all sets, and gets all numbers."""

    reward: RewardEngine
    collectives: Collectives
    loss: PreferenceLoss
    config: RewardConfig
    sets: Mapping[str, Sequence[EncodedResponses]] = field(default_factory=dict)
    check_stop: Callable[[], None] | None = None
    """Collective; raises Preempted where a stop signal has come."""

    def score(self, rows: Sequence[EncodedResponses]) -> list[list[float]]:
        """Raw rewards of each row, best response first. Collective."""
        return self._score(rows, None)

    def _score(self, rows: Sequence[EncodedResponses], check_stop: Callable[[], None] | None) -> list[list[float]]:
        groups = [row.whole_group() for row in rows]
        return score_groups(
            self.reward.engine,
            self.reward.packer,
            groups,
            self.collectives,
            token_budget=self._token_budget(groups),
            max_groups=self._batch,
            check_stop=check_stop,
        )

    def run(self) -> RewardEvaluation:
        """The numbers of every set under the current weights. Raises what `check_stop` raises."""
        raw = {name: self._score(rows, self.check_stop) for name, rows in self.sets.items()}
        everything = [value for rewards in raw.values() for values in rewards for value in values]
        scale = RewardScale(mean(everything), standard_deviation(everything))
        return RewardEvaluation({name: self._evaluated(self.sets[name], rewards, scale) for name, rewards in raw.items()}, scale)

    def _evaluated(self, rows: Sequence[EncodedResponses], rewards: list[list[float]], scale: RewardScale) -> EvaluatedSet:
        tally = tally_of(rows, rewards, self.loss)
        if self.config.reward.normalize_rewards and scale.usable:  # the loss stays that of training
            tally = _normalized(tally, scale)
        return EvaluatedSet(tally.results(sections=self.config.reward.subset_sections), tally)

    @property
    def _batch(self) -> int:
        return self.config.reward.per_device_eval_batch_size or self.config.run.per_device_train_batch_size

    def _token_budget(self, groups: Sequence[WholeGroup]) -> int:
        return roomy_budget(self._batch * 2 * self.config.data.max_seq_length, groups, self.reward.packer.style)


def _normalized(tally: PreferenceTally, scale: RewardScale) -> PreferenceTally:
    changed = PreferenceTally()
    for row in tally.rows:
        changed.add(
            [scale.normalized(reward) for reward in row.rewards],
            loss=row.loss,
            terms=row.terms,
            margin=row.margin,
            preference=row.preference,
            subset=row.subset,
        )
    return changed
