"""What a reward model makes of preference rows: a tally per rank, and numbers from all of them at once.

A tally keeps every row's rewards, so no number is a mean of means, and sums are taken with `math.fsum`, which is right to the last bit
in any order: the results do not depend on batches, ranks or their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ebft_ds.rewards.calibration import DEFAULT_BINS, calibration_bins, expected_calibration_error, hit
from ebft_ds.rewards.preference_results import PreferenceResults
from ebft_ds.rewards.reward_bench import section_means


class TallyRow(msgspec.Struct, frozen=True, array_like=True):
    """One evaluated row."""

    rewards: list[float]
    """K >= 2, best response first."""
    loss: float
    terms: float
    """What the loss is the sum of: pairs, or (plackett_luce) the row itself."""
    margin: float
    preference: float
    subset: str | None

    def differences(self) -> list[float]:
        """Reward of the better response minus that of the worse one, by pair; none of a row that is labelled a tie."""
        if self.preference == 0.5:
            return []
        side = 1.0 if self.preference > 0.5 else -1.0
        return [side * difference for difference in self.gaps()]

    def gaps(self) -> list[float]:
        """r_i - r_j of all pairs i before j, as they stand in the row."""
        return [first - second for i, first in enumerate(self.rewards) for second in self.rewards[i + 1 :]]


class PreferenceTally(msgspec.Struct):
    """Evaluated rows of one rank. Can be sent as it is (`all_gather`); `PreferenceTally.merged` takes what arrives."""

    rows: list[TallyRow] = []

    @classmethod
    def merged(cls, parts: Iterable[Any]) -> PreferenceTally:
        """One tally of several, or of what msgspec decoded of them."""
        whole = cls()
        for part in parts:
            whole.merge(msgspec.convert(part, cls))
        return whole

    def add(
        self,
        rewards: Sequence[float],
        *,
        loss: float,
        terms: float | None = None,
        margin: float = 0.0,
        preference: float = 1.0,
        subset: str | None = None,
    ) -> None:
        """Add a row of K >= 2 rewards, best response first.

        Args:
            loss, terms: the row's loss as a sum and what it is over, as `PreferenceLoss.row` gives them; default terms: K (K - 1) / 2.
        """
        count = len(rewards)
        if count < 2:
            raise ValueError(f"a row needs the rewards of two responses or more, not {count}")
        pairs = count * (count - 1) / 2
        self.rows.append(TallyRow([float(r) for r in rewards], loss, pairs if terms is None else terms, margin, preference, subset))

    def merge(self, other: PreferenceTally) -> None:
        self.rows.extend(other.rows)

    @property
    def chosen(self) -> list[float]:
        """Rewards of every row's first response."""
        return [row.rewards[0] for row in self.rows]

    @property
    def rejected(self) -> list[float]:
        """Rewards of all other responses."""
        return [reward for row in self.rows for reward in row.rewards[1:]]

    def results(self, *, sections: Mapping[str, Sequence[str]] | None = None, bins: int = DEFAULT_BINS) -> PreferenceResults:
        """The numbers of all rows; NaN where there is nothing to take a mean of.

        Args:
            sections: section -> subsets; default (None or empty) RewardBench's, where its subsets occur.
            bins: of the calibration.
        """
        gaps = [gap for row in self.rows for gap in row.gaps()]
        labelled = [difference for row in self.rows for difference in row.differences()]
        lists = [row.rewards for row in self.rows if len(row.rewards) > 2]
        calibration = calibration_bins(labelled, bins)
        subsets = {name: _accuracy(rows) for name, rows in sorted(self._by_subset().items())}
        chosen, rejected = self.chosen, self.rejected
        return PreferenceResults(
            accuracy=mean(hit(difference) for difference in labelled),
            tie_share=mean(float(gap == 0) for gap in gaps),
            margin=mean(gaps),
            loss=_quotient(math.fsum(row.loss for row in self.rows), math.fsum(row.terms for row in self.rows)),
            chosen_mean=mean(chosen),
            chosen_std=standard_deviation(chosen),
            rejected_mean=mean(rejected),
            rejected_std=standard_deviation(rejected),
            mean=mean(chosen + rejected),
            std=standard_deviation(chosen + rejected),
            best_of_n_accuracy=mean(_best_of_n(rewards) for rewards in lists),
            ece=expected_calibration_error(calibration),
            bins=calibration,
            subsets=subsets,
            sections=section_means(subsets, sections or None),
            pairs=len(gaps),
            rows=len(self.rows),
        )

    def _by_subset(self) -> dict[str, list[TallyRow]]:
        found: dict[str, list[TallyRow]] = {}
        for row in self.rows:
            if row.subset is not None:
                found.setdefault(row.subset, []).append(row)
        return found


def mean(values: Iterable[float]) -> float:
    """Right to the last bit; NaN of nothing."""
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """Unbiased (n - 1); NaN for fewer than two values."""
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else math.nan


def _quotient(total: float, count: float) -> float:
    return total / count if count else math.nan


def _accuracy(rows: Sequence[TallyRow]) -> tuple[float, int]:
    """(accuracy over pairs, rows), of those rows that are not labelled a tie."""
    labelled = [differences for row in rows if (differences := row.differences())]
    return mean(hit(difference) for differences in labelled for difference in differences), len(labelled)


def _best_of_n(rewards: Sequence[float]) -> float:
    """1 if the best response has the highest reward, 1/m if m responses share it (RewardBench 2, arXiv 2506.01937)."""
    highest = max(rewards)
    return 1.0 / rewards.count(highest) if rewards[0] == highest else 0.0
