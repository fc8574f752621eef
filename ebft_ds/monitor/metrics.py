"""Step metrics whose reducer lives with the value, so that ranks are reduced once, by sums: never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["mean", "sum", "min", "max", "last"]


@dataclass(frozen=True)
class Metric:
    """A partial result that can be merged with others of its kind. Merging is associative.

    mean   `value` is a weighted sum and `weight` the sum of weights; the result is their quotient, NaN if nothing had weight
    sum    `value` adds up
    min, max   the extreme; NaN if any part is NaN, so that a NaN is seen
    last   the later one wins on a rank; over ranks, the lowest rank that has the key
    """

    kind: Kind
    value: float
    weight: float = 1.0

    @classmethod
    def mean(cls, value: float, weight: float = 1.0) -> Metric:
        """A mean over `weight` items (tokens, sequences, groups). Weight 0 contributes nothing, whatever the value."""
        if weight < 0:
            raise ValueError(f"a mean's weight is at least 0, not {weight}")
        return cls("mean", value * weight if weight > 0 else 0.0, weight)

    @classmethod
    def ratio(cls, numerator: float, denominator: float) -> Metric:
        """Sum of numerators over sum of denominators, over all parts and ranks."""
        return cls("mean", numerator, denominator)

    @property
    def result(self) -> float:
        if self.kind != "mean":
            return self.value
        return self.value / self.weight if self.weight else math.nan

    def merged(self, later: Metric) -> Metric:
        """This part and a later one of the same kind."""
        if self.kind != later.kind:
            raise ValueError(f"a {self.kind} cannot be merged with a {later.kind}")
        if self.kind == "last":
            return later
        if self.kind in ("mean", "sum"):
            return Metric(self.kind, self.value + later.value, self.weight + later.weight)
        if math.isnan(self.value) or math.isnan(later.value):
            return Metric(self.kind, math.nan)
        return Metric(self.kind, min(self.value, later.value) if self.kind == "min" else max(self.value, later.value))


class MetricsAccumulator:
    """Collects one step's metrics on one rank."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, key: str, metric: Metric) -> None:
        """Merge a part into `key`. Raises ValueError if the key already has another kind."""
        known = self._metrics.get(key)
        try:
            self._metrics[key] = metric if known is None else known.merged(metric)
        except ValueError as error:
            raise ValueError(f"metric {key!r}: {error}") from None

    def mean(self, key: str, value: float, weight: float = 1.0) -> None:
        self.add(key, Metric.mean(value, weight))

    def sum(self, key: str, value: float) -> None:
        self.add(key, Metric("sum", value))

    def min(self, key: str, value: float) -> None:
        self.add(key, Metric("min", value))

    def max(self, key: str, value: float) -> None:
        self.add(key, Metric("max", value))

    def last(self, key: str, value: float) -> None:
        self.add(key, Metric("last", value))

    def take(self) -> dict[str, Metric]:
        """The collected metrics; the accumulator is empty afterwards."""
        taken, self._metrics = self._metrics, {}
        return taken


def reduce_over_ranks(local: Mapping[str, Metric], all_gather: Callable[[Any], list[Any]]) -> dict[str, float]:
    """One number per key over all ranks. Collective: every rank calls it once a step and gets the same result.

    `all_gather` takes a picklable object and returns every rank's, in rank order. A key that only some ranks have is reduced
    over those. Raises ValueError if ranks disagree on a key's kind.
    """
    merged: dict[str, Metric] = {}
    for rank, metrics in enumerate(all_gather(dict(local))):
        for key, metric in metrics.items():
            known = merged.get(key)
            if known is None:
                merged[key] = metric
            elif known.kind != metric.kind:
                raise ValueError(f"metric {key!r} is a {metric.kind} on rank {rank} and a {known.kind} on a lower one")
            elif metric.kind != "last":
                merged[key] = known.merged(metric)
    return {key: metric.result for key, metric in merged.items()}
