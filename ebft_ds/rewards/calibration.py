"""Do the probabilities that a reward model implies come true? P(one over the other) = sigmoid of the difference of their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_BINS = 5


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose confidence lies in [low, high), the last bin with its upper end."""

    low: float
    high: float
    count: int
    accuracy: float
    """Share of the pairs that the model orders as labelled, ties as half; NaN for an empty bin."""
    confidence: float
    """Mean confidence; NaN for an empty bin."""


def calibration_bins(differences: Sequence[float], count: int = DEFAULT_BINS) -> list[CalibrationBin]:
    """`count` equal bins of confidence sigmoid(|difference|) over [0.5, 1].

    Args:
        differences: reward of the better response of each pair minus that of the worse one.
    """
    if count < 1:
        raise ValueError(f"there must be at least one bin, not {count}")
    members: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for difference in differences:
        confidence = 1.0 / (1.0 + math.exp(-abs(difference)))
        place = min(int((confidence - 0.5) * 2 * count), count - 1)
        members[place].append((hit(difference), confidence))
    return [_bin(0.5 + i / (2 * count), 0.5 + (i + 1) / (2 * count), pairs) for i, pairs in enumerate(members)]


def hit(difference: float) -> float:
    """1: ordered as labelled, 0: the other way round, 0.5: a tie."""
    return 0.5 if difference == 0 else float(difference > 0)


def expected_calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Mean over pairs of |accuracy - confidence| of their bin; NaN without pairs. Source: Naeini et al. 2015."""
    total = sum(b.count for b in bins)
    return math.fsum(b.count * abs(b.accuracy - b.confidence) for b in bins if b.count) / total if total else math.nan


def _bin(low: float, high: float, pairs: list[tuple[float, float]]) -> CalibrationBin:
    if not pairs:
        return CalibrationBin(low, high, 0, math.nan, math.nan)
    hits, confidences = zip(*pairs, strict=True)
    return CalibrationBin(low, high, len(pairs), math.fsum(hits) / len(pairs), math.fsum(confidences) / len(pairs))
