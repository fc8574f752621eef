"""What a step computed, in tokens: from the forwards to `perf/*`."""

from __future__ import annotations

from dataclasses import dataclass

from ebft_ds.features.scores import Scores
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator
from ebft_ds.packing.rows import TokenRows
from ebft_ds.policy.batch import MicroBatch

_TRAINED, _COMPUTED, _HEAD, _FEATURES = "work/trained", "work/computed", "work/head", "work/features"


@dataclass(frozen=True)
class StepWork:
    """Tokens of one step over all ranks, padding and dummies left out."""

    trained: int
    """That a user sees trained on: every sequence with its own prompt."""
    computed: int
    """Through the policy's blocks, forward and backward: a shared prompt once."""
    head: int
    """Positions whose log-probs the head gave."""
    features: int
    """Through the feature network."""

    @classmethod
    def take(cls, reduced: dict[str, float | None]) -> StepWork:
        """Takes its own entries out of the step's reduced metrics."""
        return cls(*(int(reduced.pop(key, None) or 0) for key in (_TRAINED, _COMPUTED, _HEAD, _FEATURES)))


def log_work(batch: MicroBatch, metrics: MetricsAccumulator) -> None:
    """One policy forward and backward."""
    log_rows_work(batch.rows, batch.unshared_tokens, batch.targets.numel(), metrics)


def log_rows_work(rows: TokenRows, unshared_tokens: int, head_positions: int, metrics: MetricsAccumulator) -> None:
    """A forward and backward of some rows, `head_positions` of which reached the head."""
    _log_layout(metrics, rows.real_tokens, rows.input_ids.numel(), unshared_tokens)
    metrics.sum(_TRAINED, unshared_tokens)
    metrics.sum(_COMPUTED, rows.real_tokens)
    metrics.sum(_HEAD, head_positions)


def log_scoring_work(scores: Scores, metrics: MetricsAccumulator) -> None:
    """The step's feature forwards over all ranks; called on one of them."""
    _log_layout(metrics, scores.real_tokens, scores.padded_tokens, scores.unshared_tokens)
    metrics.sum(_FEATURES, scores.real_tokens)


def _log_layout(metrics: MetricsAccumulator, real: int, laid_out: int, unshared: int) -> None:
    metrics.add("perf/padding_ratio", Metric.ratio(laid_out - real, laid_out))
    metrics.add("perf/prefix_sharing_ratio", Metric.ratio(unshared, real))
