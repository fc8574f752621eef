"""Metrics are reduced by sums: how the parts were split over ranks and calls never shows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.monitor import KEYS, Metric, MetricsAccumulator, reduce_over_ranks, render_metrics_doc, unknown_keys
from ebft_ds.monitor.keys import tensorboard_tag

ROOT = Path(__file__).parents[2]


def reduce(ranks: list[MetricsAccumulator]) -> dict[str, float]:
    """What every rank gets; fails if ranks differ."""
    parts = [rank.take() for rank in ranks]
    results = [reduce_over_ranks(part, lambda _: parts) for part in parts]
    assert all(result == results[0] for result in results)
    return results[0]


parts = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=20)


@given(parts)
def test_a_split_over_ranks_does_not_matter(parts: list[tuple[int, int, int]]) -> None:
    one, many = [MetricsAccumulator()], [MetricsAccumulator() for _ in range(4)]
    for value, weight, rank in parts:
        for accumulator in (one[0], many[rank]):
            accumulator.mean("mean", value, weight)
            accumulator.sum("sum", value)
            accumulator.min("min", value)
            accumulator.max("max", value)
    single, spread = reduce(one), reduce(many)
    total = sum(weight for _, weight, _ in parts)
    if total:
        expected = sum(value * weight for value, weight, _ in parts) / total
        assert single["mean"] == spread["mean"] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    else:
        assert math.isnan(single["mean"])
        assert math.isnan(spread["mean"])
    values = [value for value, _, _ in parts]
    assert (spread["sum"], spread["min"], spread["max"]) == (sum(values), min(values), max(values))


def test_a_mean_is_not_a_mean_of_means() -> None:
    short, long = MetricsAccumulator(), MetricsAccumulator()
    short.mean("loss", 1.0, weight=1)
    long.mean("loss", 5.0, weight=3)
    assert reduce([short, long])["loss"] == 4.0


def test_nan_is_seen_but_weight_zero_is_not() -> None:
    accumulator = MetricsAccumulator()
    accumulator.mean("a", math.nan, weight=0)
    accumulator.mean("a", 2.0)
    accumulator.min("b", 1.0)
    accumulator.min("b", math.nan)
    accumulator.max("c", math.nan)
    accumulator.max("c", 1.0)
    result = reduce([accumulator])
    assert result["a"] == 2.0
    assert math.isnan(result["b"])
    assert math.isnan(result["c"])


def test_last_is_the_latest_on_a_rank_and_the_lowest_rank_that_has_it() -> None:
    ranks = [MetricsAccumulator() for _ in range(3)]
    for rank in (2, 1):
        ranks[rank].last("learning_rate", rank)
        ranks[rank].last("learning_rate", rank * 10)
    assert reduce(ranks)["learning_rate"] == 10


def test_kinds_must_agree() -> None:
    accumulator = MetricsAccumulator()
    accumulator.sum("x", 1.0)
    with pytest.raises(ValueError, match="metric 'x': a sum cannot be merged with a mean"):
        accumulator.mean("x", 1.0)
    with pytest.raises(ValueError, match="'x' is a max on rank 1 and a sum on a lower one"):
        reduce_over_ranks({}, lambda _: [{"x": Metric("sum", 1.0)}, {"x": Metric("max", 1.0)}])
    with pytest.raises(ValueError, match="at least 0"):
        Metric.mean(1.0, -1.0)


def test_take_empties_the_accumulator() -> None:
    accumulator = MetricsAccumulator()
    accumulator.sum("x", 1.0)
    assert accumulator.take() == {"x": Metric("sum", 1.0)}
    assert accumulator.take() == {}


def test_ratio_divides_the_sums() -> None:
    ranks = [MetricsAccumulator(), MetricsAccumulator()]
    ranks[0].add("clip", Metric.ratio(1, 10))
    ranks[1].add("clip", Metric.ratio(0, 30))
    assert reduce(ranks)["clip"] == 1 / 40


def test_the_documentation_page_is_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == render_metrics_doc()


def test_rows_are_complete_and_fit_the_table() -> None:
    for row in KEYS.values():
        assert row.unit
        assert row.meaning.endswith(".")
        assert "|" not in row.meaning + row.unit


def test_unknown_keys_are_found_and_open_prefixes_are_not() -> None:
    assert unknown_keys(["loss", "custom/mine", "rewards/length", "rewards/length/std", "ebft/rewrad"]) == ["ebft/rewrad"]
    known = ["eval/accuracy", "eval/other_set/accuracy", "eval/subset/hep-cpp", "eval/section/Chat Hard", "eval/other_set/subset/a/b"]
    assert unknown_keys([*known, "eval/acuracy", "eval/other_set/acuracy"]) == ["eval/acuracy", "eval/other_set/acuracy"]


def test_tensorboard_groups() -> None:
    assert tensorboard_tag("loss") == "train/loss"
    assert tensorboard_tag("time/score") == "time/score"
