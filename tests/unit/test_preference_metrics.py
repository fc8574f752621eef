"""Evaluation of a reward model: exact numbers, whatever the split over ranks, and what TensorBoard gets."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebft_ds.rewards.calibration import calibration_bins, expected_calibration_error
from ebft_ds.rewards.preference_loss import PreferenceLoss
from ebft_ds.rewards.preference_metrics import PreferenceTally, standard_deviation
from ebft_ds.rewards.reward_bench import ROW_WEIGHTS, SECTIONS, section_means
from ebft_ds.rewards.statistics import masked_std

VECTORS: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parents[1] / "data" / "reward_vectors.json").read_text())


def tally_of(rows: list[list[float]], **fields: Any) -> PreferenceTally:
    tally, loss = PreferenceTally(), PreferenceLoss()
    for row in rows:
        total, terms = loss.row(row)
        tally.add(row, loss=total, terms=terms, **fields)
    return tally


@pytest.mark.parametrize("case", VECTORS["bt_loss"], ids=lambda c: f"{c['chosen'][0]}-{c['rejected'][0]}")
def test_trl_metrics_but_for_ties(case: dict[str, Any]) -> None:
    pairs = [list(pair) for pair in zip(case["chosen"], case["rejected"], strict=True)]
    results, expected = tally_of(pairs).results(), case["metrics"]
    assert results.accuracy - results.tie_share / 2 == pytest.approx(expected["accuracy"]), "TRL counts a tie as wrong"
    assert results.margin == pytest.approx(expected["margin"])
    assert results.mean == pytest.approx(expected["mean_reward"])


def test_rewards_rounded_to_bf16_tie_and_a_tie_is_half() -> None:
    case = VECTORS["bf16_ties"][0]
    low, high = case["rewards_bf16"]
    rounded = tally_of([[high, low]]).results()
    assert (rounded.accuracy, rounded.tie_share) == (case["half_credit_accuracy_bf16"], 1.0)
    low, high = case["rewards_fp32"]
    assert tally_of([[high, low]]).results().accuracy == case["strict_accuracy_fp32"]


def test_an_uneven_tail_counts_by_rows() -> None:
    case = VECTORS["uneven_last_batch"][0]
    parts = [
        tally_of([[1.0, 0.0] if accuracy else [0.0, 1.0]] * count)
        for accuracy, count in zip(case["batch_acc"], case["batch_n"], strict=True)
    ]
    assert PreferenceTally.merged(parts).results().accuracy == pytest.approx(case["sample_weighted"], abs=1e-15)


def test_mean_and_deviation_of_all_responses() -> None:
    case = VECTORS["reward_norm"][0]
    chosen, rejected = case["rewards"][:3], case["rewards"][3:]
    results = tally_of([list(pair) for pair in zip(chosen, rejected, strict=True)]).results()
    assert results.mean == pytest.approx(case["mean"], abs=1e-15)
    assert results.std == pytest.approx(case["std_unbiased"], abs=1e-7)
    assert [(r - results.mean) / results.std for r in case["rewards"]] == pytest.approx(case["normalised"], abs=1e-6)
    assert (results.chosen_mean, results.rejected_mean) == (1.0, 0.5)
    assert results.chosen_std == pytest.approx(statistics.stdev(chosen))


@pytest.mark.parametrize("case", VECTORS["nanstd"], ids=lambda c: str(c["x"]))
def test_deviations_leave_missing_values_out(case: dict[str, Any]) -> None:
    values = torch.tensor([math.nan if v == "nan" else v for v in case["x"]])
    known = values[~values.isnan()].tolist()
    found = standard_deviation(known)
    assert math.isnan(found) if case["std"] == "nan" else found == pytest.approx(case["std"])
    masked = float(masked_std(values.nan_to_num(), ~values.isnan()))
    assert masked == pytest.approx(0.0 if case["std"] == "nan" else case["std"]), "undefined: 0, which divides nothing"


def test_calibration() -> None:
    case = VECTORS["calibration"][0]
    bins = calibration_bins(case["diffs"], len(case["bins"]))
    for found, (low, high, count, accuracy, confidence) in zip(bins, case["bins"], strict=True):
        assert (found.low, found.high, found.count) == (pytest.approx(low), pytest.approx(high), count)
        assert (found.accuracy, found.confidence) == (pytest.approx(accuracy, abs=1e-12), pytest.approx(confidence, abs=1e-12))
    assert expected_calibration_error(bins) == pytest.approx(case["ece"], abs=1e-12)
    assert tally_of([[d, 0.0] for d in case["diffs"]]).results().ece == pytest.approx(case["ece"], abs=1e-12)


def test_calibration_of_extreme_and_of_no_rewards() -> None:
    bins = calibration_bins([1e4, -1e4], 3)
    assert [b.count for b in bins] == [0, 0, 2]
    assert bins[2].confidence == 1.0
    assert expected_calibration_error(bins) == pytest.approx(0.5)
    assert math.isnan(expected_calibration_error(calibration_bins([])))
    with pytest.raises(ValueError, match="at least one bin"):
        calibration_bins([1.0], 0)


rows_of_rewards = st.lists(st.lists(st.floats(-1e3, 1e3).map(lambda v: float(torch.tensor(v))), min_size=2, max_size=4), max_size=12)


@settings(max_examples=60)
@given(rows=rows_of_rewards, ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_split_over_ranks_in_any_order_gives_the_same_bits(rows: list[list[float]], ranks: int, seed: int) -> None:
    order = list(rows)
    random.Random(seed).shuffle(order)
    shares = [tally_of(order[rank::ranks]) for rank in range(ranks)]
    arrived = [msgspec.msgpack.decode(msgspec.msgpack.encode(share)) for share in shares]
    assert repr(PreferenceTally.merged(arrived).results()) == repr(tally_of(rows).results())


def test_rankings_of_several() -> None:
    tally = tally_of([[3.0, 1.0, 2.0], [1.0, 1.0, 0.0, 1.0], [0.0, 1.0], [0.0, 5.0, 1.0]])
    results = tally.results()
    assert results.rows == 4
    assert results.pairs == 3 + 6 + 1 + 3
    assert results.best_of_n_accuracy == pytest.approx((1.0 + 1 / 3 + 0.0) / 3), "pairs are no ranking; three share the highest"
    assert results.accuracy == pytest.approx((2 + (3 * 0.5 + 2 + 0) + 0 + 1) / 13)
    assert results.loss == pytest.approx(sum(PreferenceLoss().row(row.rewards)[0] for row in tally.rows) / 13)
    assert sorted(tally.chosen + tally.rejected) == sorted(r for row in tally.rows for r in row.rewards)
    assert math.isnan(tally_of([[1.0, 0.0]]).results().best_of_n_accuracy)


def test_loss_is_per_term_of_its_kind() -> None:
    tally, luce = PreferenceTally(), PreferenceLoss("plackett_luce")
    for row in ([1.0, 0.0, 3.0], [0.5, 0.2]):
        loss, terms = luce.row(row)
        tally.add(row, loss=loss, terms=terms)
    assert tally.results().loss == pytest.approx((luce.row([1.0, 0.0, 3.0])[0] + luce.row([0.5, 0.2])[0]) / 2)


def test_soft_labels_count_on_their_side_and_labelled_ties_have_none() -> None:
    tally = PreferenceTally()
    for rewards, preference in [([2.0, 1.0], 0.2), ([1.0, 2.0], 0.2), ([5.0, 1.0], 0.5), ([1.0, 0.0], 0.9)]:
        tally.add(rewards, loss=0.0, preference=preference, subset="soft")
    results = tally.results()
    assert results.accuracy == pytest.approx(2 / 3)
    assert results.subsets == {"soft": (pytest.approx(2 / 3), 3)}
    assert (results.pairs, results.rows) == (4, 4)
    with pytest.raises(ValueError, match="two responses"):
        tally.add([1.0], loss=0.0)


def test_sections_of_reward_bench() -> None:
    subsets = {"alpacaeval-easy": (0.9, 100), "mt-bench-med": (0.5, 40), "math-prm": (0.6, 447), "hep-cpp": (0.8, 164), "mine": (0.1, 9)}
    means = section_means(subsets)
    assert means == {
        "Chat": pytest.approx((0.9 * 100 + 0.5 * 40) / 140),
        "Reasoning": pytest.approx((0.6 * 984 + 0.8 * 164) / (984 + 164)),
    }
    assert section_means(subsets, {"all": ["math-prm", "mine"], "none": ["other"]}) == {"all": pytest.approx((0.6 * 447 + 0.1 * 9) / 456)}
    assert Counter(name for names in SECTIONS.values() for name in names).most_common(1)[0][1] == 1
    assert sum(map(len, SECTIONS.values())) == 23
    assert set(ROW_WEIGHTS) == {"math-prm"}


def test_subsets_and_sections_of_a_tally() -> None:
    tally = tally_of([[1.0, 0.0]] * 3, subset="mt-bench-easy")
    tally.merge(tally_of([[0.0, 1.0]], subset="alpacaeval-hard"))
    tally.merge(tally_of([[0.0, 0.0]], subset="mine"))
    results = tally.results()
    assert results.subsets == {"alpacaeval-hard": (0.0, 1), "mine": (0.5, 1), "mt-bench-easy": (1.0, 3)}
    assert results.sections == {"Chat": 0.75}
    assert tally.results(sections={"ours": ["mine"]}).sections == {"ours": 0.5}


def test_metrics_table_and_json_hold_what_was_measured() -> None:
    results = tally_of([[1.0, 0.0], [0.0, 1.0], [2.0, 1.5]], subset="mt-bench-easy").results()
    metrics = results.to_metrics()
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/subset/mt-bench-easy"] == metrics["eval/section/Chat"] == pytest.approx(2 / 3)
    assert metrics["eval/rows"] == 3
    assert "eval/best_of_n_accuracy" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert set(results.to_metrics("eval/other/")) == {key.replace("eval/", "eval/other/") for key in metrics}
    assert "accuracy" in results.table()
    assert "section Chat" in results.table()
    decoded = json.loads(msgspec.json.encode(results))
    assert decoded["best_of_n_accuracy"] is None
    assert decoded["bins"][0]["low"] == 0.5


def test_nothing_evaluated() -> None:
    results = PreferenceTally().results()
    assert math.isnan(results.accuracy)
    assert results.to_metrics() == {"eval/pairs": 0.0, "eval/rows": 0.0}
